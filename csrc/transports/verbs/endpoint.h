// SPDX-License-Identifier: Apache-2.0
// The reader's end of one queue pair.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport_api/transport.h"
#include "transports/verbs/queue_pair.h"
#include "transports/verbs/rdma_cm.h"
#include "transports/verbs/work_requests.h"

namespace kvlink::verbs {

/// The way to one port of the owner.
struct Route {
  uint32_t owner_nic = 0;  // index in Address::nics
  std::string path;        // see Traits::path
  double width = 1;        // of the bytes that the widest may have under way
  Gid owner_gid{};
};

/// `cm` connects it. If it is null, the addresses in hello and reply do.
Result<std::unique_ptr<Endpoint>> open_endpoint(std::shared_ptr<Nic> nic, std::shared_ptr<CmPort> cm,
                                                Route route, std::vector<LocalRegion> locals,
                                                LivenessTimeouts timeouts);

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
// The reader's end of one queue pair.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport.h"
#include "verbs_chain.h"
#include "verbs_cm.h"
#include "verbs_qp.h"

namespace kvlink::verbs {

/// A port of the owner: its index in Address::nics, and its name.
struct OwnerNic {
  uint32_t index = 0;
  std::string name;
};

/// `cm` connects it, or when null the addresses in hello and reply do.
Result<std::unique_ptr<Endpoint>> open_endpoint(std::shared_ptr<Nic> nic, std::shared_ptr<CmPort> cm,
                                                OwnerNic owner, std::vector<LocalRegion> locals,
                                                Patience patience);

}  // namespace kvlink::verbs

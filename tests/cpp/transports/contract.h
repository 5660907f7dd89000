// SPDX-License-Identifier: Apache-2.0
// The contract's calls as most tests want them.
#pragma once

#include "base/clock.h"
#include "transport_api/transport.h"

namespace kvlink::testing {

inline PollResult poll_once(Endpoint& endpoint, std::vector<Completion>& ended) {
  return endpoint.poll(now_ns(), false, ended);
}

inline Result<std::unique_ptr<Endpoint>> open_one(Transport& transport, std::string_view address,
                                                  const WorkerRun& owner = {}) {
  Result<Endpoints> opened = transport.open(address, 1, owner);
  if (!opened.ok()) return opened.status();
  return std::move(opened->front());
}

}  // namespace kvlink::testing

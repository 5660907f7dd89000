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
#include "verbs_qp.h"

namespace kvlink::verbs {

/// `owner_nic` is an index into the owner's Address::nics.
Result<std::unique_ptr<Endpoint>> open_endpoint(std::shared_ptr<Nic> nic, uint32_t owner_nic,
                                                std::vector<LocalRegion> locals, Patience patience);

}  // namespace kvlink::verbs

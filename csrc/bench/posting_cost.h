// SPDX-License-Identifier: Apache-2.0
// What posting costs the CPU where there is no NIC.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "plan/planner.h"

namespace kvlink {

/// CPU nanoseconds of checking, chaining and posting a whole plan once, the best of `rounds`. The queue pair
/// behind ibv_post_send is one whose provider writes each work request to a ring the way NICs want them (a
/// control segment, the remote address, one pointer a local segment) and rings no doorbell: those cost what
/// the NIC makes them cost, once per chain.
Result<int64_t> time_posting(const Plan& plan, uint32_t rounds);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Measures what posting costs the CPU, without a NIC.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "plan/planner.h"

namespace kvlink {

/// Returns the CPU nanoseconds of checking, chaining and posting a whole plan once, the best of `rounds`. The
/// provider behind ibv_post_send writes each work request to a ring as NICs expect it (a control segment, the
/// remote address, one pointer per local segment). It rings no doorbell, whose cost depends on the NIC and
/// arises once per chain.
Result<int64_t> time_posting(const Plan& plan, uint32_t rounds);

}  // namespace kvlink

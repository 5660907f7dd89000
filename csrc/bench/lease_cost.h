// SPDX-License-Identifier: Apache-2.0
// Measures what a lease table costs its owner's CPU, by the number of slots and of leases out.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace kvlink {

/// A table of `num_slots`, `num_leases` of which are granted, and whose readers do nothing. REQUIRES that a
/// slot is left.
struct LeasesOut {
  uint32_t num_slots, num_leases;
};

/// Returns the CPU nanoseconds of one sweep, the least of `rounds`.
Result<int64_t> time_sweep(const LeasesOut& out, uint32_t rounds);
/// Returns the CPU nanoseconds of one grant at a seat that the caller chose, the least of `rounds`.
Result<int64_t> time_grant_at(const LeasesOut& out, uint32_t rounds);
/// Returns the CPU nanoseconds of one revoke of a thousand blocks that no soft lease covers, the least of
/// `rounds`. The leases that are out are soft, and each covers kSoftBlocks blocks.
Result<int64_t> time_vain_revoke(const LeasesOut& out, uint32_t rounds);
/// Returns the CPU nanoseconds of one revoke of a block that a soft lease covers, the least of `rounds`.
Result<int64_t> time_revoke(const LeasesOut& out, uint32_t rounds);
inline constexpr uint32_t kSoftBlocks = 256;

}  // namespace kvlink

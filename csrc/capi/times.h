// SPDX-License-Identifier: Apache-2.0
// Durations of the program, in microseconds.
#pragma once

#include <cstdint>

#include "capi/outcome.h"

namespace kvlink::capi {

inline constexpr uint64_t kMostUs = uint64_t{86'400} * 1'000'000;  // a day

/// 0 stands for `usual`.
inline Outcome take_time(uint64_t us, uint64_t usual, int64_t& ns) {
  if (us > kMostUs) return refuse("a time has more than 86400000000 us, which is a day");
  ns = static_cast<int64_t>(us == 0 ? usual : us) * 1000;
  return {};
}

/// Takes the time of a wait, where more than a day is as long as it takes.
inline int64_t wait_ns(uint64_t us) { return us > kMostUs ? -1 : static_cast<int64_t>(us) * 1000; }

}  // namespace kvlink::capi

// SPDX-License-Identifier: Apache-2.0
// The one clock of the data plane: monotonic, in nanoseconds, never compared between hosts.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvlink {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace kvlink

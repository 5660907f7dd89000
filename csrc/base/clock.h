// SPDX-License-Identifier: Apache-2.0
// The one clock of the data plane: monotonic, in nanoseconds, never compared between hosts.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvlink {

#ifdef KVLINK_SIMULATED_SYNC
int64_t now_ns();
#else
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
#endif

/// What is done now and then, and at the first call.
class Interval {
 public:
  explicit Interval(int64_t ns) : ns_(ns) {}
  bool due(int64_t now) {
    if (now - last_ns_ < ns_) return false;
    last_ns_ = now;
    return true;
  }

 private:
  const int64_t ns_;
  int64_t last_ns_ = 0;
};

}  // namespace kvlink

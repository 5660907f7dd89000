// SPDX-License-Identifier: Apache-2.0
// The one clock of the data plane is monotonic, counts nanoseconds, and is never compared between hosts.
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

/// Says when work is due that is done once per interval, and at the first call.
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

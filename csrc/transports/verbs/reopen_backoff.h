// SPDX-License-Identifier: Apache-2.0
// Decides when to look again for a device that went away. Pure: takes the time as a value.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvlink::verbs {

class ReopenBackoff {
 public:
  static constexpr int64_t kFirstNs = 100'000'000;
  static constexpr int64_t kLongestNs = 5'000'000'000;
  static constexpr int64_t kSteadyNs =
      60'000'000'000;  // a device that stayed this long is expected back at once

  /// The device went. One that comes and goes is looked for less and less often.
  void lost(int64_t now) {
    if (!found_ || now - found_ns_ >= kSteadyNs) delay_ns_ = kFirstNs;
    due_ns_ = now + delay_ns_;
  }
  bool due(int64_t now) const { return now >= due_ns_; }
  /// The device was not found.
  void missed(int64_t now) {
    delay_ns_ = std::min(2 * delay_ns_, kLongestNs);
    due_ns_ = now + delay_ns_;
  }
  void found(int64_t now) {
    found_ = true;
    found_ns_ = now;
    delay_ns_ = std::min(2 * delay_ns_, kLongestNs);
  }

 private:
  bool found_ = false;
  int64_t found_ns_ = 0, due_ns_ = 0, delay_ns_ = kFirstNs;
};

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
// Decides which work a second thread shares, by how long it takes to wake: 30 to 50 us on the VMs where it
// was measured, as long as copying 400 KiB, and a few on machines whose idle cores do not sleep. Pure, and
// used by one thread at a time.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvlink {

class SharingPolicy {
 public:
  /// Returns whether work that takes one thread `alone_ns` is to be shared.
  bool shares(int64_t alone_ns) {
    if (num_skipped_ < num_to_skip_ || (alone_ns < kWorthWakes * wake_ns_ && num_skipped_ < kMostSkipped)) {
      ++num_skipped_;
      return false;
    }
    num_skipped_ = 0;
    return true;
  }

  /// Shared work is done. `woken_ns`: from the call until the second thread began, or until the caller had
  /// done all. `late`: the second thread took too little of it to be of use.
  void learn(int64_t woken_ns, bool late) {
    wake_ns_ += (std::min(woken_ns, kMostWakeNs) - wake_ns_) / (wake_ns_ == 0 ? 1 : kAverageOf);
    num_to_skip_ = late ? std::min(2 * num_to_skip_ + 1, kMostSkipped) : 0;
  }

 private:
  // At 4 both threads have work for as long again as the first had before the second began.
  static constexpr int64_t kWorthWakes = 4;
  static constexpr int64_t kAverageOf = 4;
  // More is the scheduler's doing, since another thread had the core. Work of 200 us is worth a try anywhere.
  static constexpr int64_t kMostWakeNs = 50'000;
  // Work in a row that is not shared. Then one is, to see if the machine has changed.
  static constexpr uint32_t kMostSkipped = 256;

  int64_t wake_ns_ = 0;
  uint32_t num_skipped_ = 0, num_to_skip_ = 0;
};

}  // namespace kvlink

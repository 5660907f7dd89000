// SPDX-License-Identifier: Apache-2.0
// Decides how long a NIC may be silent. Pure: takes the time as a value.
//
// A pull ends, or continues on another NIC, within a second after a device was removed or a port went down.
// An owner whose device went without an event finds out (kLookNs) and tells its readers (kNotifyNs). A reader
// that was not told asks now and then if it has nothing under way (kTickNs), gives up an owner that stays
// silent (kSilenceNs), and flushes its queue pair (kFlushNs).
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvlink::verbs {

inline constexpr int64_t kLookNs = 100'000'000;   // a look costs a system call a port
inline constexpr int64_t kNotifyNs = 20'000'000;  // a round trip of any fabric, on a busy machine
inline constexpr int64_t kTickNs = 100'000'000;
// Several times what a NIC needs to resend lost packets; see LivenessTimeouts.
inline constexpr int64_t kSilenceNs = 600'000'000;
// A halted queue pair flushes in microseconds; a broken NIC never does.
inline constexpr int64_t kFlushNs = 100'000'000;
static_assert(kLookNs + kNotifyNs + kTickNs + kSilenceNs + kFlushNs < 1'000'000'000);

class Liveness {
 public:
  explicit Liveness(int64_t most_ns = kSilenceNs) : most_ns_(most_ns) {}

  /// To be called when the other end has answered.
  void answered() { silent_ns_ = looked_ns_ = idle_since_ns_ = 0; }
  /// The other end was asked and has not answered. Returns true if that lasts too long. Time that this
  /// process itself missed, stopped or without a CPU, counts for two ticks at most.
  bool too_long(int64_t now) {
    if (looked_ns_ != 0) silent_ns_ += std::min(now - looked_ns_, 2 * kTickNs);
    looked_ns_ = now;
    return silent_ns_ >= most_ns_;
  }
  /// The other end is not asked for anything. Returns true when it is time to.
  bool idle_too_long(int64_t now) {
    if (idle_since_ns_ == 0) idle_since_ns_ = now;
    return now - idle_since_ns_ >= kTickNs;
  }
  /// Returns when to call one of them again.
  int64_t next_check_ns() const {
    if (looked_ns_ != 0) return looked_ns_ + std::min(most_ns_ - silent_ns_, kTickNs);
    return idle_since_ns_ != 0 ? idle_since_ns_ + kTickNs : INT64_MAX;
  }

 private:
  int64_t most_ns_;
  int64_t silent_ns_ = 0;      // so far
  int64_t looked_ns_ = 0;      // when last in vain; 0: not since the other end answered
  int64_t idle_since_ns_ = 0;  // 0: it is not
};

}  // namespace kvlink::verbs

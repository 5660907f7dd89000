// SPDX-License-Identifier: Apache-2.0
// A descriptor for work that does not signal its end. It becomes readable when it is time to poll again, or
// when another descriptor does.
#pragma once

#ifdef KVLINK_SIMULATED_SYNC
#include "simulated_poll_timer.h"
#else

#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/sys.h"
#include "base/unique_fd.h"

namespace kvlink {

/// Polls soon, then less and less often. Each wait is longer than the one before by `longer_by` eighths.
class PollTimer {
 public:
  PollTimer(int64_t first_ns, int64_t last_ns, int64_t longer_by)
      : first_ns_(first_ns), last_ns_(last_ns), longer_by_(longer_by) {}

  /// `other` is borrowed until close(); -1 means none.
  Status open(int other) {
    static const std::string kDoing = "cannot watch a connection";
    Result<UniqueFd> timer = sys::timer(kDoing, Code::kTransportUnavailable),
                     either = sys::epoll(kDoing, Code::kTransportUnavailable);
    if (!timer.ok()) return timer.status();
    if (!either.ok()) return either.status();
    timer_ = std::move(*timer);
    either_ = std::move(*either);
    const bool opened = add(timer_.get()) && (other < 0 || add(other));
    return opened ? Status{} : sys::failed(Code::kTransportUnavailable, kDoing, "epoll_ctl", errno);
  }
  int fd() const { return either_.get(); }
  /// To be called before sleeping. `looks` says whether there is work to poll for.
  void arm(bool looks) {
    if (looks || ns_ > 0) set(looks ? std::clamp(ns_ + ns_ * longer_by_ / 8, first_ns_, last_ns_) : 0);
  }
  /// To be called when work has ended: the next poll is soon again.
  void progressed() {
    if (ns_ > 0) set(0);
  }
  void close() {
    either_.reset();
    timer_.reset();
  }

 private:
  bool add(int fd) { return sys::watch(either_.get(), fd, EPOLLIN, 0); }
  /// Sets the timer; 0 stops it. Either makes it unreadable.
  void set(int64_t ns) {
    ns_ = ns;
    const itimerspec after{{}, {0, ns}};
    ::timerfd_settime(timer_.get(), 0, &after, nullptr);
  }

  const int64_t first_ns_, last_ns_, longer_by_;
  UniqueFd timer_, either_;
  int64_t ns_ = 0;  // until the next look; 0: the timer is not set
};

}  // namespace kvlink

#endif

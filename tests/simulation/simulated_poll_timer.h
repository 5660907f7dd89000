// SPDX-License-Identifier: Apache-2.0
// csrc/base/poll_timer.h in the simulation.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simulated_sync.h"

namespace kvlink {

class PollTimer {
 public:
  PollTimer(int64_t first_ns, int64_t last_ns, int64_t longer_by)
      : first_ns_(first_ns), last_ns_(last_ns), longer_by_(longer_by) {}

  Status open(int other) {
    fd_ = simulation::open_fd(other);
    return {};
  }
  int fd() const { return fd_; }
  void arm(bool looks) {
    if (looks || ns_ > 0) set(looks ? std::clamp(ns_ + ns_ * longer_by_ / 8, first_ns_, last_ns_) : 0);
  }
  void progressed() {
    if (ns_ > 0) set(0);
  }
  void close() { simulation::close_fd(fd_); }

 private:
  void set(int64_t ns) {
    ns_ = ns;
    simulation::set_timer(fd_, ns);
  }

  const int64_t first_ns_, last_ns_, longer_by_;
  int fd_ = -1;
  int64_t ns_ = 0;
};

}  // namespace kvlink

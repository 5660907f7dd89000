// SPDX-License-Identifier: Apache-2.0
// The thread that drives lanes. It is busy while bytes move and asleep otherwise.
#pragma once

#include <poll.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "base/unique_fd.h"
#include "engine/lane.h"

namespace kvlink {

class ProgressThread final : public LaneDriver {
 public:
  static Result<std::shared_ptr<ProgressThread>> make();
  ~ProgressThread() override { stop(); }

  void add(std::shared_ptr<Lane> lane);
  void remove(const std::shared_ptr<Lane>& lane);
  /// Costs nothing while the thread is awake.
  void wake() override;
  void wake_from_doze() override;
  /// Idempotent. Joins the thread and closes the descriptor.
  void stop();

 private:
  explicit ProgressThread(UniqueFd wake_fd) : wake_fd_(std::move(wake_fd)) {}
  void run();
  static Lane::Rest arm_all(const std::vector<std::shared_ptr<Lane>>& lanes);
  /// `fds` are the wake descriptor, then one per lane. Returns false if only the time has come.
  bool sleep_until(int64_t wake_at_ns, std::vector<pollfd>& fds,
                   const std::vector<std::shared_ptr<Lane>>& lanes);

  Mutex mutex_;  // guards lanes_
  std::vector<std::shared_ptr<Lane>> lanes_;
  Atomic<bool> stopping_{false};
  Atomic<bool> asleep_{false};
  Atomic<bool> dozing_{false};  // asleep for longer than kTickNs
  Atomic<uint64_t> wakes_{0};
  Mutex waking_;  // guards wake_fd_ against the end of the thread, which may use it without
  UniqueFd wake_fd_;
  Thread thread_;
};

}  // namespace kvlink

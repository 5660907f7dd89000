// SPDX-License-Identifier: Apache-2.0
// The thread that drives lanes: busy while bytes move, asleep otherwise.
#pragma once

#include <poll.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "fd.h"
#include "lane.h"
#include "status.h"

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
  /// Idempotent; joins.
  void stop();

 private:
  explicit ProgressThread(UniqueFd wake_fd) : wake_fd_(std::move(wake_fd)) {}
  void run();
  static Lane::Rest arm_all(const std::vector<std::shared_ptr<Lane>>& lanes);
  /// `fds` are the wake descriptor, then one a lane. False: only the time had come.
  bool sleep_until(int64_t wake_at_ns, std::vector<pollfd>& fds,
                   const std::vector<std::shared_ptr<Lane>>& lanes);

  std::mutex mutex_;  // guards lanes_
  std::vector<std::shared_ptr<Lane>> lanes_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> dozing_{false};  // asleep for longer than kTickNs
  std::atomic<uint64_t> wakes_{0};
  UniqueFd wake_fd_;
  std::thread thread_;
};

}  // namespace kvlink

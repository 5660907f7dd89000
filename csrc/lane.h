// SPDX-License-Identifier: Apache-2.0
// One endpoint with the transfers that use it. A connection has one or more lanes; each lane takes chunks
// from the transfers in its queue as its endpoint has room, so a fast lane carries more and a broken one
// loses nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transfer.h"
#include "transport.h"

namespace kvlink {

/// Driven by whoever holds the lane: the progress thread, or a caller that runs its small pull inline.
class Lane {
 public:
  struct Driven {
    bool progressed = false;
    bool held = false;               // by somebody else, who wakes the thread when work is left
    bool active = false;             // transfers are queued
    int64_t wake_at_ns = INT64_MAX;  // next deadline or streaming peek
  };

  Lane(std::unique_ptr<Endpoint> endpoint, uint32_t index);
  ~Lane() { close("the connection was closed"); }

  /// REQUIRES establish() to have succeeded. Fixes what every later pull needs.
  void ready(uint32_t lease_region, uint64_t connection_id);
  Endpoint& endpoint() { return *endpoint_; }  // only while connecting, or for what is constant

  /// Queues a transfer; any thread. The caller then wakes the driver.
  void submit(std::shared_ptr<Transfer> transfer);
  /// One bounded round: take over, drop, post, poll. Nothing when somebody else holds the lane.
  Driven drive();
  /// A settle is posted and not sent: it leaves with the next pull's request, or when drive() is next called.
  bool unsent() const { return unsent_.load(std::memory_order_acquire); }
  /// Drives until the transfer ended, the lane broke or `budget_ns` passed; 0: one round. False: the lane is
  /// busy, nothing was done.
  bool run_inline(const std::shared_ptr<Transfer>& transfer, int64_t budget_ns);
  /// Drives until the transfer ended, `until_ns` passed, somebody else holds the lane, or there is nothing to
  /// do but wait, which it does for a while where a device has the work. False: nothing was done. Work may be
  /// left: the caller then wakes the driver.
  bool help(const Transfer& transfer, int64_t until_ns);
  /// Notices an owner that died while the lane was idle. When somebody else holds the lane, waits or does
  /// nothing.
  void check_idle(bool wait);
  /// Posts a settle that nobody waits for. False: the lane is broken.
  bool settle(uint32_t slot, uint64_t value);

  /// Nanoseconds from post to completion of a read outside of any transfer. REQUIRES an idle lane.
  Result<int64_t> time_read(const Chunk& chunk);

  bool broken() const { return broken_.load(std::memory_order_acquire); }
  Status why_broken() const;
  uint32_t pending() const { return pending_.load(std::memory_order_acquire); }
  bool idle() const { return pending() == 0; }
  bool copies_in_poll() const { return endpoint_->copies_in_poll(); }
  /// Before sleeping on wake_fd(). False: drive() has something to do already.
  bool arm();
  int wake_fd() const { return wake_fd_; }
  void close(const std::string& why);

 private:
  struct Posted {
    std::shared_ptr<Transfer> transfer;  // null: a free entry, or a settle that nobody waits for
    Step step;
    bool used = false;
    int64_t recalled_ns = 0;  // when it was cancelled in vain; 0: not
  };

  Driven drive_locked(int64_t now, bool send_settles);
  void take_inbox();
  void drop_stopped(int64_t now);
  void recall(const std::shared_ptr<Transfer>& transfer, int64_t now);
  bool post_steps(int64_t now);
  Status post(const std::shared_ptr<Transfer>& transfer, const Step& step, uint64_t token);
  bool poll();  // true: something moved
  void collect(int64_t now);
  void give_up(const Status& why);
  void break_down(const Status& why, int64_t now);
  void await_bytes(int64_t waited_ns, int64_t left_ns);
  bool is_silent(int64_t now) const;
  bool hears_at_last(int64_t now);
  uint64_t claim_token(std::shared_ptr<Transfer> transfer, const Step& step);
  void release(uint64_t token);
  void disown(uint64_t token);

  const uint32_t index_;
  std::unique_ptr<Endpoint> endpoint_;
  Window window_;
  bool ordered_ = false;
  bool order_stalls_ = false;
  int wake_fd_ = -1;
  uint32_t lease_region_ = 0;
  uint64_t connection_id_ = 0;

  std::atomic<uint32_t> pending_{0};  // transfers queued or in the inbox
  std::atomic<bool> broken_{false};
  std::atomic<bool> unsent_{false};

  std::mutex inbox_mutex_;  // never held while posting or copying
  std::vector<std::shared_ptr<Transfer>> inbox_;

  mutable std::mutex mutex_;  // serialises the endpoint; guards everything below
  std::vector<std::shared_ptr<Transfer>> queue_;
  size_t turn_ = 0;  // round robin over the queue
  std::vector<Posted> posted_;
  uint32_t num_posted_ = 0;
  uint32_t num_awaited_ = 0;  // of them, those that a transfer waits for
  uint64_t bytes_under_way_ = 0;
  int64_t give_up_ns_ = INT64_MAX;  // when reads that cannot be called back end with the connection
  int64_t asked_ns_ = 0;            // when the owner was asked for what it has not answered since; 0: nothing
  int32_t spin_credit_ = 0;         // negative: so many waits go without spinning
  std::vector<Completion> ended_;
  Status why_broken_;
  bool closed_ = false;
};

}  // namespace kvlink

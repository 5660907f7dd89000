// SPDX-License-Identifier: Apache-2.0
// One endpoint and the transfers that use it. A connection has one or more lanes. Each takes chunks from the
// transfers in its queue as its endpoint has room, so a fast lane carries more and a broken one loses
// nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "engine/transfer.h"
#include "lease/lease_words.h"
#include "staging/staged_transport.h"
#include "transport_api/transport.h"

namespace kvlink {

/// Shared by the lanes of a connection. Any thread.
class AnnouncedReaders {
 public:
  explicit AnnouncedReaders(uint32_t connection) : connection_(connection) {}

  /// Returns the word that announces this connection.
  uint64_t announcement(uint64_t nonce) const {
    return Announcement{connection_, Announcement::tag_of(nonce)}.word();
  }
  uint64_t withdrawal(uint64_t nonce) const {
    return Announcement{connection_, Announcement::tag_of(nonce), true}.word();
  }

  /// Counts one more pull that reads under the lease with this nonce.
  void begin(uint64_t nonce) {
    const std::lock_guard lock(mutex_);
    ++pulls_[nonce];
  }
  /// Counts one pull less, if `is_first()`: no lane has reported its end before. Returns true if no pull
  /// reads under the lease any more, whichever lane asks.
  template <typename IsFirst>
  bool end(uint64_t nonce, IsFirst is_first) {
    const std::lock_guard lock(mutex_);
    const auto found = pulls_.find(nonce);
    if (found == pulls_.end()) return true;
    if (is_first() && --found->second == 0) pulls_.erase(found);
    return !pulls_.contains(nonce);
  }

 private:
  const uint32_t connection_;
  Mutex mutex_;
  std::unordered_map<uint64_t, uint32_t> pulls_;  // by nonce
};

/// Drives lanes that no other thread drives, and sleeps while it has nothing to do. Any thread.
class LaneDriver {
 public:
  virtual ~LaneDriver() = default;
  virtual void wake() = 0;
  /// Like wake(), except that a driver that looks again within a millisecond may sleep on.
  virtual void wake_from_doze() = 0;
};

/// The parts of a lane.
struct LaneEnd {
  std::unique_ptr<Endpoint> endpoint;
  StageableEndpoint* staging = nullptr;  // the same one, where reads may be staged
};

/// The owner's lease regions, as the endpoint numbers them.
struct LeaseRegions {
  uint32_t slots = 0, words = 0;
};

/// A settle: a word that is stored into the owner's peer words.
struct LaneWord {
  uint32_t slot = 0;
  uint64_t value = 0;
};

/// One thread at a time holds the lane: its driver, or a caller that drives it for a pull, settles or checks
/// it. A holder sees completions and submissions that others wait for, and makes the driver skip the lane. So
/// every holder except the driver wakes the driver after releasing the lane, if work is left.
class Lane {
 public:
  struct Driven {
    bool progressed = false;
    bool held = false;               // by another thread; nothing was done, and nothing here is known
    bool active = false;             // transfers are queued
    int64_t wake_at_ns = INT64_MAX;  // next deadline or streaming peek
  };
  enum class Rest : uint8_t { kNone, kShort, kLong };

  Lane(LaneEnd end, uint32_t index);
  ~Lane() { close("the connection was closed"); }

  /// REQUIRES establish() to have succeeded. Sets what every later pull needs. `readers` is null if readers
  /// need not announce themselves.
  void ready(LeaseRegions leases, std::shared_ptr<AnnouncedReaders> readers,
             std::shared_ptr<LaneDriver> driver);
  /// Sets what is called when take_lost() has something, on a thread that holds the lane. To be called before
  /// ready().
  void on_lost(std::function<void()> call) { on_lost_ = std::move(call); }
  Endpoint& endpoint() { return *endpoint_; }  // only while connecting, or for what is constant
  const Traits& traits() const { return traits_; }
  uint32_t index() const { return index_; }  // among the lanes of a connection that had an endpoint

  /// Queues a transfer and wakes the driver. Any thread.
  void submit(std::shared_ptr<Transfer> transfer);
  /// Runs one bounded round: take over, drop, post, poll. Does nothing if another thread holds the lane.
  Driven drive();
  /// Returns whether there are posts that no transfer waits for, mostly settles. They leave with the next
  /// pull's request, or at the next drive().
  bool has_unflushed_writes() const {
    return unsent_.load(std::memory_order_acquire) || has_words_.load(std::memory_order_acquire);
  }
  /// Drives until the transfer ended, the lane broke or `budget_ns` passed; 0 means one round. Returns false
  /// if the lane is busy and nothing was done.
  bool run_inline(const std::shared_ptr<Transfer>& transfer, int64_t budget_ns);
  /// Drives until the transfer ended, `until_ns` passed, another thread holds the lane, or only waiting is
  /// left. If a device moves the bytes, it polls on for a while. Returns false if nothing was done.
  bool drive_for(const Transfer& transfer, int64_t until_ns);
  /// Notices an owner that died while the lane was idle. If another thread holds the lane, waits or does
  /// nothing.
  void check_idle(bool wait);
  /// Posts a settle that no caller waits for, or queues it while another thread holds the lane, which may
  /// copy for another pull. Returns false if the lane is broken.
  bool settle(LaneWord word);
  /// Returns the settles that were queued when the lane broke, since the last call.
  std::vector<LaneWord> take_lost();

  /// Returns the nanoseconds from post to completion of a read outside of any transfer, on an idle lane.
  Result<int64_t> time_read(const Chunk& chunk);

  bool broken() const { return broken_.load(std::memory_order_acquire); }
  Status why_broken() const { return broken() ? why_broken_ : Status{}; }
  uint32_t pending() const { return pending_.load(std::memory_order_acquire); }
  bool idle() const { return pending() == 0; }
  /// The driver calls this before it sleeps on Traits::wake_fd. kNone: drive() already has work. kShort:
  /// another thread holds the lane, so the descriptor may not signal.
  Rest arm();
  void close(const std::string& why);

 private:
  struct Posted {
    std::shared_ptr<Transfer> transfer;  // null: a free entry, or a settle that nobody waits for
    Step step;
    bool used = false;
    int64_t cancelled_ns = 0;  // when it was cancelled in vain; 0: not
  };
  /// Holds the lane for a caller that is not its driver.
  class Hold {
   public:
    explicit Hold(Lane& lane) : lane_(lane), lock_(lane.mutex_) {}
    Hold(Lane& lane, std::try_to_lock_t) : lane_(lane), lock_(lane.mutex_, std::try_to_lock) {}
    ~Hold() {
      if (!lock_) return;
      lock_.unlock();  // first: a driver that wakes at once must not meet a held lane
      lane_.wake_driver();
    }
    explicit operator bool() const { return lock_.owns_lock(); }

   private:
    Lane& lane_;
    std::unique_lock<Mutex> lock_;
  };

  void wake_driver();  // if work is left
  Driven drive_locked(int64_t now, bool send_settles);
  Driven drive_round(int64_t now, bool send_settles);
  template <typename Work>
  void guarded(int64_t now, Work work);
  void take_inbox();
  void advance_deadlines(int64_t now);
  void cancel_posts(const std::shared_ptr<Transfer>& transfer, int64_t now);
  bool post_steps(int64_t now);
  Status post(const std::shared_ptr<Transfer>& transfer, const Step& step, uint64_t token);
  Status announce(Transfer& transfer);
  void withdraw(Transfer& transfer);
  Status post_word(uint64_t offset, uint64_t value);
  bool post_settle(LaneWord word);
  bool poll(int64_t now);  // true: something moved
  void collect(int64_t now);
  void give_up(const Status& why);
  void break_down(const Status& why, int64_t now);
  void await_bytes(int64_t waited_ns, int64_t left_ns);
  bool is_silent(int64_t now) const;
  bool poll_before_timeout(int64_t now);
  uint64_t claim_token(std::shared_ptr<Transfer> transfer, const Step& step);
  void release(uint64_t token);
  void detach_token(uint64_t token);

  const uint32_t index_;
  std::unique_ptr<Endpoint> endpoint_;
  StageableEndpoint* const staging_;
  Traits traits_;  // constant from ready() on
  LeaseRegions leases_;
  std::shared_ptr<AnnouncedReaders> readers_;
  std::shared_ptr<LaneDriver> driver_;
  std::function<void()> on_lost_;

  Atomic<uint32_t> pending_{0};  // transfers queued or in the inbox
  Atomic<bool> broken_{false};
  Atomic<bool> unsent_{false};
  Atomic<bool> has_words_{false};

  Mutex inbox_mutex_;  // never held while posting or copying
  std::vector<std::shared_ptr<Transfer>> inbox_;
  std::vector<LaneWord> words_, lost_;

  Mutex mutex_;  // serialises the endpoint; guards everything below
  std::vector<std::shared_ptr<Transfer>> queue_;
  size_t turn_ = 0;  // round robin over the queue
  std::vector<Posted> posted_;
  uint32_t num_posted_ = 0;
  uint32_t num_awaited_ = 0;  // of them, those that a transfer waits for
  uint64_t bytes_under_way_ = 0;
  int64_t give_up_ns_ = INT64_MAX;  // when reads that cannot be called back end with the connection
  int64_t asked_ns_ = 0;            // when the owner was asked for what it has not answered since; 0: nothing
  int64_t next_check_ns_ = 0;       // when to poll for the sake of a pull that waits
  int32_t spin_credit_ = 0;         // negative: so many waits go without spinning
  std::vector<Completion> ended_;
  Status why_broken_;  // constant once broken()
  bool closed_ = false;
};

}  // namespace kvlink

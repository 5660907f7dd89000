// SPDX-License-Identifier: Apache-2.0
// One pull from one owner, as a state machine: peek (streaming, or after a cut) -> read -> validate -> settle
// -> ended.
//
// Pure except for wait(): it takes the time and what happened, and returns the next Step. Lanes
// (engine/lane.h) turn steps into posts. Every method may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/process_mark.h"
#include "base/status.h"
#include "base/sync.h"
#include "engine/path_stats.h"
#include "engine/stream_planner.h"
#include "staging/staging_policy.h"
#include "transport_api/transport.h"

namespace kvlink {

struct TransferStats {
  uint64_t bytes = 0;
  uint64_t num_ops = 0, num_segments = 0;
  uint64_t redone = 0;  // steps that a lane returned
  int64_t plan_ns = 0, read_ns = 0, validate_ns = 0, settle_ns = 0, total_ns = 0;
  int64_t post_ns = 0;  // part of read_ns; lanes that post at the same time count each
  bool ran_inline = false;
  bool settled = false;
  bool soft = false;        // its seat is shared
  bool alone = false;       // nothing else was under way when it started, and it did not wait for its owner
  double predicted_us = 0;  // of total_ns, by the path's cost model; 0 if it streams
  // If there is a staging buffer: the predicted time of both ways, and whether any of the pull was staged.
  Predictions predicted = {};
  bool staged = false;
};

/// The next work of a lane for a transfer.
struct Step {
  enum class Kind : uint8_t { kNone, kReads, kSlot, kSettle };
  Kind kind = Kind::kNone;
  uint32_t first_op = 0, num_ops = 0;
  uint64_t bytes = 0;  // of kReads
  uint32_t lane = 0;   // that took it
};

enum class TransferState : uint8_t {
  kPending,
  kFailed,
  kValid,    // all bytes landed and validated; the owner keeps its blocks until the lease ends
  kSettled,  // valid, and the owner has been told
};

class Transfer;

/// Learns how the transfers of a pull end. Called once for each, on threads of lanes, with the transfer's
/// lock held: it must not block, and must not call the transfer.
class TransferObserver {
 public:
  virtual ~TransferObserver() = default;
  /// `code` is that of the status of a transfer that failed.
  virtual void transfer_ended(uint32_t part, TransferState state, Code code) = 0;
};

/// How a transfer reaches the lanes that carry it, and their properties. Any thread.
struct TransferDriver {
  std::function<void()> wake;  // after cancel(), and when one lane leaves work to the others
  /// Drives the lanes on the calling thread until `until_ns`, or as long as they can use a thread.
  std::function<void(const Transfer&, int64_t until_ns)> drive_for;
  std::shared_ptr<StagingPolicy> policy = nullptr;  // decides which reads are staged; null: none can be
  bool supports_repeats = false;                    // see Traits
};

/// Returns the plan of a request that does not stream, for PullRequest::prepared.
Result<std::shared_ptr<const Plan>> prepare_plan(const PullRequest& request, const TransferDriver& driver);

class Transfer {
 public:
  /// Plans what is ready now. If a request cannot be planned, the transfer has failed already. `path_stats`,
  /// if set, is updated once, when the transfer ends.
  Transfer(const PullRequest& request, int64_t now_ns, std::shared_ptr<const TransferDriver> driver,
           std::shared_ptr<PathStats> path_stats = nullptr);

  // The caller's side. Returns kConfig in a forked child, unless the transfer had ended before.
  Status check_process() const { return done() ? Status{} : process_.check(); }
  TransferState state() const { return state_.load(std::memory_order_acquire); }
  bool done() const { return state() != TransferState::kPending; }
  /// Drives the lanes if a thread of this process copies the bytes: the waiting thread has the time, and
  /// waking another thread costs 20 to 50 us each way. A negative timeout waits for ever. A positive one may
  /// be exceeded by what one poll() of an endpoint copies. Returns false if the transfer still runs.
  bool wait(int64_t timeout_ns);
  Status status() const;
  TransferStats stats() const;
  /// Returns whether another thread uses the transfer now, for example to plan what became ready.
  bool busy() const { return !std::unique_lock(mutex_, std::try_to_lock); }
  /// A streaming pull: so many units have landed and validated. Nothing writes their bytes any more, so
  /// others may read them, also after the pull has failed.
  uint64_t proven_units() const { return proven_units_.load(std::memory_order_acquire); }
  /// Requests the end. Once done() returns true, no late byte lands.
  void cancel();
  /// Returns false if the transfer has already ended; `observer` is not called then.
  bool follow(std::shared_ptr<TransferObserver> observer, uint32_t part);

  // The lanes' side.
  void attach() { attached_.fetch_add(1, std::memory_order_relaxed); }
  /// The lane does not take the transfer. The last one to detach fails it with `why`.
  void detach(const Status& why, int64_t now_ns);
  /// The lane broke before or while it had the transfer. Like detach(), and the other lanes look for what is
  /// left.
  void detach_broken(const Status& why, int64_t now_ns);
  Step next(const Window& window, bool ordered, uint32_t lane, int64_t now_ns);
  /// Adds the time that cutting and posting a step of reads took.
  void posted(int64_t ns) { post_ns_.fetch_add(ns, std::memory_order_relaxed); }
  void ended(const Step& step, const Status& status, int64_t now_ns);
  /// The lane dropped the step without any effect. Another lane may take it, unless the transfer is stopping.
  void dropped(const Step& step, int64_t now_ns);
  /// Lanes must drop their steps of this transfer.
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  void expire(int64_t now_ns);
  int64_t started_ns() const { return started_ns_; }
  int64_t deadline_ns() const { return deadline_ns_; }
  bool too_late(int64_t now_ns) const { return now_ns >= deadline_ns_ && !done(); }
  /// When next() may return a step again although nothing ended (streaming polls `ready`).
  int64_t peek_at_ns() const { return peek_at_ns_.load(std::memory_order_relaxed); }
  uint64_t planned_bytes() const {
    KVLINK_CHECK(!streams_);  // nothing else changes the plan
    return plan().bytes;
  }
  double predicted_us() const { return stats_.predicted_us; }

  Chunk chunk(const Step& step, uint32_t lease_region) const;
  /// Returns whether its reads go through the staging buffer.
  bool staged() const { return choice_.staged; }
  const LeaseSeat& seat() const { return seat_; }
  /// Sets where slot reads land: the first two words of a LeaseSlot, in the local region `region`.
  void set_scratch(std::shared_ptr<uint64_t[]> words, uint32_t region);
  Chunk slot_chunk(uint32_t lease_region);
  /// The lane announces the transfer to the owner as a reader of its lease. Returns true for the first lane.
  bool begin_announcing(uint32_t lane) { return announced_.fetch_or(1ull << lane) == 0; }
  bool announced_by(uint32_t lane) const { return (announced_ & 1ull << lane) != 0; }
  /// Returns true once.
  bool try_withdraw() { return !withdrawn_.exchange(true); }
  void mark_inline() { stats_.ran_inline = true; }
  /// To be called before any lane has it.
  void mark_alone() { stats_.alone = true; }
  /// Measures the rails of its lanes, and limits those that are on trial. To be called before any lane has
  /// it.
  void measure(std::shared_ptr<const std::vector<Rail>> rails, const RailChoice& choice);
  /// Ends a transfer that was never submitted.
  void refuse(const Status& why, int64_t now_ns);

 private:
  enum class Phase : uint8_t { kPeek, kRead, kValidate, kSettle };

  bool take_end(const Step& step, const Status& status, int64_t now_ns);
  Step take_reads(const Window& window, uint32_t lane);
  size_t rail_of(uint32_t lane) const;
  bool ends_trial(uint32_t lane) const;
  void note_taken(const Step& step, int64_t now_ns);
  void note_landed(const Step& step, int64_t now_ns);
  void tell_rates(int64_t now_ns) const;
  void choose_way();
  void on_slot(int64_t now_ns);
  void prove();
  bool all_landed() const { return in_flight_ == 0 && redo_.empty() && next_op_ >= plan().ops.size(); }
  void plan_ready(uint64_t ready, int64_t now_ns);
  void stop(Status why);
  void settle_ended(const Status& status, int64_t now_ns);
  void finish(Status status, int64_t now_ns);
  void finish_if_stopped(int64_t now_ns);
  bool shared() const { return attached_.load(std::memory_order_relaxed) > 1; }
  const Plan& plan() const { return prepared_ ? *prepared_ : plan_; }
  uint64_t num_planned(size_t per_repeat) const { return per_repeat * (1 + plan().repeats.size()); }
  void count_plan();

  // Constant after construction.
  ProcessMark process_;
  const bool streams_;
  LeaseSeat seat_;
  int64_t started_ns_, deadline_ns_;
  std::shared_ptr<const TransferDriver> driver_;
  const std::shared_ptr<const Plan> prepared_;  // null: see plan_
  const std::function<void(uint64_t)> on_proven_;
  std::shared_ptr<PathStats> path_stats_;
  std::shared_ptr<uint64_t[]> words_;
  ReadOp slot_op_ = {};
  Segment slot_segment_ = {};

  Atomic<TransferState> state_{TransferState::kPending};
  Atomic<bool> stopping_{false};
  Atomic<uint64_t> announced_{0};  // a bit per lane
  Atomic<bool> withdrawn_{false};
  Atomic<uint32_t> attached_{0};
  Atomic<int64_t> peek_at_ns_{0}, post_ns_{0};
  Atomic<uint64_t> proven_units_{0};

  mutable Mutex mutex_;  // guards everything below
  CondVar changed_;
  Phase phase_ = Phase::kRead;
  Plan plan_;                     // unless prepared
  StagingPolicy::Choice choice_;  // for it
  uint32_t next_op_ = 0;
  StreamPlanner stream_;  // used if streams_
  std::vector<Step> redo_;
  uint32_t in_flight_ = 0;   // steps of any kind at lanes
  uint64_t lanes_used_ = 0;  // bit per lane that took reads of the current plan
  bool posted_ = false;      // the single slot or settle step of this phase is at a lane
  int64_t peek_backoff_ns_ = 0;
  int64_t phase_started_ns_;
  Status stop_;
  Status result_;
  TransferStats stats_;
  struct RailProgress {
    uint64_t taken = 0, landed = 0;  // bytes
    int64_t first_ns = 0, last_ns = 0;
  };
  std::shared_ptr<const std::vector<Rail>> rails_;  // null: they are not measured
  RailChoice rail_choice_;
  bool limits_trial_ = false;
  std::vector<RailProgress> progress_;          // by rail
  std::shared_ptr<TransferObserver> observer_;  // until the end
  uint32_t part_ = 0;                           // for it
};

}  // namespace kvlink

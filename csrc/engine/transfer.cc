// SPDX-License-Identifier: Apache-2.0
#include "engine/transfer.h"

#include <algorithm>

#include "base/clock.h"
#include "lease/stale.h"
#include "memory/slot_ring.h"

namespace kvlink {
namespace {

// A streaming reader that finds nothing new asks again after 20 us, then less and less often. An RDMA read of
// the slot costs the NIC, though not the owner. 1 ms is far below one prefill chunk.
constexpr int64_t kFirstPeekNs = 20'000;
constexpr int64_t kLastPeekNs = 1'000'000;

constexpr uint32_t kNonceBytes = sizeof(uint64_t);
constexpr uint32_t kPeekBytes = 2 * sizeof(uint64_t);  // nonce and ready

/// Returns whether no lease can have this seat. Such a slot, or a value of slots without a lease, would
/// validate anything.
bool is_forged(const LeaseSeat& seat) {
  return seat.slot == 0 || seat.nonce < kSmallestNonce ||
         (seat.settle_nonce != 0 && !seat.is_shared() && seat.settle_nonce < kSmallestNonce);
}

/// Staged reads are not folded: they are examined range by range.
bool folds(const TransferDriver& driver) { return driver.supports_repeats && !driver.policy; }

Status plan_request(const PullRequest& request, bool fold, Plan& into) {
  if (!request.more.empty()) return plan_groups(request, request.more, into);
  const PlanScope scope{request.tokens, request.layers, fold};
  return request.planner->plan(request.owner_blocks, request.reader_blocks, scope, into);
}

}  // namespace

Result<std::shared_ptr<const Plan>> prepare_plan(const PullRequest& request, const TransferDriver& driver) {
  auto plan = std::make_shared<Plan>();
  if (Status status = plan_request(request, folds(driver), *plan); !status.ok()) return status;
  return std::shared_ptr<const Plan>(std::move(plan));
}

Transfer::Transfer(const PullRequest& request, int64_t now, std::shared_ptr<const TransferDriver> driver,
                   std::shared_ptr<PathStats> path_stats)
    : streams_(request.stream != StreamUnit::kNone),
      seat_(request.seat),
      started_ns_(now),
      deadline_ns_(request.deadline_ns),
      driver_(std::move(driver)),
      prepared_(request.prepared),
      on_proven_(request.on_proven),
      path_stats_(std::move(path_stats)),
      phase_started_ns_(now) {
  stats_.soft = seat_.is_shared();
  if (is_forged(seat_)) {
    refuse(Status::Config("the ticket is forged: no lease has this slot and nonce"), now);
    return;
  }
  if (!streams_) {
    const Status planned = prepared_ ? Status{} : plan_request(request, folds(*driver_), plan_);
    if (request.looks_first) phase_ = Phase::kPeek;
    if (planned.ok()) choose_way();
    if (planned.ok() && path_stats_) {
      stats_.predicted_us = path_stats_->predict_us(num_planned(plan().ops.size()), plan().bytes);
    }
    stats_.plan_ns = now_ns() - now;
    if (!planned.ok()) refuse(planned, now);
    return;
  }
  const Status checked = stream_.start(request);
  if (!checked.ok()) refuse(checked, now);
  phase_ = Phase::kPeek;
}

void Transfer::count_plan() {
  stats_.num_ops += num_planned(plan().ops.size());
  stats_.num_segments += num_planned(plan().segments.size());
}

void Transfer::choose_way() {
  if (!driver_->policy || plan().ops.empty()) return;
  choice_ = driver_->policy->choose(plan().ops, plan().segments.size(), plan().bytes);
  stats_.staged |= choice_.staged;
  stats_.predicted.direct_us += choice_.predicted.direct_us;
  stats_.predicted.staged_us += choice_.predicted.staged_us;
}

void Transfer::refuse(const Status& why, int64_t now) {
  std::lock_guard lock(mutex_);
  if (!done()) finish(why, now);
}

bool Transfer::wait(int64_t timeout_ns) {
  if (done()) return true;
  const int64_t until = timeout_ns < 0 ? INT64_MAX : now_ns() + timeout_ns;
  if (timeout_ns != 0) driver_->drive_for(*this, until);
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return done(); };
  if (timeout_ns < 0) {
    changed_.wait(lock, ended);
    return true;
  }
  return changed_.wait_for(lock, std::chrono::nanoseconds(std::max<int64_t>(until - now_ns(), 0)), ended);
}

Status Transfer::status() const {
  std::lock_guard lock(mutex_);
  return result_;
}

TransferStats Transfer::stats() const {
  std::lock_guard lock(mutex_);
  TransferStats stats = stats_;
  stats.post_ns = post_ns_.load(std::memory_order_relaxed);
  return stats;
}

bool Transfer::follow(std::shared_ptr<TransferObserver> observer, uint32_t part) {
  std::lock_guard lock(mutex_);
  if (done()) return false;
  observer_ = std::move(observer);
  part_ = part;
  return true;
}

void Transfer::stop(Status why) {
  if (stopping_) return;
  stop_ = std::move(why);
  stopping_.store(true, std::memory_order_release);
}

void Transfer::cancel() {
  {
    std::lock_guard lock(mutex_);
    if (done()) return;
    stop(Status::Cancelled("the caller cancelled the pull"));
    finish_if_stopped(started_ns_ + stats_.total_ns);
  }
  driver_->wake();
}

void Transfer::expire(int64_t now) {
  {
    std::lock_guard lock(mutex_);
    if (done() || stopping_) return;
    const std::string landed =
        streams_ && plan().bytes == 0
            ? ", before the owner had written anything"
            : " with " + std::to_string(stats_.bytes) + " of " + std::to_string(plan().bytes) +
                  (streams_ ? " bytes landed that the owner had written" : " bytes landed");
    stop(Status::Timeout("the deadline passed after " + std::to_string((now - started_ns_) / 1'000'000) +
                         " ms" + landed));
    finish_if_stopped(now);
  }
  if (!done() && shared()) driver_->wake();  // another lane may have looked just before, and go to sleep
}

void Transfer::detach(const Status& why, int64_t now) {
  if (attached_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  std::lock_guard lock(mutex_);
  if (done()) return;
  stop(why);
  finish_if_stopped(now);
}

void Transfer::detach_broken(const Status& why, int64_t now) {
  {
    const std::lock_guard lock(mutex_);
    limits_trial_ = false;  // nobody else may be left
  }
  detach(why, now);
  if (!done()) driver_->wake();
}

Chunk Transfer::chunk(const Step& step, uint32_t lease_region) const {
  return {std::span(plan().ops).subspan(step.first_op, step.num_ops),
          plan().segments.data(),
          plan().repeats,
          {slot_offset(seat_.slot), seat_.nonce, lease_region}};
}

void Transfer::measure(std::shared_ptr<const std::vector<Rail>> rails, const RailChoice& choice) {
  rails_ = std::move(rails);
  rail_choice_ = choice;
  limits_trial_ = choice.trial != 0;
  progress_.resize(rails_->size());
}

size_t Transfer::rail_of(uint32_t lane) const {
  const auto found =
      std::ranges::find_if(*rails_, [lane](const Rail& rail) { return (rail.lanes >> lane & 1) != 0; });
  return static_cast<size_t>(found - rails_->begin());
}

bool Transfer::ends_trial(uint32_t lane) const {
  if (!limits_trial_) return false;
  const size_t rail = rail_of(lane);
  return (rail_choice_.trial >> rail & 1) != 0 && progress_[rail].taken >= (*rails_)[rail].enough_bytes();
}

void Transfer::note_taken(const Step& step, int64_t now) {
  RailProgress& progress = progress_[rail_of(step.lane)];
  if (progress.taken == 0) progress.first_ns = now;
  progress.taken += step.bytes;
}

void Transfer::note_landed(const Step& step, int64_t now) {
  RailProgress& progress = progress_[rail_of(step.lane)];
  progress.landed += step.bytes;
  progress.last_ns = now;
}

/// A rail is busy from its first read to the end of its last, since lanes take reads while there are some.
void Transfer::tell_rates(int64_t now) const {
  std::vector<RailWork> work;
  for (const RailProgress& each : progress_) work.push_back({each.landed, each.last_ns - each.first_ns});
  path_stats_->rails().add(*rails_, work, rail_choice_, now);
}

void Transfer::set_scratch(std::shared_ptr<uint64_t[]> words, uint32_t region) {
  words_ = std::move(words);
  slot_segment_ = {reinterpret_cast<std::byte*>(words_.get()), kPeekBytes, region};
}

Chunk Transfer::slot_chunk(uint32_t lease_region) {
  slot_op_ = {slot_offset(seat_.slot), slot_segment_.bytes, lease_region, 0, 1};
  return {std::span(&slot_op_, 1), &slot_segment_};
}

Step Transfer::next(const Window& window, bool ordered, uint32_t lane, int64_t now) {
  std::lock_guard lock(mutex_);
  if (done() || stopping_) return {};
  Step step;
  if (phase_ == Phase::kRead) {
    step = take_reads(window, lane);
    if (rails_ && step.kind == Step::Kind::kReads) note_taken(step, now);
    if (step.kind == Step::Kind::kNone) {
      if (!redo_.empty() || next_op_ < plan().ops.size()) return {};
      // The slot read may follow the data without waiting, on the one ordered lane that carried it.
      const bool behind_data =
          ordered && stream_.all_planned() && redo_.empty() && lanes_used_ == 1ull << lane;
      if (in_flight_ > 0 && !behind_data) return {};
      phase_ = stream_.all_planned() ? Phase::kValidate : Phase::kPeek;
      peek_backoff_ns_ = 0;
    }
  }
  if (step.kind == Step::Kind::kNone) {
    if (posted_ || (phase_ == Phase::kPeek && now < peek_at_ns_)) return {};
    posted_ = true;
    step.kind = phase_ == Phase::kSettle ? Step::Kind::kSettle : Step::Kind::kSlot;
    if (phase_ == Phase::kValidate) slot_segment_.bytes = kNonceBytes;
  }
  ++in_flight_;
  return step;
}

Step Transfer::take_reads(const Window& window, uint32_t lane) {
  if (window.depth == 0 || ends_trial(lane)) return {};
  if (!redo_.empty()) {
    Step step = redo_.back();
    redo_.pop_back();
    step.lane = lane;
    lanes_used_ |= 1ull << lane;
    return step;
  }
  Step step{.first_op = next_op_, .lane = lane};
  const bool staged = choice_.staged;
  const uint32_t most_bytes = staged ? SlotRing::kSlotBytes : window.chunk_bytes;
  const uint32_t most_ops = staged ? UINT32_MAX : window.chunk_ops;
  const uint64_t times = 1 + plan().repeats.size();
  uint64_t segments = 0;
  for (; next_op_ < plan().ops.size() && step.num_ops < most_ops; ++next_op_, ++step.num_ops) {
    const ReadOp& op = plan().ops[next_op_];
    segments += op.num_segments;
    const bool full = step.bytes + op.bytes * times > most_bytes || segments > most_ops;
    if (step.num_ops > 0 && full) break;
    step.bytes += op.bytes * times;
  }
  if (step.num_ops == 0) return step;
  step.kind = Step::Kind::kReads;
  lanes_used_ |= 1ull << lane;
  return step;
}

void Transfer::ended(const Step& step, const Status& status, int64_t now) {
  if (take_end(step, status, now)) driver_->wake();
}

/// Returns true if other lanes, which may be asleep, have work: reads to post or to cancel.
bool Transfer::take_end(const Step& step, const Status& status, int64_t now) {
  std::lock_guard lock(mutex_);
  const bool stopped_before = stopping_;
  KVLINK_CHECK(in_flight_ > 0);  // pair of next(), as in dropped()
  --in_flight_;
  if (step.kind == Step::Kind::kSettle) {
    settle_ended(status, now);
  } else if (!status.ok()) {
    stop(status);
  } else if (step.kind == Step::Kind::kReads) {
    stats_.bytes += step.bytes;
    stats_.read_ns = now - started_ns_ - stats_.plan_ns;
    if (rails_) note_landed(step, now);
  } else if (!stopping_) {
    on_slot(now);
  }
  finish_if_stopped(now);
  if (done() || !shared()) return false;
  const bool more_to_read = step.kind == Step::Kind::kSlot && phase_ == Phase::kRead;
  return more_to_read || (stopping_ && !stopped_before);
}

void Transfer::on_slot(int64_t now) {
  posted_ = false;
  if (words_[0] != seat_.nonce) {
    stop(stale_blocks(words_[0]));
  } else if (phase_ == Phase::kPeek && !streams_) {
    phase_ = Phase::kRead;
  } else if (phase_ == Phase::kPeek) {
    // The reads of all units planned so far had ended when this look was posted, so it validates them.
    prove();
    plan_ready(words_[1], now);
  } else if (!all_landed()) {
    // Not all data has landed, because an endpoint broke its promise of order. This slot read proves nothing.
    phase_ = Phase::kRead;
    lanes_used_ = ~0ull;
  } else if (phase_ == Phase::kValidate) {
    stats_.validate_ns = now - started_ns_ - stats_.plan_ns - stats_.read_ns;
    prove();
    if (!seat_.settles()) return finish({}, now);
    phase_ = Phase::kSettle;
    phase_started_ns_ = now;
  }
}

/// REQUIRES that the lease's nonce was read behind the reads of all units planned so far.
void Transfer::prove() {
  if (!streams_ || !all_landed()) return;
  KVLINK_CHECK(words_[0] == seat_.nonce && stream_.planned_units() >= proven_units());
  proven_units_.store(stream_.planned_units(), std::memory_order_release);
  if (on_proven_) on_proven_(stream_.planned_units());
}

/// Plans the units that became ready since the last look, or sets when to look again.
void Transfer::plan_ready(uint64_t ready, int64_t now) {
  if (!stream_.any_beyond(ready)) {
    stats_.alone = false;
    peek_backoff_ns_ = std::clamp(2 * peek_backoff_ns_, kFirstPeekNs, kLastPeekNs);
    peek_at_ns_ = now + peek_backoff_ns_;
    return;
  }
  if (const Status planned = stream_.plan(ready, folds(*driver_), plan_); !planned.ok()) return stop(planned);
  stats_.alone &= stream_.all_planned();
  choose_way();
  next_op_ = 0;
  lanes_used_ = 0;
  count_plan();
  phase_ = Phase::kRead;
}

void Transfer::settle_ended(const Status& status, int64_t now) {
  stats_.settled = status.ok();
  stats_.settle_ns = now - phase_started_ns_;
  // The bytes are validated. A failed settle only costs the owner its lease's time to live.
  finish({}, now);
}

void Transfer::dropped(const Step& step, int64_t now) {
  std::lock_guard lock(mutex_);
  KVLINK_CHECK(in_flight_ > 0);
  --in_flight_;
  if (done()) return;
  ++stats_.redone;
  if (step.kind == Step::Kind::kReads) {
    redo_.push_back(step);
    if (phase_ == Phase::kValidate) phase_ = Phase::kRead;  // the look behind these reads was lost with them
  } else if (step.kind == Step::Kind::kSettle) {
    settle_ended(Status::Unreachable("the connection broke before the settle left"), now);
  } else {
    posted_ = false;
  }
  finish_if_stopped(now);
}

void Transfer::finish_if_stopped(int64_t now) {
  if (stopping_ && in_flight_ == 0 && !done()) finish(stop_, now);
}

void Transfer::finish(Status status, int64_t now) {
  if (done()) return;
  // No byte lands after the end, and what is valid has landed behind its own nonce.
  KVLINK_CHECK(in_flight_ == 0);
  KVLINK_CHECK(!status.ok() || (all_landed() && stream_.all_planned() && words_[0] == seat_.nonce));
  result_ = std::move(status);
  stats_.total_ns = now - started_ns_;
  if (!streams_) count_plan();
  if (path_stats_) path_stats_->add(stats_, result_, seat_.settles() && !stats_.settled);
  if (rails_ && result_.ok()) tell_rates(now);
  // A streaming pull takes as long as its prefill does.
  if (driver_->policy && result_.ok() && !streams_) {
    driver_->policy->learn(choice_, static_cast<double>(stats_.total_ns) / 1e3);
  }
  const TransferState valid = stats_.settled ? TransferState::kSettled : TransferState::kValid;
  state_.store(result_.ok() ? valid : TransferState::kFailed, std::memory_order_release);
  changed_.notify_all();
  if (const auto observer = std::exchange(observer_, nullptr)) {
    observer->transfer_ended(part_, state(), result_.code());
  }
  if (announced_ != 0 && !stats_.settled && shared()) driver_->wake();  // the lanes withdraw it
}

}  // namespace kvlink

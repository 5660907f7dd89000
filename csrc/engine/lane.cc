// SPDX-License-Identifier: Apache-2.0
#include "engine/lane.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/clock.h"

namespace kvlink {
namespace {

// An owner that answers nothing for this long, far more than a round trip, is considered lost when a pull
// times out.
constexpr int64_t kSilentNs = 100'000'000;

// Reads that a NIC already has cannot be cancelled. They end in far less than this; if not, the connection
// ends with them.
constexpr int64_t kCancelNs = 200'000'000;

// An inline pull that waits for the network spins this long before it sleeps. A loopback round trip takes
// 10-40 us, up to 90 us in a virtual machine with busy neighbours, and a sleep adds one scheduler wake-up
// (5-30 us). If the scheduler keeps both ends on one CPU, spinning only keeps the owner from running, so a
// vain spin is not repeated for a while.
constexpr int64_t kInlineSpinNs = 120'000;
constexpr int32_t kWaitsWithoutSpin = 8;
// Reading and writing half a GiB at the 4.8 TB/s of an H200's specification takes 224 us. Sleeping would add
// one or two scheduler wake-ups.
constexpr int64_t kLaunchSpinNs = 400'000;

void sleep_on(int fd, int64_t ns) {
  pollfd waiting{fd, POLLIN, 0};
  wait_ready({&waiting, fd < 0 ? size_t{0} : size_t{1}}, ns);
}

}  // namespace

Lane::Lane(LaneEnd end, uint32_t index)
    : index_(index), endpoint_(std::move(end.endpoint)), staging_(end.staging) {}

void Lane::ready(LeaseRegions leases, std::shared_ptr<AnnouncedReaders> readers,
                 std::shared_ptr<LaneDriver> driver) {
  std::lock_guard lock(mutex_);
  driver_ = std::move(driver);
  leases_ = leases;
  readers_ = std::move(readers);
  traits_ = endpoint_->traits();
}

void Lane::submit(std::shared_ptr<Transfer> transfer) {
  transfer->attach();
  {
    std::lock_guard lock(inbox_mutex_);
    if (!broken()) {  // otherwise nobody may ever look into the inbox again
      pending_.fetch_add(1, std::memory_order_acq_rel);
      inbox_.push_back(std::move(transfer));
    }
  }
  if (!transfer) return driver_->wake();
  transfer->detach_broken(Status::Unreachable("the connection broke before the pull was posted"), now_ns());
}

void Lane::wake_driver() {
  if (!idle()) return driver_->wake();
  if (has_unflushed_writes()) driver_->wake_from_doze();
}

Lane::Driven Lane::drive() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return {.held = true};
  return drive_locked(now_ns(), true);
}

void Lane::check_idle(bool wait) {
  const Hold hold = wait ? Hold(*this) : Hold(*this, std::try_to_lock);
  if (!hold || broken() || num_posted_ > 0) return;
  const int64_t now = now_ns();
  guarded(now, [&] { poll(now); });
}

bool Lane::run_inline(const std::shared_ptr<Transfer>& transfer, int64_t budget_ns) {
  const Hold hold(*this, std::try_to_lock);
  if (!hold || broken() || !idle()) return false;
  transfer->attach();
  transfer->mark_inline();
  pending_.fetch_add(1, std::memory_order_acq_rel);
  queue_.push_back(transfer);
  const int64_t start = now_ns();
  int64_t last_progress = start;
  for (int64_t now = start; !transfer->done() && !broken(); now = now_ns()) {
    if (now > start && now - start > budget_ns) return true;
    const Driven driven = drive_locked(now, false);
    if (driven.progressed) {
      last_progress = now;
    } else if (budget_ns > 0 && !traits_.cpu_copies) {
      await_bytes(now - last_progress, budget_ns - (now - start));
    }
  }
  take_inbox();
  advance_deadlines(now_ns());
  return true;
}

bool Lane::drive_for(const Transfer& transfer, int64_t until_ns) {
  bool drove = false;
  int64_t now = now_ns();
  const int64_t looks_until = traits_.device_driven ? now + kLaunchSpinNs : now;
  for (; !transfer.done() && now < until_ns && !broken(); now = now_ns()) {
    std::unique_lock lock(mutex_, std::try_to_lock);
    const bool progressed = lock && drive_locked(now, true).progressed;
    drove |= lock.owns_lock();
    if (!progressed && now >= looks_until) break;
  }
  if (drove) wake_driver();
  return drove;
}

/// A contract that `work` finds broken ends the lane, and not the process: its transfers go on elsewhere or
/// fail.
template <typename Work>
void Lane::guarded(int64_t now, Work work) {
  try {
    work();
  } catch (const BrokenContract& broken) {
    break_down(Status::Unreachable(broken.what()), now);
  }
}

Lane::Driven Lane::drive_locked(int64_t now, bool send_settles) {
  Driven driven;
  guarded(now, [&] { driven = drive_round(now, send_settles); });
  return driven;
}

Lane::Driven Lane::drive_round(int64_t now, bool send_settles) {
  take_inbox();
  if (broken()) {
    break_down(why_broken_, now);
    return {};
  }
  Driven driven;
  advance_deadlines(now);
  if (!broken()) driven.progressed = post_steps(now);
  const bool checks = now >= next_check_ns_ && !queue_.empty();
  if (!broken() && (checks || num_awaited_ > 0 || (send_settles && num_posted_ > 0))) {
    driven.progressed |= poll(now);
  }
  driven.active = !queue_.empty();
  driven.wake_at_ns = give_up_ns_;
  if (driven.active && !broken()) driven.wake_at_ns = std::min(give_up_ns_, next_check_ns_);
  for (const auto& transfer : queue_) {
    if (!transfer->stopping()) driven.wake_at_ns = std::min(driven.wake_at_ns, transfer->deadline_ns());
    const int64_t peek_at = transfer->peek_at_ns();
    if (peek_at > now) driven.wake_at_ns = std::min(driven.wake_at_ns, peek_at);
  }
  return driven;
}

void Lane::take_inbox() {
  std::vector<LaneWord> words;
  {
    std::lock_guard lock(inbox_mutex_);
    std::move(inbox_.begin(), inbox_.end(), std::back_inserter(queue_));
    inbox_.clear();
    words = std::exchange(words_, {});
    has_words_.store(false, std::memory_order_release);
  }
  std::erase_if(words, [this](LaneWord word) { return post_settle(word); });
  if (words.empty()) return;
  {
    std::lock_guard lock(inbox_mutex_);
    lost_.insert(lost_.end(), words.begin(), words.end());
  }
  if (on_lost_) on_lost_();
}

/// Spins by returning at once, unless spinning was vain lately.
void Lane::await_bytes(int64_t waited_ns, int64_t left_ns) {
  if (spin_credit_ >= 0 && waited_ns < kInlineSpinNs) return;
  spin_credit_ = spin_credit_ < 0 ? spin_credit_ + 1 : -kWaitsWithoutSpin;
  if (endpoint_->arm()) sleep_on(traits_.wake_fd, left_ns);
}

/// Removes transfers that ended or must end from the queue. A lane that stays silent during one of them
/// breaks.
void Lane::advance_deadlines(int64_t now) {
  // This comes first: a caller that learns of a timeout and retries at once must find the lane broken.
  if (is_silent(now) && !poll_before_timeout(now)) {
    give_up(
        Status::Unreachable("the owner answered nothing until a deadline; its process may be stopped or its "
                            "host gone"));
  }
  for (const auto& transfer : queue_) {
    if (transfer->too_late(now)) transfer->expire(now);
  }
  if (broken()) return break_down(why_broken_, now);
  for (const auto& transfer : queue_) {
    if (!transfer->stopping() || transfer->done()) continue;
    cancel_posts(transfer, now);
  }
  if (now >= give_up_ns_) {
    give_up(
        Status::Unreachable("reads of a cancelled or timed-out pull did not end; the connection is rebuilt"));
    return break_down(why_broken_, now);
  }
  const size_t before = queue_.size();
  std::erase_if(queue_, [this](const auto& transfer) {
    const bool done = transfer->done();
    KVLINK_DCHECK(!done || std::none_of(posted_.begin(), posted_.end(), [&](const Posted& posted) {
      return posted.transfer == transfer;  // no byte of it lands any more
    }));
    if (done) withdraw(*transfer);
    return done;
  });
  pending_.fetch_sub(static_cast<uint32_t>(before - queue_.size()), std::memory_order_acq_rel);
}

void Lane::cancel_posts(const std::shared_ptr<Transfer>& transfer, int64_t now) {
  for (uint64_t token = 0; token < posted_.size(); ++token) {
    Posted& posted = posted_[token];
    if (posted.transfer != transfer || posted.cancelled_ns != 0) continue;
    if (!endpoint_->cancel(token)) {
      posted.cancelled_ns = now;
      give_up_ns_ = std::min(give_up_ns_, now + kCancelNs);
      continue;
    }
    const Step step = posted.step;
    release(token);
    transfer->dropped(step, now);
  }
}

Lane::Rest Lane::arm() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return Rest::kShort;
  if (broken() || endpoint_->arm()) return Rest::kLong;
  next_check_ns_ = 0;  // the next round polls, also if this lane has nothing under way
  return Rest::kNone;
}

/// A pull with a short deadline is no reason to cut off the others. Time that passed after the deadline is
/// not the owner's fault: this process was stopped or had no CPU.
bool Lane::is_silent(int64_t now) const {
  return asked_ns_ != 0 && std::any_of(queue_.begin(), queue_.end(), [&](const auto& transfer) {
           return transfer->too_late(now) && transfer->deadline_ns() - asked_ns_ >= kSilentNs;
         });
}

/// Data that arrived while this process did not look is not silence.
bool Lane::poll_before_timeout(int64_t now) { return poll(now) || !is_silent(now); }

bool Lane::post_steps(int64_t now) {
  bool any = false;
  int64_t posting_since = now;
  size_t without_work = 0;
  while (without_work < queue_.size()) {
    const std::shared_ptr<Transfer> transfer = queue_[turn_++ % queue_.size()];
    // Slot reads and settles are not data, and never wait for room in the window.
    const bool full = num_posted_ >= traits_.window.depth || bytes_under_way_ >= traits_.window.bytes;
    const Window room = full ? Window{0, 0, 0} : traits_.window;
    const bool ordered = traits_.ordered && (!traits_.ordering_needs_fence || queue_.size() == 1);
    const Step step = transfer->next(room, ordered, index_, now);
    if (step.kind == Step::Kind::kNone) {
      ++without_work;
      continue;
    }
    without_work = 0;
    any = true;
    const uint64_t token = claim_token(transfer, step);
    const Status posted = post(transfer, step, token);
    if (step.kind == Step::Kind::kReads) {
      const int64_t posted_at = now_ns();
      transfer->posted(posted_at - std::exchange(posting_since, posted_at));
    }
    // Over a network a settle counts as done once it is posted. Sending it by itself would cost the caller
    // several microseconds, and losing it costs no more than the lease's time to live.
    const bool unawaited = posted.ok() && step.kind == Step::Kind::kSettle && !traits_.cpu_copies;
    if (posted.ok() && !unawaited) continue;
    unawaited ? detach_token(token) : release(token);
    transfer->ended(step, posted, now);
  }
  return any;
}

Status Lane::post(const std::shared_ptr<Transfer>& transfer, const Step& step, uint64_t token) {
  if (step.kind == Step::Kind::kSettle) {
    return endpoint_->post_write(token, leases_.words, settled_offset(transfer->seat().slot),
                                 transfer->seat().settle_nonce);
  }
  if (step.kind == Step::Kind::kSlot) return endpoint_->post_read(token, transfer->slot_chunk(leases_.slots));
  if (readers_ && !transfer->seat().is_shared() && !transfer->announced_by(index_)) {
    if (Status status = announce(*transfer); !status.ok()) return status;
  }
  const Chunk chunk = transfer->chunk(step, leases_.slots);
  return transfer->staged() ? staging_->post_staged(token, chunk) : endpoint_->post_read(token, chunk);
}

/// Stores a word that no caller waits for.
Status Lane::post_word(uint64_t offset, uint64_t value) {
  const uint64_t token = claim_token(nullptr, {});
  Status status = endpoint_->post_write(token, leases_.words, offset, value);
  if (!status.ok()) release(token);
  return status;
}

/// Announces the reader on every lane, because the owner must see it before it serves the first read of that
/// lane.
Status Lane::announce(Transfer& transfer) {
  if (transfer.begin_announcing(index_)) readers_->begin(transfer.seat().nonce);
  return post_word(reader_offset(transfer.seat().slot), readers_->announcement(transfer.seat().nonce));
}

/// Withdraws the announcement when a transfer has ended, so that the end of its lease does not cut off the
/// other pulls of this connection. Each lane that announced it withdraws, behind its announcement.
void Lane::withdraw(Transfer& transfer) {
  if (!readers_ || !transfer.announced_by(index_)) return;
  const bool last = readers_->end(transfer.seat().nonce, [&transfer] { return transfer.try_withdraw(); });
  if (!last || transfer.state() == TransferState::kSettled || broken()) return;
  const Status posted =
      post_word(reader_offset(transfer.seat().slot), readers_->withdrawal(transfer.seat().nonce));
  if (posted.ok()) unsent_.store(true, std::memory_order_release);
}

bool Lane::post_settle(LaneWord word) {
  if (broken() || !post_word(settled_offset(word.slot), word.value).ok()) return false;
  unsent_.store(true, std::memory_order_release);
  return true;
}

bool Lane::settle(LaneWord word) {
  if (const Hold hold(*this, std::try_to_lock); hold) {
    const int64_t now = now_ns();
    bool posted = false;
    guarded(now, [&] { (posted = post_settle(word)) && poll(now); });
    return posted && !broken();
  }
  {
    std::lock_guard lock(inbox_mutex_);
    if (broken()) return false;  // nobody may ever look into the inbox again
    words_.push_back(word);
    has_words_.store(true, std::memory_order_release);
  }
  driver_->wake();
  return true;
}

std::vector<LaneWord> Lane::take_lost() {
  std::lock_guard lock(inbox_mutex_);
  return std::exchange(lost_, {});
}

bool Lane::poll(int64_t now) {
  const bool waiting = !queue_.empty();
  const PollResult result = endpoint_->poll(now, waiting, ended_);
  next_check_ns_ = waiting ? result.next_check_ns : 0;
  const int64_t polled = now_ns();
  collect(polled);
  if (!result.status.ok()) break_down(result.status, polled);
  return result.progressed;
}

void Lane::collect(int64_t now) {
  for (const Completion& completion : ended_) {
    KVLINK_CHECK(completion.token < posted_.size());  // pair of claim_token(): endpoints return what they got
    Posted& posted = posted_[completion.token];
    if (!posted.used) continue;
    const std::shared_ptr<Transfer> transfer = posted.transfer;
    const Step step = posted.step;
    release(completion.token);
    if (!transfer) continue;  // a write is over once it is sent: no sign of life
    asked_ns_ = num_awaited_ > 0 ? now : 0;
    transfer->ended(step, completion.status, now);
  }
  ended_.clear();
  if (num_posted_ == num_awaited_) unsent_.store(false, std::memory_order_release);
}

Result<int64_t> Lane::time_read(const Chunk& chunk) {
  const Hold hold(*this);
  if (broken()) return why_broken_;
  const int64_t start = now_ns();
  const uint64_t token = claim_token(nullptr, {});
  Status status = endpoint_->post_read(token, chunk);
  const auto ended = [&] {
    return std::any_of(ended_.begin(), ended_.end(), [token](const auto& one) { return one.token == token; });
  };
  while (status.ok() && !ended() && now_ns() - start < kCancelNs)
    status = endpoint_->poll(now_ns(), false, ended_).status;
  const int64_t took = now_ns() - start;
  if (status.ok() && !ended()) status = Status::Timeout("a bare read took longer than 200 ms");
  if (!status.ok()) {
    break_down(status, now_ns());
    return status;
  }
  collect(now_ns());
  return took;
}

void Lane::give_up(const Status& why) {
  if (broken()) return;
  why_broken_ = why;
  broken_.store(true, std::memory_order_release);
  endpoint_->close();
}

void Lane::break_down(const Status& why, int64_t now) {
  give_up(why);
  for (uint64_t token = 0; token < posted_.size(); ++token) {
    if (!posted_[token].used) continue;
    const std::shared_ptr<Transfer> transfer = posted_[token].transfer;
    const Step step = posted_[token].step;
    release(token);
    if (transfer) transfer->dropped(step, now);
  }
  take_inbox();
  for (const auto& transfer : std::exchange(queue_, {})) {
    pending_.fetch_sub(1, std::memory_order_acq_rel);
    if (!transfer->done()) transfer->detach_broken(why_broken_, now);
    if (transfer->done()) withdraw(*transfer);
  }
}

void Lane::close(const std::string& why) {
  const Hold hold(*this);
  if (std::exchange(closed_, true)) return;
  break_down(Status::Unreachable(why), now_ns());
}

void Lane::detach_token(uint64_t token) {
  posted_[token].transfer = nullptr;
  if (--num_awaited_ == 0) asked_ns_ = 0;
  unsent_.store(true, std::memory_order_release);
}

uint64_t Lane::claim_token(std::shared_ptr<Transfer> transfer, const Step& step) {
  ++num_posted_;
  bytes_under_way_ += step.bytes;
  num_awaited_ += transfer != nullptr;
  if (transfer && asked_ns_ == 0) asked_ns_ = now_ns();
  for (uint64_t token = 0;; ++token) {
    if (token == posted_.size()) posted_.emplace_back();
    if (posted_[token].used) continue;
    posted_[token] = {std::move(transfer), step, true};
    return token;
  }
}

void Lane::release(uint64_t token) {
  KVLINK_CHECK(posted_[token].used && bytes_under_way_ >= posted_[token].step.bytes);
  const bool cancelled = posted_[token].cancelled_ns != 0;
  num_awaited_ -= posted_[token].transfer != nullptr;
  bytes_under_way_ -= posted_[token].step.bytes;
  posted_[token] = {};
  --num_posted_;
  if (num_awaited_ == 0) {
    asked_ns_ = 0;
    unsent_.store(num_posted_ > 0, std::memory_order_release);
  }
  if (!cancelled) return;
  give_up_ns_ = INT64_MAX;
  for (const Posted& posted : posted_) {
    if (posted.cancelled_ns != 0) give_up_ns_ = std::min(give_up_ns_, posted.cancelled_ns + kCancelNs);
  }
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "engine/pull.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/clock.h"

namespace kvlink {
namespace {

// A pull is read again once after its connection was cut: only the lease decides whether bytes are valid.
constexpr uint32_t kAttempts = 2;
// At the deadline the control thread says why an owner was not connected. If it does not, the pull ends
// without a reason.
constexpr int64_t kAnswerNs = 50'000'000;

PullState state_of(TransferState state) {
  return state == TransferState::kSettled ? PullState::kSettled : PullState::kValid;
}

/// Returns whether a transfer that failed so may be read again: over a new connection to the same owner, or
/// by a relay from another one.
bool may_work_again(Code code, bool elsewhere) {
  if (!elsewhere) return code == Code::kPeerUnreachable;
  return code != Code::kConfig && code != Code::kLayoutMismatch && code != Code::kCancelled;
}

}  // namespace

Pull::Pull(int64_t deadline_ns, std::shared_ptr<CompletionQueue> control, Relaying relaying)
    : deadline_ns_(deadline_ns),
      control_(std::move(control)),
      relaying_(std::move(relaying)),
      num_attempts_(!control_          ? 1
                    : relaying_.failed ? relaying_.num_sources
                                       : kAttempts),
      until_ns_(deadline_ns) {}

std::shared_ptr<Pull> Pull::waiting(int64_t deadline_ns, std::shared_ptr<CompletionQueue> control,
                                    Relaying relaying) {
  return std::make_shared<Pull>(deadline_ns, std::move(control), std::move(relaying));
}

std::shared_ptr<Pull> Pull::empty() {
  auto pull = std::make_shared<Pull>(0, nullptr, Relaying{});
  pull->state_.store(PullState::kValid, std::memory_order_relaxed);
  return pull;
}

std::shared_ptr<Pull> Pull::started(std::shared_ptr<Transfer> only,
                                    std::shared_ptr<CompletionQueue> control) {
  auto pull = std::make_shared<Pull>(only->deadline_ns(), std::move(control), Relaying{});
  const TransferState state = only->state();
  const bool told = state == TransferState::kSettled || !only->seat().settles();
  pull->num_parts_ = 1;
  pull->first_.transfer = only;
  if (state != TransferState::kPending && state != TransferState::kFailed && told) {
    pull->first_.state = state;
    pull->state_.store(state_of(state), std::memory_order_relaxed);
    return pull;
  }
  pull->alive_ = 1;
  pull->state_.store(PullState::kReading, std::memory_order_relaxed);
  if (!only->follow(pull, 0)) pull->transfer_ended(0, only->state(), only->status().code());
  return pull;
}

void Pull::begin() {
  std::lock_guard lock(mutex_);
  KVLINK_CHECK(actions_.empty() || control_ != nullptr);
  if (!actions_.empty()) {
    control_->push(token());
  } else if (state() == PullState::kWaiting && attempt_ == 0) {
    ask_to_connect(now_ns());
  }
}

bool Pull::is_open() const {
  std::lock_guard lock(mutex_);
  return !done() || !actions_.empty();
}

void Pull::ask(PullAction action) {
  if (!control_) return;
  actions_.push_back(action);
  control_->push(token());
}

std::vector<PullAction> Pull::take_actions() {
  std::lock_guard lock(mutex_);
  return std::exchange(actions_, {});
}

/// The sources of a relay share its time, so that a hung one leaves enough for those after it.
void Pull::ask_to_connect(int64_t now) {
  until_ns_ = deadline_ns_;
  if (relaying_.failed) until_ns_ = now + (deadline_ns_ - now) / (num_attempts_ - attempt_);
  ask({PullAction::Kind::kConnect, attempt_, until_ns_});
}

std::vector<uint32_t> Pull::wanted() const {
  std::lock_guard lock(mutex_);
  return wanted_;
}

bool Pull::connected(uint32_t attempt, const std::vector<StartReads>& reads) {
  std::vector<uint32_t> parts;
  int64_t deadline;
  {
    std::lock_guard lock(mutex_);
    if (state() != PullState::kWaiting || attempt != attempt_ || reads.empty()) return false;
    if (num_parts_ == 0) {
      num_parts_ = reads.size();
      more_.resize(num_parts_ - 1);
      wanted_.resize(num_parts_);
      std::iota(wanted_.begin(), wanted_.end(), 0);
    }
    if (wanted_.size() != reads.size()) return false;
    parts = wanted_;
    for (const uint32_t index : parts) part(index).state = TransferState::kPending;
    deadline = until_ns_;
    alive_ = static_cast<uint32_t>(parts.size()) + 1;
    state_.store(PullState::kStarting, std::memory_order_release);
  }
  for (size_t index = 0; index < parts.size(); ++index) start_part(parts[index], reads[index], deadline);
  std::lock_guard lock(mutex_);
  if (--alive_ == 0) {
    conclude();
  } else {
    state_.store(PullState::kReading, std::memory_order_release);
    changed_.notify_all();  // those who wait can drive its lanes now
  }
  return true;
}

/// A caller that cancels finds the transfer, or this call finds that the pull was cancelled.
void Pull::start_part(uint32_t index, const StartReads& start, int64_t deadline) {
  const auto is_stopped = [this] {
    std::lock_guard lock(mutex_);
    return stop_ == Stop::kCancelled;
  };
  if (is_stopped()) return transfer_ended(index, TransferState::kFailed, Code::kCancelled);
  const std::shared_ptr<Transfer> transfer = start(deadline);
  if (!transfer) return transfer_ended(index, TransferState::kFailed, Code::kPeerUnreachable);
  {
    std::lock_guard lock(mutex_);
    part(index).transfer = transfer;
  }
  if (is_stopped()) transfer->cancel();
  if (transfer->follow(shared_from_this(), index)) return;
  transfer_ended(index, transfer->state(), transfer->status().code());
}

void Pull::transfer_ended(uint32_t index, TransferState state, Code code) {
  std::lock_guard lock(mutex_);
  part(index).state = state;
  part(index).code = code;
  if (--alive_ == 0) conclude();
}

void Pull::refused(uint32_t attempt, Status why, bool another) {
  std::lock_guard lock(mutex_);
  if (state() != PullState::kWaiting || attempt != attempt_) return;
  const int64_t now = now_ns();
  if (!another || attempt_ + 1 >= num_attempts_ || now >= deadline_ns_) return end(std::move(why));
  ++attempt_;
  ask_to_connect(now);
}

/// Everything that started has ended.
void Pull::conclude() {
  const int64_t now = now_ns();
  goes_on(now) ? want_again(now) : end(why_not_read());
}

/// A part that was cancelled before it started has no transfer that says so.
Status Pull::why_not_read() const {
  for (size_t index = 0; index < num_parts_; ++index) {
    if (part(index).code == Code::kCancelled && !part(index).transfer) {
      return Status::Cancelled("cancelled before all of it had started");
    }
  }
  return {};
}

bool Pull::goes_on(int64_t now) const {
  if (stop_ != Stop::kNone || now >= deadline_ns_ || attempt_ + 1 >= num_attempts_) return false;
  bool any = false;
  for (size_t index = 0; index < num_parts_; ++index) {
    if (part(index).state != TransferState::kFailed) continue;
    if (!may_work_again(part(index).code, relaying_.failed != nullptr)) return false;
    any = true;
  }
  return any;
}

void Pull::want_again(int64_t now) {
  wanted_.clear();
  for (uint32_t index = 0; index < num_parts_; ++index) {
    if (part(index).state != TransferState::kFailed) continue;
    wanted_.push_back(index);
    part(index).cut = std::exchange(part(index).transfer, nullptr);
  }
  ++attempt_;
  state_.store(PullState::kWaiting, std::memory_order_release);
  changed_.notify_all();
  ask_to_connect(now);
}

void Pull::end(Status why) {
  PullState ended = why.ok() ? PullState::kSettled : PullState::kFailed;
  for (uint32_t index = 0; index < num_parts_; ++index) {
    const Part& one = part(index);
    if (one.state == TransferState::kFailed) ended = PullState::kFailed;
    if (one.state != TransferState::kValid) continue;
    ended = std::min(ended, PullState::kValid);
    if (one.transfer->seat().settles()) ask({PullAction::Kind::kSettle, index});
  }
  why_ = std::move(why);
  if (ended == PullState::kFailed && relaying_.failed) relaying_.failed();
  if (ended != PullState::kFailed && attempt_ + 1 < relaying_.num_sources) {
    ask({PullAction::Kind::kUnused, attempt_ + 1});
  }
  state_.store(ended, std::memory_order_release);
  for (const auto& [queue, token] : watchers_) queue->push(token);
  watchers_.clear();
  changed_.notify_all();
}

void Pull::stop(Stop why) {
  std::vector<std::shared_ptr<Transfer>> running;
  {
    std::lock_guard lock(mutex_);
    if (done()) return;
    if (stop_ != Stop::kCancelled) stop_ = why;
    if (state() == PullState::kWaiting) {
      const char* const text = why == Stop::kClosed ? "the worker was closed before the owner was connected"
                               : why == Stop::kCancelled ? "cancelled before it was connected"
                                                         : "the owner was not connected within the deadline";
      ask({PullAction::Kind::kGiveUp, attempt_});
      return end(why == Stop::kDeadline ? Status::Timeout(text) : Status::Cancelled(text));
    }
    if (why != Stop::kCancelled) return;
    if (relaying_.failed) relaying_.failed();  // its readers are not told that what comes now is valid
    for (size_t index = 0; index < num_parts_; ++index) {
      if (part(index).state == TransferState::kPending && part(index).transfer) {
        running.push_back(part(index).transfer);
      }
    }
  }
  for (const auto& transfer : running) transfer->cancel();
}

void Pull::request_cancel() { stop(Stop::kCancelled); }

void Pull::cancel() {
  stop(Stop::kCancelled);
  wait(-1);
}

void Pull::close() { stop(Stop::kClosed); }

void Pull::tick(int64_t now) {
  if (state() == PullState::kWaiting && now >= deadline_ns_ + kAnswerNs) stop(Stop::kDeadline);
}

std::shared_ptr<Transfer> Pull::reading() const {
  for (size_t index = 0; index < num_parts_; ++index) {
    if (part(index).state == TransferState::kPending && part(index).transfer) return part(index).transfer;
  }
  return nullptr;
}

bool Pull::wait(int64_t timeout_ns) {
  const int64_t until = timeout_ns < 0 ? INT64_MAX : now_ns() + timeout_ns;
  for (;;) {
    if (done()) return true;
    std::shared_ptr<Transfer> transfer;
    {
      std::unique_lock lock(mutex_);
      if (state() == PullState::kReading) transfer = reading();
    }
    const int64_t now = now_ns();
    if (!transfer) {
      await_change(until);
    } else if (transfer->wait(until == INT64_MAX ? -1 : std::max<int64_t>(until - now, 0))) {
      (void)transfer->status();  // it tells this pull of its end under its lock
    }
    tick(now_ns());
    if (now >= until) return done();
  }
}

/// Waits until there is something to read, the pull has left this state, or it is time to tick.
void Pull::await_change(int64_t until) {
  std::unique_lock lock(mutex_);
  const PullState before = state();
  const auto changed = [&] {
    return done() || state() != before || (state() == PullState::kReading && reading());
  };
  if (before == PullState::kWaiting) until = std::min(until, deadline_ns_ + kAnswerNs);
  if (until == INT64_MAX) {
    changed_.wait(lock, changed);
  } else {
    changed_.wait_for(lock, std::chrono::nanoseconds(std::max<int64_t>(until - now_ns(), 0)), changed);
  }
}

bool Pull::notify(std::shared_ptr<CompletionQueue> queue, uint64_t token) {
  std::lock_guard lock(mutex_);
  if (done()) return false;
  watchers_.emplace_back(std::move(queue), token);
  return true;
}

Status Pull::failure() const {
  std::lock_guard lock(mutex_);
  return why_;
}

size_t Pull::num_parts() const {
  std::lock_guard lock(mutex_);
  return num_parts_;
}

std::shared_ptr<Transfer> Pull::transfer(size_t index) const {
  std::lock_guard lock(mutex_);
  return index < num_parts_ ? part(index).transfer : nullptr;
}

std::shared_ptr<Transfer> Pull::cut(size_t index) const {
  std::lock_guard lock(mutex_);
  return index < num_parts_ ? part(index).cut : nullptr;
}

void Pull::prove(uint64_t tokens) {
  if (tokens > proven_tokens()) proven_tokens_.store(tokens, std::memory_order_release);
}

}  // namespace kvlink

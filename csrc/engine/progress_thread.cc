// SPDX-License-Identifier: Apache-2.0
#include "engine/progress_thread.h"

#include <algorithm>
#include <cerrno>
#include <string>

#include "base/check.h"
#include "base/clock.h"

namespace kvlink {
namespace {

// Without progress for this long the thread sleeps on its descriptors. The time is short because a sleep
// costs no throughput while a window of bytes is under way, and a spin does if both ends share a CPU: 0.46
// against 0.43 CPU-s/GiB on tcp.
constexpr int64_t kSpinNs = 2'000;
// A lane is tried again after this long if it copies in poll() but made no progress (a fault is injected),
// has settles to send, or was held by another thread.
constexpr int64_t kTickNs = 1'000'000;
constexpr int64_t kTickForNs = 50'000'000;
constexpr int64_t kActiveNs = 1'000'000'000;  // at most, although a descriptor tells of work

}  // namespace

Result<std::shared_ptr<ProgressThread>> ProgressThread::make() {
  static const std::string kDoing = "cannot start a progress thread";
  Result<UniqueFd> wake_fd = open_event(kDoing);
  if (!wake_fd.ok()) return wake_fd.status();
  std::shared_ptr<ProgressThread> made(new ProgressThread(std::move(*wake_fd)));
  Result<Thread> thread =
      start_thread(kDoing, "kvlink-progress", [progress = made.get()] { progress->run(); });
  if (!thread.ok()) return thread.status();
  made->thread_ = std::move(*thread);
  return made;
}

void ProgressThread::add(std::shared_ptr<Lane> lane) {
  {
    std::lock_guard lock(mutex_);
    lanes_.push_back(std::move(lane));
  }
  wake();
}

void ProgressThread::remove(const std::shared_ptr<Lane>& lane) {
  {
    std::lock_guard lock(mutex_);
    std::erase(lanes_, lane);
  }
  wake();  // while the thread sleeps, it keeps every lane that it saw
}

void ProgressThread::wake() {
  wakes_.fetch_add(1, std::memory_order_seq_cst);
  if (!asleep_.load(std::memory_order_seq_cst)) return;
  std::lock_guard lock(waking_);
  if (wake_fd_) set_event(wake_fd_.get());
}

void ProgressThread::stop() {
  if (stopping_.exchange(true)) return;
  wake();
  if (thread_.joinable()) thread_.join();
  std::lock_guard lock(waking_);
  wake_fd_.reset();
}

void ProgressThread::wake_from_doze() {
  wakes_.fetch_add(1, std::memory_order_seq_cst);
  if (dozing_.load(std::memory_order_seq_cst)) wake();
}

void ProgressThread::run() {
  int64_t last_progress = 0, last_unsent = 0;
  std::vector<std::shared_ptr<Lane>> lanes;
  std::vector<pollfd> watched;
  for (;;) {
    // Read before anything that a wake() may concern, including the lanes and `stopping_`.
    const uint64_t wakes = wakes_.load(std::memory_order_seq_cst);
    if (stopping_) return;
    lanes.clear();  // not under the mutex: one of them may end here
    {
      std::lock_guard lock(mutex_);
      lanes = lanes_;
    }
    watched.assign(1, {wake_fd_.get(), POLLIN, 0});
    bool progressed = false, copying = false, held = false, active = false;
    int64_t wake_at = INT64_MAX;
    for (const auto& lane : lanes) {
      // A descriptor of a lane that this thread does not drive is readable only if the owner hung up.
      const short events = lane->traits().cpu_copies ? POLLIN : POLLRDHUP;
      watched.push_back({lane->broken() ? -1 : lane->traits().wake_fd, events, 0});
      if (lane->idle() && !lane->has_unflushed_writes()) continue;
      Lane::Driven driven;
      try {
        driven = lane->drive();
      } catch (const BrokenContract&) {  // also of a transfer that its broken lane returns: the next round
        driven.active = driven.progressed = true;  // goes on with the others
      }
      if (lane->has_unflushed_writes()) last_unsent = now_ns();
      held |= driven.held;
      if (driven.held) continue;
      if (driven.active) watched.back().events = POLLIN;
      active |= driven.active;
      progressed |= driven.progressed && driven.active;
      copying |= lane->traits().cpu_copies;
      wake_at = std::min(wake_at, driven.wake_at_ns);
    }
    const int64_t now = now_ns();
    if (progressed) last_progress = now;
    if (progressed || now - last_progress < kSpinNs) continue;
    // Settles keep coming: looking every millisecond is cheaper than being woken for each.
    const bool ticking = now - last_unsent < kTickForNs;
    const Lane::Rest rest = arm_all(lanes);
    if (rest == Lane::Rest::kNone) continue;
    held |= rest == Lane::Rest::kShort;
    asleep_.store(true, std::memory_order_seq_cst);
    dozing_.store(!ticking, std::memory_order_seq_cst);
    // A wake() that came before `asleep_` was visible wrote nothing; its count tells.
    if (wakes == wakes_.load(std::memory_order_seq_cst)) {
      if (ticking || copying || held) {
        wake_at = std::min(wake_at, now + kTickNs);
      } else if (active) {
        wake_at = std::min(wake_at, now + kActiveNs);
      }
      if (sleep_until(wake_at, watched, lanes)) last_progress = now_ns();
    }
    asleep_.store(false, std::memory_order_seq_cst);
    dozing_.store(false, std::memory_order_seq_cst);
  }
}

/// As long as every lane allows.
Lane::Rest ProgressThread::arm_all(const std::vector<std::shared_ptr<Lane>>& lanes) {
  Lane::Rest rest = Lane::Rest::kLong;
  for (const auto& lane : lanes) {
    if ((lane->idle() && !lane->has_unflushed_writes()) || lane->traits().cpu_copies) continue;
    rest = std::min(rest, lane->arm());
    if (rest == Lane::Rest::kNone) break;
  }
  return rest;
}

bool ProgressThread::sleep_until(int64_t wake_at_ns, std::vector<pollfd>& fds,
                                 const std::vector<std::shared_ptr<Lane>>& lanes) {
  const int ready = wait_ready(fds, std::max<int64_t>(wake_at_ns - now_ns(), 0));
  if (ready < 0 && errno != EINTR) {  // more lanes than a lowered RLIMIT_NOFILE lets it watch: look each tick
    wait_ready({}, kTickNs);
    return true;
  }
  clear_event(wake_fd_.get());
  for (size_t index = 1; index < fds.size(); ++index) {
    if (fds[index].revents != 0) lanes[index - 1]->check_idle(false);
  }
  return ready != 0;
}

}  // namespace kvlink

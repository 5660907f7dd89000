// SPDX-License-Identifier: Apache-2.0
#include "transports/same_host/copy_helper.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

#include "base/clock.h"
#include "base/sys.h"

namespace kvlink {
namespace {

constexpr int64_t kSpinNs = 40'000;   // somewhat more than a part takes
constexpr uint32_t kUsefulShare = 4;  // a helper that copies less than a quarter was late

/// Returns the cores of the calling thread without the one that it runs on; none if it has no other.
cpu_set_t other_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) CPU_ZERO(&cores);
  if (const int own = ::sched_getcpu(); own >= 0) CPU_CLR(static_cast<size_t>(own), &cores);
  return cores;
}

bool has_another_core() {
  const cpu_set_t others = other_cores();
  return CPU_COUNT(&others) > 0;
}

}  // namespace

void CopyHelper::run(CopyPart copy, void* context, uint32_t num_parts, int64_t alone_ns) {
  const bool helped = num_parts > 1 && !taken_.exchange(true, std::memory_order_acquire);
  if (!helped || !starts(alone_ns)) {
    for (uint32_t part = 0; part < num_parts; ++part) copy(context, part);
    if (helped) taken_.store(false, std::memory_order_release);
    return;
  }
  copy_ = copy;
  context_ = context;
  num_parts_ = num_parts;
  next_part_.store(0, std::memory_order_relaxed);
  num_helped_.store(0, std::memory_order_relaxed);
  joined_ns_.store(0, std::memory_order_relaxed);
  const int64_t began = now_ns();
  state_.store(kPosted, std::memory_order_release);
  state_.notify_one();
  copy_parts();
  const int64_t worked = now_ns();
  wait_for_helper();
  learn(num_parts, began, worked - began, now_ns() - worked);
  taken_.store(false, std::memory_order_release);
}

/// Returns whether this work is to be shared. Starts the thread at the first.
bool CopyHelper::starts(int64_t alone_ns) {
  if (!policy_.shares(alone_ns)) return false;
  if (is_alone_ || thread_.joinable()) return !is_alone_;
  is_alone_ = !has_another_core();
  if (is_alone_) return false;
  Result<std::thread> thread =
      sys::start_thread("cannot start a copying thread", "kvlink-copying", [this] { serve(); });
  is_alone_ = !thread.ok();
  if (!is_alone_) thread_ = std::move(*thread);
  return !is_alone_;
}

void CopyHelper::serve() {
  for (;;) {
    uint32_t state = state_.load(std::memory_order_acquire);
    if (state == kStopping) return;
    if (state == kPosted && state_.compare_exchange_strong(state, kJoined, std::memory_order_acq_rel)) {
      joined_ns_.store(now_ns(), std::memory_order_relaxed);
      num_helped_.store(copy_parts(), std::memory_order_relaxed);
      state_.store(kIdle, std::memory_order_release);
      state_.notify_one();
    } else {
      state_.wait(state, std::memory_order_acquire);
    }
  }
}

/// Copies parts until none is left, and returns how many.
uint32_t CopyHelper::copy_parts() {
  uint32_t copied = 0;
  for (; true; ++copied) {
    const uint32_t part = next_part_.fetch_add(1, std::memory_order_relaxed);
    if (part >= num_parts_) return copied;
    copy_(context_, part);
  }
}

/// Takes the work back, or waits for the part that the helper is copying.
void CopyHelper::wait_for_helper() {
  uint32_t state = kPosted;
  if (state_.compare_exchange_strong(state, kIdle, std::memory_order_acq_rel)) return;
  for (const int64_t ends = now_ns() + kSpinNs; now_ns() < ends;) {
    if (state_.load(std::memory_order_acquire) != kJoined) return;
  }
  while (state_.load(std::memory_order_acquire) == kJoined) state_.wait(kJoined, std::memory_order_acquire);
}

/// A late helper may have waited for the caller's own core, where Linux often wakes a thread, so it is sent
/// to another; if it is late there, too, all cores are busy.
void CopyHelper::learn(uint32_t num_parts, int64_t began, int64_t worked_ns, int64_t waited_ns) {
  const bool late =
      num_helped_.load(std::memory_order_relaxed) * kUsefulShare < num_parts || waited_ns >= worked_ns;
  const int64_t joined = joined_ns_.load(std::memory_order_relaxed);
  policy_.learn(joined == 0 ? worked_ns : joined - began, late);
  if (!late) return;
  if (const cpu_set_t others = other_cores(); CPU_COUNT(&others) > 0) {  // best effort
    ::pthread_setaffinity_np(thread_.native_handle(), sizeof others, &others);
  }
}

void CopyHelper::stop() {
  if (!thread_.joinable()) return;
  if (process_.inherited()) {  // a forked child has no such thread
    thread_.detach();
    return;
  }
  state_.store(kStopping, std::memory_order_release);
  state_.notify_one();
  thread_.join();
  is_alone_ = true;
}

}  // namespace kvlink

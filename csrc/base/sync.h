// SPDX-License-Identifier: Apache-2.0
// Locks, threads and descriptors of the reader's engine: the standard types and the kernel's. The simulation
// (tests/simulation) compiles the same code with its own types, under a scheduler that a seed decides.
#pragma once

#ifdef KVLINK_SIMULATED_SYNC
#include "simulated_sync.h"
#else

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sys.h"
#include "base/unique_fd.h"

namespace kvlink {

using Mutex = std::mutex;
using CondVar = std::condition_variable;
using Thread = std::thread;
template <typename T>
using Atomic = std::atomic<T>;

/// Orders every access of this thread before it against every one after it, as all threads see them that
/// issue it, too.
inline void full_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
/// Everything that this thread has stored or seen so far comes before what it stores later.
inline void release_fence() { std::atomic_thread_fence(std::memory_order_release); }

/// `doing` begins the message of a failure, here and below.
inline Result<UniqueFd> open_event(const std::string& doing) { return sys::event_fd(doing); }

inline Result<Thread> start_thread(const std::string& doing, const char* name, std::function<void()> body) {
  return sys::start_thread(doing, name, std::move(body));
}

inline void yield_thread() { std::this_thread::yield(); }

/// Makes an eventfd readable. It cannot fail, because the counter is far from its limit.
inline void set_event(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(fd, &one, sizeof(one));
}

/// Makes an eventfd unreadable.
inline void clear_event(int fd) {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = ::read(fd, &count, sizeof(count));
}

/// Calls ppoll() without a signal mask. Returns how many are ready, 0 after `ns`, or -1 with errno set.
inline int wait_ready(std::span<pollfd> fds, int64_t ns) {
  const timespec timeout{ns / 1'000'000'000, ns % 1'000'000'000};
  return ::ppoll(fds.data(), fds.size(), &timeout, nullptr);
}

}  // namespace kvlink

#endif

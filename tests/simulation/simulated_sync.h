// SPDX-License-Identifier: Apache-2.0
// The types of csrc/base/sync.h in the simulation. Every operation that another thread can observe is a point
// at which that thread may run. Memory is sequentially consistent here: weaker orders are not explored.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "scheduler.h"

namespace kvlink {

int64_t now_ns();

class Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  void lock();
  bool try_lock();
  void unlock();

 private:
  simulation::Fiber* holder_ = nullptr;
  std::vector<simulation::Fiber*> waiting_;
};

class CondVar {
 public:
  template <typename Lock, typename Predicate>
  void wait(Lock& lock, Predicate predicate) {
    while (!predicate()) wait_until(*lock.mutex(), INT64_MAX);
  }
  template <typename Lock, typename Predicate>
  bool wait_for(Lock& lock, std::chrono::nanoseconds time, Predicate predicate) {
    const int64_t until = simulation::Scheduler::the().now() + time.count();
    while (!predicate()) {
      if (!wait_until(*lock.mutex(), until)) return predicate();
    }
    return true;
  }
  void notify_all();

 private:
  bool wait_until(Mutex& mutex, int64_t until_ns);

  std::vector<simulation::Fiber*> waiting_;
};

template <typename T>
class Atomic {
 public:
  Atomic() : value_{} {}
  Atomic(T value) : value_(value) {}  // NOLINT: as the standard one

  T load(std::memory_order = {}) const { return at_a_point(); }
  operator T() const { return at_a_point(); }  // NOLINT: as the standard one
  void store(T value, std::memory_order = {}) { at_a_point() = value; }
  void operator=(T value) { at_a_point() = value; }
  T exchange(T value, std::memory_order = {}) { return std::exchange(at_a_point(), value); }
  T fetch_add(T more, std::memory_order = {}) {
    T& value = at_a_point();
    return std::exchange(value, value + more);
  }
  T fetch_or(T bits, std::memory_order = {}) {
    T& value = at_a_point();
    return std::exchange(value, value | bits);
  }
  T fetch_sub(T less, std::memory_order = {}) { return fetch_add(0 - less); }

 private:
  T& at_a_point() const {
    simulation::Scheduler::the().point();
    return value_;
  }

  mutable T value_;
};

inline void full_fence() {}
inline void release_fence() {}

class Thread {
 public:
  Thread() = default;
  Thread(const char* name, std::function<void()> body);
  bool joinable() const { return fiber_ != nullptr; }
  void join();

 private:
  simulation::Fiber* fiber_ = nullptr;
};

inline Result<Thread> start_thread(const std::string&, const char* name, std::function<void()> body) {
  return Thread(name, std::move(body));
}

inline void yield_thread() { simulation::Scheduler::the().sleep(1'000); }

/// Descriptors are numbers with a state that the simulation keeps.
Result<UniqueFd> open_event(const std::string& doing);
void set_event(int fd);
void clear_event(int fd);
int wait_ready(std::span<pollfd> fds, int64_t ns);

namespace simulation {

/// Readable also whenever `other` is, and when its timer is due.
int open_fd(int other = -1);
void set_timer(int fd, int64_t ns);  // 0: none
void close_fd(int fd);               // no event is delivered to its poller afterwards
void hang_up(int fd);
bool is_set(int fd);
void forget_fds();

}  // namespace simulation
}  // namespace kvlink

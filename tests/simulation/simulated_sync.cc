// SPDX-License-Identifier: Apache-2.0
#include "simulated_sync.h"

#include <algorithm>

namespace kvlink {

using simulation::Fiber;
using simulation::Scheduler;

int64_t now_ns() { return Scheduler::the().look(); }

void Mutex::lock() {
  Scheduler& scheduler = Scheduler::the();
  scheduler.point();
  if (!scheduler.running()) {  // a check between two steps of the threads
    if (holder_) simulation::fail("a check needs what a thread holds");
    return;
  }
  if (holder_ == scheduler.running()) simulation::fail(holder_->name + " locks a mutex twice");
  while (holder_) {
    const Scheduler::InEngine not_here(false);
    waiting_.push_back(scheduler.running());
    scheduler.block(INT64_MAX);
  }
  holder_ = scheduler.running();
}

bool Mutex::try_lock() {
  Scheduler& scheduler = Scheduler::the();
  scheduler.point();
  if (holder_ == scheduler.running()) simulation::fail(holder_->name + " locks a mutex twice");
  if (holder_) return false;
  holder_ = scheduler.running();
  return true;
}

void Mutex::unlock() {
  Scheduler& scheduler = Scheduler::the();
  if (!scheduler.running()) return;
  if (holder_ != scheduler.running())
    simulation::fail(scheduler.running()->name + " unlocks another's mutex");
  holder_ = nullptr;
  for (Fiber* const fiber : std::exchange(waiting_, {})) scheduler.unblock(fiber);
  scheduler.point();
}

bool CondVar::wait_until(Mutex& mutex, int64_t until_ns) {
  Scheduler& scheduler = Scheduler::the();
  const Scheduler::InEngine not_here(false);
  waiting_.push_back(scheduler.running());
  mutex.unlock();
  const bool woken = scheduler.block(until_ns);
  std::erase(waiting_, scheduler.running());
  mutex.lock();
  return woken;
}

void CondVar::notify_all() {
  for (Fiber* const fiber : std::exchange(waiting_, {})) Scheduler::the().unblock(fiber);
  Scheduler::the().point();
}

Thread::Thread(const char* name, std::function<void()> body)
    : fiber_(Scheduler::the().spawn(name, std::move(body))) {
  fiber_->of_engine = fiber_->in_engine = true;
}

void Thread::join() { Scheduler::the().join(std::exchange(fiber_, nullptr)); }

namespace {

struct Descriptor {
  bool open = false, readable = false, hung_up = false;
  int other = -1;
  int64_t due_ns = INT64_MAX;
  std::vector<Fiber*> polling;
};

std::vector<Descriptor>& descriptors() {
  static std::vector<Descriptor> all;
  return all;
}

// Far from real numbers, which closing one by mistake would hit.
constexpr int kFirst = 1 << 24;

Descriptor* find(int fd) {
  const auto index = static_cast<size_t>(fd - kFirst);
  return fd >= kFirst && index < descriptors().size() ? &descriptors()[index] : nullptr;
}

void wake(Descriptor& descriptor) {
  for (Fiber* const fiber : descriptor.polling) Scheduler::the().unblock(fiber);
}

short ready(const pollfd& wanted) {
  const Descriptor* const descriptor = find(wanted.fd);
  if (!descriptor) return 0;
  if (!descriptor->open) return POLLNVAL;
  const Descriptor* const other = find(descriptor->other);
  const bool readable = descriptor->readable || Scheduler::the().now() >= descriptor->due_ns ||
                        (other && other->open && (other->readable || other->hung_up));
  const int in = readable ? POLLIN : 0, hung_up = descriptor->hung_up ? POLLIN | POLLRDHUP : 0;
  return static_cast<short>(wanted.events & (in | hung_up)) |
         static_cast<short>(descriptor->hung_up ? POLLHUP : 0);
}

int count_ready(std::span<pollfd> fds) {
  int count = 0;
  for (pollfd& one : fds) {
    one.revents = ready(one);
    count += one.revents != 0;
  }
  return count;
}

}  // namespace

Result<UniqueFd> open_event(const std::string&) { return UniqueFd(simulation::open_fd()); }

void set_event(int fd) {
  Scheduler::the().point();
  Descriptor* const descriptor = find(fd);
  if (!descriptor || !descriptor->open) return;
  descriptor->readable = true;
  wake(*descriptor);
}

void clear_event(int fd) {
  Scheduler::the().point();
  if (Descriptor* const descriptor = find(fd)) descriptor->readable = false;
}

int wait_ready(std::span<pollfd> fds, int64_t ns) {
  Scheduler& scheduler = Scheduler::the();
  scheduler.point();
  const Scheduler::InEngine not_here(false);
  const int64_t until = ns > INT64_MAX - scheduler.now() ? INT64_MAX : scheduler.now() + ns;
  for (;;) {
    const int count = count_ready(fds);
    if (count > 0 || scheduler.now() >= until) return count;
    int64_t due = until;
    std::vector<int> watched;
    for (const pollfd& one : fds) {
      const Descriptor* const found = find(one.fd);
      if (!found) continue;
      watched.insert(watched.end(), {one.fd, found->other});
      if (found->open && (one.events & POLLIN)) due = std::min(due, found->due_ns);
    }
    for (const int fd : watched) {
      if (Descriptor* const found = find(fd)) found->polling.push_back(scheduler.running());
    }
    scheduler.block(due);
    for (const int fd : watched) {
      if (Descriptor* const found = find(fd)) std::erase(found->polling, scheduler.running());
    }
  }
}

namespace simulation {

int open_fd(int other) {
  Descriptor& made = descriptors().emplace_back();
  made.open = true;
  made.other = other;
  return kFirst + static_cast<int>(descriptors().size()) - 1;
}

void set_timer(int fd, int64_t ns) {
  if (Descriptor* const found = find(fd)) found->due_ns = ns > 0 ? Scheduler::the().now() + ns : INT64_MAX;
}

void close_fd(int fd) {
  if (Descriptor* const descriptor = find(fd)) descriptor->open = false;
}

void hang_up(int fd) {
  Descriptor* const descriptor = find(fd);
  if (!descriptor) return;
  descriptor->hung_up = true;
  wake(*descriptor);
}

bool is_set(int fd) {
  const Descriptor* const descriptor = find(fd);
  return descriptor && descriptor->readable;
}

void forget_fds() { descriptors().clear(); }

}  // namespace simulation
}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvlink::simulation {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr int64_t kStartNs = 1'000'000'000'000;
constexpr int64_t kLimitNs = kStartNs + 60'000'000'000;
// A fiber that could run waits no longer than this while others do.
constexpr int64_t kStarvedNs = 200'000;

std::vector<std::byte*>& free_stacks() {
  static std::vector<std::byte*> stacks;
  return stacks;
}

std::byte* take_stack() {
  auto& stacks = free_stacks();
  if (stacks.empty()) {
    void* const made =
        ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (made == MAP_FAILED) fail("no memory for a fiber's stack");
    return static_cast<std::byte*>(made);
  }
  std::byte* const stack = stacks.back();
  stacks.pop_back();
  return stack;
}

// Tells AddressSanitizer about a switch.
void leave_stack([[maybe_unused]] void** fake, [[maybe_unused]] const void* to,
                 [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake, to, bytes);
#endif
}
void enter_stack([[maybe_unused]] void* fake, [[maybe_unused]] const void** from,
                 [[maybe_unused]] size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, from, bytes);
#endif
}

const void* main_stack = nullptr;
size_t main_stack_bytes = 0;

}  // namespace

Scheduler* Scheduler::current_ = nullptr;

void Work::note_allocation() {
  if (!Scheduler::exists()) return;
  Scheduler& scheduler = Scheduler::the();
  if (scheduler.running() && scheduler.running()->in_engine) ++scheduler.work().allocations;
}

Scheduler::Scheduler(uint64_t seed) : random_(seed), now_ns_(kStartNs) {
  current_ = this;
  look_ns_ = random_.one_of<int64_t>({1'000, 3'000, 6'000});
  slice_ = random_.one_of<int64_t>({1, 3, 10, 40});
  traces_ = std::getenv("KVLINK_SIMULATION_TRACE") != nullptr;
}

Scheduler::~Scheduler() {
  for (const auto& fiber : fibers_) free_stacks().push_back(fiber->stack);
  current_ = nullptr;
}

void Scheduler::at(int64_t ns, std::function<void()> what) {
  events_.push({ns, num_events_++, std::move(what)});
}

Fiber* Scheduler::spawn(std::string name, std::function<void()> body) {
  Fiber* const fiber = fibers_.emplace_back(std::make_unique<Fiber>()).get();
  fiber->name = std::move(name);
  fiber->body = std::move(body);
  fiber->stack = take_stack();
  fiber->runnable_since_ns = now_ns_;
  ::getcontext(&fiber->context);
  fiber->context.uc_stack = {.ss_sp = fiber->stack, .ss_flags = 0, .ss_size = kStackBytes};
  fiber->context.uc_link = nullptr;
  ::makecontext(&fiber->context, &Scheduler::enter, 0);
  alive_.push_back(fiber);
  return fiber;
}

void Scheduler::enter() {
  enter_stack(nullptr, &main_stack, &main_stack_bytes);
  Scheduler& self = the();
  Fiber* const fiber = self.running_;
  fiber->body();
  fiber->body = nullptr;
  fiber->state = Fiber::State::kEnded;
  for (Fiber* const joining : fiber->joining) self.unblock(joining);
  std::erase(self.alive_, fiber);
  leave_stack(nullptr, main_stack, main_stack_bytes);
  std::longjmp(self.main_, 1);
}

void Scheduler::run() {
  while (!alive_.empty()) {
    run_events();
    if (Fiber* const next = choose()) {
      switch_to(next);
    } else {
      advance();
    }
  }
}

void Scheduler::run_events() {
  while (!events_.empty() && events_.top().at_ns <= now_ns_) {
    const auto what = std::move(const_cast<Event&>(events_.top()).what);
    events_.pop();
    what();
  }
}

/// One that has waited for long, or any. Null: all are blocked.
Fiber* Scheduler::choose() {
  uint32_t num_runnable = 0;
  Fiber* chosen = nullptr;
  Fiber* oldest = nullptr;
  for (Fiber* const fiber : alive_) {
    if (fiber->state == Fiber::State::kBlocked) {
      if (fiber->wake_at_ns > now_ns_) continue;
      fiber->state = Fiber::State::kRunnable;
      fiber->runnable_since_ns = now_ns_;
    }
    if (random_.next() % ++num_runnable == 0) chosen = fiber;
    if (!oldest || fiber->runnable_since_ns < oldest->runnable_since_ns) oldest = fiber;
  }
  return oldest && now_ns_ - oldest->runnable_since_ns > kStarvedNs ? oldest : chosen;
}

void Scheduler::advance() {
  int64_t next = events_.empty() ? INT64_MAX : events_.top().at_ns;
  for (const Fiber* const fiber : alive_) next = std::min(next, fiber->wake_at_ns);
  if (next < kLimitNs) {
    now_ns_ = std::max(now_ns_, next);
    return;
  }
  std::string names;
  for (const Fiber* const fiber : alive_) names += " " + fiber->name;
  fail("these threads wait for ever:" + names);
}

void Scheduler::start_slice() { points_left_ = random_.between(1, 2 * slice_ - 1); }

void Scheduler::switch_to(Fiber* fiber) {
  running_ = fiber;
  start_slice();
  leave_stack(&main_fake_stack_, fiber->stack, kStackBytes);
  if (_setjmp(main_) == 0) {
    if (std::exchange(fiber->started, true)) std::longjmp(fiber->left_at, 1);
    ::setcontext(&fiber->context);
  }
  enter_stack(main_fake_stack_, nullptr, nullptr);
  running_ = nullptr;
}

void Scheduler::switch_back() {
  leave_stack(&running_->fake_stack, main_stack, main_stack_bytes);
  if (_setjmp(running_->left_at) == 0) std::longjmp(main_, 1);
  enter_stack(running_->fake_stack, nullptr, nullptr);
}

void Scheduler::yield() {
  running_->runnable_since_ns = now_ns_;
  // Nobody else could run and nothing is due: the switch would change nothing.
  const bool alone = std::none_of(alive_.begin(), alive_.end(), [this](const Fiber* fiber) {
    return fiber != running_ && (fiber->state == Fiber::State::kRunnable || fiber->wake_at_ns <= now_ns_);
  });
  if (alone && (events_.empty() || events_.top().at_ns > now_ns_)) return start_slice();
  switch_back();
}

int64_t Scheduler::look() {
  if (!running_) return now_ns_;
  now_ns_ += random_.between(1, look_ns_);
  if (now_ns_ > kLimitNs) fail(running_->name + " reads the clock for ever");
  point();
  return now_ns_;
}

bool Scheduler::block(int64_t until_ns) {
  Fiber* const fiber = running_;
  if (undisturbed_ > 0) fail(fiber->name + " blocks where it must not");
  if (!fiber->woken && until_ns > now_ns_) {
    fiber->state = Fiber::State::kBlocked;
    fiber->wake_at_ns = until_ns;
    switch_back();
    fiber->wake_at_ns = INT64_MAX;
  }
  return std::exchange(fiber->woken, false);
}

void Scheduler::unblock(Fiber* fiber) {
  fiber->woken = true;
  if (fiber->state != Fiber::State::kBlocked) return;
  fiber->state = Fiber::State::kRunnable;
  fiber->runnable_since_ns = now_ns_;
}

void Scheduler::join(Fiber* fiber) {
  while (fiber->state != Fiber::State::kEnded) {
    fiber->joining.push_back(running_);
    block(INT64_MAX);
  }
}

void Scheduler::sleep(int64_t ns) {
  for (const int64_t until = now_ns_ + ns; now_ns_ < until;) block(until);
}

int64_t Scheduler::since_start_ns() const { return now_ns_ - kStartNs; }

void Scheduler::trace(const std::string& what) const {
  if (!traces_) return;
  std::fprintf(stderr, "%10.3f us  %-12s %s\n", static_cast<double>(since_start_ns()) / 1e3,
               running_ ? running_->name.c_str() : "-", what.c_str());
}

}  // namespace kvlink::simulation

// SPDX-License-Identifier: Apache-2.0
// Runs threads as fibers of one real thread. Which one runs, and for how long, is decided by a seed. Time is
// a number: it grows a little with every read of the clock, and jumps when every fiber waits.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "random.h"

namespace kvlink::simulation {

/// A property does not hold: prints why, when and how to replay it, and ends the process.
[[noreturn]] void fail(const std::string& what);

/// Counts what the engine has done in a run.
struct Work {
  uint64_t steps = 0;  // of its own threads: operations that another thread can observe
  uint64_t allocations = 0;

  static void note_allocation();
};

struct Fiber {
  enum class State : uint8_t { kRunnable, kBlocked, kEnded };

  std::string name;
  std::function<void()> body;
  State state = State::kRunnable;
  int64_t wake_at_ns = INT64_MAX;  // while blocked
  int64_t runnable_since_ns = 0;
  bool woken = false;      // by unblock(), also before it blocked
  bool of_engine = false;  // one of its threads
  bool in_engine = false;  // what it does is the engine's work
  std::vector<Fiber*> joining;
  bool started = false;
  ucontext_t context = {};  // of the start; later switches jump, which costs no system call
  std::jmp_buf left_at;
  std::byte* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

class Scheduler {
 public:
  explicit Scheduler(uint64_t seed);
  ~Scheduler();
  static Scheduler& the() { return *current_; }
  static bool exists() { return current_ != nullptr; }

  Random& random() { return random_; }
  int64_t now() const { return now_ns_; }
  int64_t since_start_ns() const;
  /// Calls `what` at that time, outside of every fiber. It must not block.
  void at(int64_t ns, std::function<void()> what);
  Fiber* spawn(std::string name, std::function<void()> body);
  /// Until every fiber ended.
  void run();

  // For fibers. Outside of one, the first two do nothing.
  /// Another fiber may run now.
  void point() {
    if (running_ && running_->of_engine && running_->in_engine) ++work_.steps;
    if (running_ && undisturbed_ == 0 && --points_left_ <= 0) yield();
  }
  /// As a read of the clock.
  int64_t look();
  void yield();
  /// False: nobody called unblock(), the time came.
  bool block(int64_t until_ns);
  void unblock(Fiber* fiber);
  void join(Fiber* fiber);
  void sleep(int64_t ns);
  Fiber* running() const { return running_; }

  /// No other fiber runs while it lives.
  class Undisturbed {
   public:
    Undisturbed() { ++the().undisturbed_; }
    ~Undisturbed() { --the().undisturbed_; }
  };

  /// While it lives, what the fiber does is the engine's work, or is not.
  class InEngine {
   public:
    explicit InEngine(bool is = true) : fiber_(the().running_), before_(fiber_ && fiber_->in_engine) {
      if (fiber_) fiber_->in_engine = is;
    }
    ~InEngine() {
      if (fiber_) fiber_->in_engine = before_;
    }

   private:
    Fiber* const fiber_;
    const bool before_;
  };
  Work& work() { return work_; }

  bool traces() const { return traces_; }
  void trace(const std::string& what) const;

 private:
  struct Event {
    int64_t at_ns;
    uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const {  // the queue has the greatest first
      return at_ns != other.at_ns ? at_ns > other.at_ns : number > other.number;
    }
  };

  static void enter();
  void run_events();
  Fiber* choose();
  void advance();
  void switch_to(Fiber* fiber);
  void switch_back();
  void start_slice();

  static Scheduler* current_;
  Random random_;
  int64_t now_ns_;
  int64_t look_ns_;  // what a read of the clock costs at most
  int64_t slice_;    // points that a fiber may pass before another one runs, about
  int64_t points_left_ = 0;
  int undisturbed_ = 0;
  bool traces_;
  uint64_t num_events_ = 0;
  std::priority_queue<Event> events_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> alive_;
  Fiber* running_ = nullptr;
  Work work_;
  std::jmp_buf main_;
  void* main_fake_stack_ = nullptr;
};

}  // namespace kvlink::simulation

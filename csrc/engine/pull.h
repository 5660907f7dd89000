// SPDX-License-Identifier: Apache-2.0
// One pull, from the call to its end: it waits for its owners, reads from all of them, and ends once.
// docs/design/pull.md has the drawing.
//
// A state machine: it takes what happened and the time, and returns actions for the control thread. A pull
// may have several parts, one for each owner. No part starts before all owners are connected, so one answer
// names them all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/completion_queue.h"
#include "base/process_mark.h"
#include "base/status.h"
#include "base/sync.h"
#include "engine/transfer.h"

namespace kvlink {

enum class PullState : uint8_t {
  kWaiting,   // for its owners
  kStarting,  // connected() starts its parts
  kReading,
  kFailed,  // from here on it has ended
  kValid,   // all bytes landed and validated
  kSettled,
};

/// A pull asks this of the control thread.
struct PullAction {
  enum class Kind : uint8_t {
    kConnect,  // answer attempt `number` by connected() or refused() before `until_ns`
    kSettle,   // part `number` is valid, and its owner could not be told: tell it through its agent
    kGiveUp,   // the pull ended before attempt `number` was answered: no answer is needed
    kUnused,   // a relay has ended well without its sources from `number` on
  };
  Kind kind;
  uint32_t number = 0;
  int64_t until_ns = 0;
};

/// Starts the reads of one part, which end by a deadline. Returns null if the connection is broken.
using StartReads = std::function<std::shared_ptr<Transfer>(int64_t deadline_ns)>;

/// Makes a pull a relay, whose blocks are offered on while it runs.
struct RelayContext {
  uint32_t num_sources = 1;  // that it may read from, one after the other
  /// Called before anybody can see that the pull has failed, and so before its blocks are written again, with
  /// the locks of the pull and its transfer held. It must not block, and must not call the pull.
  std::function<void()> failed;
};

/// Lock order: the locks of Lane and Transfer come before that of the pull, and only those of CompletionQueue
/// and LeaseTable after it. So transfers may end a pull under their locks, and the pull calls them without
/// its own.
class Pull final : public TransferObserver, public std::enable_shared_from_this<Pull> {
 public:
  /// Returns a pull that waits for its owners. begin() comes next.
  static std::shared_ptr<Pull> waiting(int64_t deadline_ns, std::shared_ptr<CompletionQueue> control,
                                       RelayContext relaying = {});
  /// Returns a pull of one part, which the caller has started already. Without `control` it has one attempt.
  static std::shared_ptr<Pull> started(std::shared_ptr<Transfer> only,
                                       std::shared_ptr<CompletionQueue> control);
  /// Returns a pull that reads nothing and has ended.
  static std::shared_ptr<Pull> empty();
  Pull(int64_t deadline_ns, std::shared_ptr<CompletionQueue> control, RelayContext relaying);

  // Any thread. A forked child may only query pulls that had ended before.
  Status check_process() const { return done() ? Status{} : process_.check(); }
  PullState state() const { return state_.load(std::memory_order_acquire); }
  bool done() const { return state() >= PullState::kFailed; }
  /// See Transfer::wait. Returns false if the pull has not ended by then.
  bool wait(int64_t timeout_ns);
  /// Ends the pull. On return no byte of it lands any more and nothing of it starts, whatever other threads
  /// do.
  void cancel();
  /// Like cancel(), and returns before the pull has ended.
  void request_cancel();
  /// The worker closes: a pull that waits ends now, and one that reads goes on until its connections close.
  void close();
  /// Returns false if the pull has ended; nothing is pushed then.
  bool notify(std::shared_ptr<CompletionQueue> queue, uint64_t token);
  /// Returns why the pull ended while it waited for its owners; kOk if it did not.
  Status failure() const;
  size_t num_parts() const;
  /// Returns the last transfer of a part, or null if its connection was broken when it should start.
  std::shared_ptr<Transfer> transfer(size_t part) const;
  /// Returns the transfer of a part that was cut, and after which the part was read again, or null.
  std::shared_ptr<Transfer> cut(size_t part) const;
  /// A relay: so many tokens from the first on have landed and validated.
  uint64_t proven_tokens() const { return proven_tokens_.load(std::memory_order_acquire); }
  void prove(uint64_t tokens);
  /// Returns whether another thread uses the pull now.
  bool busy() const { return !std::unique_lock(mutex_, std::try_to_lock); }

  /// Keeps the reader's block ids of a pull that may be read again. To be called before other threads have
  /// the pull.
  void keep_blocks(std::span<const uint32_t> ids) { blocks_.assign(ids.begin(), ids.end()); }
  const std::vector<uint32_t>& kept_blocks() const { return blocks_; }

  // The control thread's side.
  /// Pushes the token when take_actions() has something: at once, and whenever more is asked. To be called
  /// when the control thread knows the token. REQUIRES a control queue.
  void begin();
  /// Returns whether the control thread has to know this pull.
  bool is_open() const;
  uint64_t token() const { return reinterpret_cast<uintptr_t>(this); }
  std::vector<PullAction> take_actions();
  /// Returns the parts that an attempt reads; empty at the first one, which decides how many there are.
  std::vector<uint32_t> wanted() const;
  /// All owners of an attempt are connected: starts its parts. Returns false if the pull no longer waits for
  /// that attempt; then nothing has started. REQUIRES as many `reads` as wanted().
  bool connected(uint32_t attempt, const std::vector<StartReads>& reads);
  /// An owner cannot be reached. `another`: the next source of a relay may work.
  void refused(uint32_t attempt, Status why, bool another);
  /// Ends a pull that still waits after its deadline, and some time for the control thread to say why.
  void tick(int64_t now_ns);

  void transfer_ended(uint32_t part, TransferState state, Code code) override;

 private:
  enum class Stop : uint8_t { kNone, kCancelled, kDeadline, kClosed };

  struct Part {
    std::shared_ptr<Transfer> transfer, cut;
    TransferState state = TransferState::kPending;
    Code code = Code::kOk;  // of kFailed
  };

  // All REQUIRE the lock.
  Part& part(size_t index) { return index == 0 ? first_ : more_[index - 1]; }
  const Part& part(size_t index) const { return index == 0 ? first_ : more_[index - 1]; }
  std::shared_ptr<Transfer> reading() const;
  bool goes_on(int64_t now_ns) const;
  Status why_not_read() const;
  void want_again(int64_t now_ns);
  void ask_to_connect(int64_t now_ns);
  void conclude();
  void end(Status why);
  void ask(PullAction action);

  void stop(Stop why);
  void start_part(uint32_t index, const StartReads& start, int64_t deadline_ns);
  void await_change(int64_t until_ns);

  const ProcessMark process_;
  const int64_t deadline_ns_;
  const std::shared_ptr<CompletionQueue> control_;
  const RelayContext relaying_;
  const uint32_t num_attempts_;
  std::vector<uint32_t> blocks_;  // constant once other threads have the pull

  Atomic<PullState> state_{PullState::kWaiting};
  Atomic<uint64_t> proven_tokens_{0};

  mutable Mutex mutex_;  // guards everything below
  CondVar changed_;
  Part first_;
  std::vector<Part> more_;
  size_t num_parts_ = 0;
  std::vector<uint32_t> wanted_;
  uint32_t attempt_ = 0;
  int64_t until_ns_;    // of this attempt
  uint32_t alive_ = 0;  // parts that have not ended, and one more while connected() starts them
  Stop stop_ = Stop::kNone;
  Status why_;
  std::vector<PullAction> actions_;
  std::vector<std::pair<std::shared_ptr<CompletionQueue>, uint64_t>> watchers_;
};

}  // namespace kvlink

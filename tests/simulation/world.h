// SPDX-License-Identifier: Apache-2.0
// One run: a worker with its connections, threads, pulls and relays, their owners, and what must hold of
// them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/pull.h"
#include "peers.h"
#include "staging/staged_transport.h"

namespace kvlink::simulation {

/// An owner that a pull reads from, and what it reads.
struct Source {
  Peer* peer = nullptr;
  LeaseSeat seat;
  uint64_t lease = 0;
  std::vector<uint32_t> owner_blocks, reader_blocks;
  std::vector<Content> contents;  // of the blocks, once they are written
  bool streams = false;
  Link* link = nullptr;  // of the last start
  bool settle_asked = false;
  bool lease_may_end = false;  // before it is settled

  bool settles() const { return seat.settle_nonce >= kSmallestNonce; }
};

/// A pull of the run, or a relay.
struct Call {
  std::shared_ptr<Pull> pull;
  std::vector<Source> sources;  // one for each part; of a relay: one for each attempt
  size_t source = 0;            // of a relay: the last that it read from
  std::vector<uint32_t> reader_blocks;
  int64_t started_ns = 0, deadline_ns = 0;
  uint32_t num_attempts = 0;  // asked for
  bool is_relay = false;
  int64_t waited_for_ns = INT64_MAX;  // since when somebody waits, who checks the deadline
  bool seen = false;                  // its end
  bool checked = false;               // its blocks may have other content
  PullState end = PullState::kWaiting;
  // A relay's own offer.
  uint64_t lease = 0;
  std::vector<LeaseSeat> seats;
  size_t num_seats_given = 0;
  bool freed = false;  // its blocks have other content
};

/// csrc/engine/pull.cc has it.
constexpr int64_t kAnswerNs = 50'000'000;
/// How long a control thread that is late takes to see what it is told.
constexpr int64_t kLateNs = 5'000'000;

/// Says how the control thread answers.
enum class Answers : uint8_t { kSoon, kLate, kSometimes, kDies };

class World {
 public:
  explicit World(uint64_t seed);
  /// Until all threads ended.
  void run();

  uint64_t num_pulls() const { return calls_.size(); }
  uint64_t num_valid() const { return num_valid_; }
  int64_t now() const { return scheduler_.now(); }

 private:
  // For the main thread.
  void main();
  void close_all();
  void end_threads();

  // Owners and connections (peers.cc).
  Peer& make_peer(bool is_self);
  Link* connect(Peer& peer, int64_t until_ns);
  Link& make_link(Peer& peer);
  EndpointPlan draw_plan(const Peer& peer, bool faulty);
  void close(Link& link);

  // Callers (callers.cc).
  void call();
  Call* start_call();
  Call* start_relay(bool of_tree);
  void start_tree();
  Call* find_relay();
  Call* any_call();
  void close_pull(Call& call);
  Call& add_call();
  std::vector<uint32_t> take_reader_blocks(Call& call, size_t num);
  bool draw_source(Source& source, const std::vector<Content>& contents, Call* relay);
  bool draw_lease(Source& source);
  bool draw_soft_lease(Source& source, uint64_t ready, int64_t soon, const std::function<void()>& release);
  void grow(const Source& source, uint64_t ready);
  bool start_at_once(Call& call);
  void start_waiting(Call& call, RelayContext relaying);
  void wait_for(Call& call);
  void await(Call& call);
  void note_waiting(Call& call) { call.waited_for_ns = std::min(call.waited_for_ns, now()); }
  void cancel(Call& call);
  void request_cancel(Call& call);
  void meddle();
  void release();

  // The control thread (control.cc).
  void control();
  void take(uint64_t token);
  void act(Call& call, const PullAction& action);
  void answer(Call& call, uint32_t attempt, int64_t until_ns);
  StartReads start_of(Call& call, Source& source, Link& link, uint32_t attempt);
  void disturb_start(Call& call);
  PullRequest request_of(Call& call, Source& source, Link& link, int64_t deadline_ns);
  void prove(Call& call, uint64_t units);
  void settle_by_agent(Call& call, size_t part);

  // Checks of what must hold (checks.cc).
  void see(Call& call);
  void see_valid(const Call& call);
  void see_failed(const Call& call);
  void see_proven(const Call& call, uint64_t units);
  void free_blocks(Call& call);
  bool can_end_alone() const;
  void check_by(int64_t ns, const Call& call, const char* what);
  void expect_by(int64_t ns, std::function<bool()> holds, std::function<void()> otherwise);
  void check_transfer(Link& link, const std::shared_ptr<Transfer>& transfer);
  void check_under_way(Link& link);
  void check_end();
  void check_effort();
  void check_told(const Call& call);
  void check_work(const Link& link);
  static void check_rails(const Link& link);
  static void check_looks(const Link& link, Transfer& transfer);
  void on_landing(const std::byte* at);

  Random& random() { return scheduler_.random(); }
  bool chance(uint32_t percent) { return random().chance(percent); }

  Scheduler scheduler_;
  std::shared_ptr<ScratchPool> scratch_;
  std::shared_ptr<StagingBuffer> staging_;  // of the connections that have one
  std::vector<std::shared_ptr<ProgressThread>> threads_;
  std::vector<std::unique_ptr<Peer>> peers_;  // the first is this worker itself
  std::vector<Fiber*> helpers_;               // the control thread and its answers
  std::vector<std::unique_ptr<Call>> calls_;
  std::array<Call*, kReaderBlocks> call_of_block_{};
  std::vector<std::pair<Peer*, LeaseSeat>> spare_;     // seats that nobody reads under
  std::vector<Source> offered_;                        // further readers of offers that somebody reads
  std::vector<std::pair<Link*, LeaseSeat>> released_;  // of them, those that a connection took
  std::set<uint64_t> lost_;                            // of them, the words that it has returned
  std::shared_ptr<CompletionQueue> control_;
  Answers answers_ = Answers::kSoon;
  bool ticks_ = true, control_stopped_ = false, closed_ = false;
  uint32_t num_blocks_ = 0;  // of the reader's, taken
  uint64_t next_lease_ = 1, next_content_ = 1;
  uint64_t num_valid_ = 0;
};

}  // namespace kvlink::simulation

// SPDX-License-Identifier: Apache-2.0
// One run: connections with their owners, progress threads, callers, and what must hold of them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "endpoint.h"
#include "engine/connection.h"

namespace kvlink::simulation {

struct Pull {
  std::shared_ptr<Transfer> transfer;
  std::vector<uint32_t> owner_blocks, reader_blocks;
  size_t peer = 0;
  uint32_t slot = 0;
  uint64_t settle_nonce = 0;
  int64_t deadline_ns = 0;
  bool streaming = false;
};

/// Every pull reads from an owner's pool into the reader's.
std::shared_ptr<const Planner> planner();

/// One connection and its owner.
struct Peer {
  Owner owner;
  std::vector<EndpointPlan> plans;
  std::vector<std::function<size_t()>> counters;  // of the endpoints' posts
  std::shared_ptr<Connection> connection;
  bool closed = false;
  uint64_t num_quiet = 0;  // times that nothing was under way any more

  bool healthy() const;
  /// The reads that a stopping pull may wait for, because a NIC cannot cancel them.
  int64_t recall_ns() const;
  size_t num_posts() const;
};

class World {
 public:
  explicit World(uint64_t seed);
  /// Until all threads ended.
  void run();

  uint64_t num_pulls() const { return pulls_.size(); }
  uint64_t num_valid() const { return num_valid_; }
  int64_t now() const { return scheduler_.now(); }

 private:
  // For the main thread.
  void main();
  void make_peer();
  EndpointPlan draw_plan(Manner manner, int64_t delay_ns, bool faulty);
  void check_pulls();
  void check_pull(const Pull& pull);
  void close(Peer& peer);

  // For callers (callers.cc).
  void call(uint32_t number);
  Pull* start_pull();
  PullRequest draw_request(Pull& pull);
  void grow(const Pull& pull, uint64_t ready, uint64_t num_units);
  void wait_for(Pull& pull);
  void await(Pull& pull);
  void cancel(Pull& pull);
  void meddle();

  // Checks that run later.
  void check_by(int64_t ns, const Pull& pull, const char* what);
  void check_withdrawn(const Pull& pull);
  void check_under_way(Peer& peer);
  void on_landing(const std::byte* at);

  Random& random() { return scheduler_.random(); }
  bool chance(uint32_t percent) { return random().chance(percent); }

  Scheduler scheduler_;
  std::vector<std::shared_ptr<ProgressThread>> threads_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<std::unique_ptr<Pull>> drawn_;
  std::vector<Pull*> pulls_;  // of drawn_, those that a connection took
  std::array<Pull*, kReaderBlocks> pull_of_block_{};
  uint32_t num_blocks_ = 0;  // of the reader's, taken
  uint64_t next_nonce_ = 1'000;
  uint64_t num_valid_ = 0;
};

}  // namespace kvlink::simulation

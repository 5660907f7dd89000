// SPDX-License-Identifier: Apache-2.0
#include "world.h"

#include <algorithm>
#include <cstring>

#include "simulated_sync.h"

namespace kvlink::simulation {
namespace {

// csrc/engine/progress_thread.cc and csrc/engine/lane.cc have the first and the last; between them, time to
// be given a CPU.
constexpr int64_t kTickNs = 1'000'000;
constexpr int64_t kSlackNs = 1'500'000;
constexpr int64_t kCancelNs = 200'000'000;
// A streaming pull may look for what is ready as rarely as once a tick.
constexpr int64_t kForgottenNs = 2 * kTickNs + kSlackNs;
constexpr int64_t kQuietNs = 1'002'000'000;  // lanes with work are looked at once a second
// The longest that three posts of a slow endpoint take, and a tick for each.
constexpr int64_t kWithdrawnNs = 40'000'000;

std::array<std::byte, kReaderBlocks * kBlockBytes>& reader_pool() {
  static std::array<std::byte, kReaderBlocks * kBlockBytes> pool;
  return pool;
}

}  // namespace

std::shared_ptr<const Planner> planner() {
  static const auto made = [] {
    const auto layout = [](uint32_t blocks) {
      return Layout{blocks, 1, 0, 1, kBlockBytes, kBlockBytes, kBlockBytes, kBlockBytes, {{0, 0, 0}}};
    };
    auto made = Planner::make(layout(kReaderBlocks), layout(kOwnerBlocks),
                              {{reader_pool().data(), reader_pool().size()}},
                              {uint64_t{kOwnerBlocks} * kBlockBytes}, {kPoolRegion}, {});
    if (!made.ok()) fail(made.status().what());
    return *made;
  }();
  return made;
}

namespace {

std::shared_ptr<ScratchPool> scratch() {
  static const auto memory = HostMemory::allocate(uint64_t{kReaderBlocks} * ScratchPool::kLineBytes, false);
  return std::make_shared<ScratchPool>(*memory, 1);
}

}  // namespace

bool Peer::healthy() const {
  return std::all_of(plans.begin(), plans.end(), [](const EndpointPlan& plan) { return plan.healthy(); });
}

int64_t Peer::recall_ns() const {
  const bool recalls =
      std::all_of(plans.begin(), plans.end(), [](const EndpointPlan& plan) { return plan.recalls(); });
  return recalls ? 0 : kCancelNs;
}

size_t Peer::num_posts() const {
  size_t num_posts = 0;
  for (const auto& count : counters) num_posts += count();
  return num_posts;
}

World::World(uint64_t seed) : scheduler_(seed) { forget_fds(); }

void World::run() {
  scheduler_.spawn("main", [this] { main(); });
  scheduler_.run();
}

void World::main() {
  const int64_t num_threads = random().between(1, 2);
  for (int64_t index = 0; index < num_threads; ++index) threads_.push_back(*ProgressThread::make());
  for (int64_t left = random().between(1, 2); left > 0; --left) make_peer();
  std::vector<Fiber*> callers;
  for (int64_t left = random().between(1, 4), number = 0; left > 0; --left, ++number) {
    callers.push_back(scheduler_.spawn("caller " + std::to_string(number),
                                       [this, number] { call(static_cast<uint32_t>(number)); }));
  }
  if (chance(20)) {
    scheduler_.sleep(random().between(0, 5'000'000));
    close(*peers_.front());
  }
  for (Fiber* const caller : callers) scheduler_.join(caller);
  for (const Pull* const pull : pulls_) {
    while (!pull->transfer->done()) scheduler_.sleep(kTickNs);
  }
  check_pulls();
  for (const auto& peer : peers_) close(*peer);
  for (const auto& thread : threads_) thread->stop();
}

EndpointPlan World::draw_plan(Manner manner, int64_t delay_ns, bool faulty) {
  EndpointPlan plan;
  plan.manner = manner;
  plan.delay_ns = delay_ns;
  plan.ordered = manner != Manner::kLaunch && (manner != Manner::kQueue || chance(50));
  plan.window.depth = static_cast<uint32_t>(random().between(1, 4));
  plan.window.chunk_bytes = random().one_of({1u, 2 * kBlockBytes, UINT32_MAX});
  plan.window.bytes = random().one_of<uint64_t>({kBlockBytes, 3 * kBlockBytes, UINT64_MAX});
  plan.window.stripe_bytes = random().one_of<uint64_t>({0, 4 * kBlockBytes, UINT64_MAX});
  if (!faulty) return plan;
  const int64_t at = now() + random().between(0, 3'000'000);
  switch (random().between(0, 3)) {
    case 0:
      plan.breaks_at_ns = at;
      break;
    case 1:
      plan.silent_at_ns = at;
      break;
    case 2:
      plan.refused_percent = 10;
      break;
    default:
      plan.failed_post_percent = 10;
  }
  return plan;
}

void World::make_peer() {
  Peer& peer = *peers_.emplace_back(std::make_unique<Peer>());
  const auto manner = random().one_of({Manner::kStream, Manner::kQueue, Manner::kLaunch, Manner::kCopy});
  const int64_t delay_ns = random().one_of<int64_t>({2'000, 20'000, 100'000, 700'000});
  std::vector<LaneEnd> lanes;
  for (int64_t left = random().between(1, 3); left > 0; --left) {
    peer.plans.push_back(draw_plan(manner, delay_ns, chance(25)));
    auto endpoint = std::make_unique<SimulatedEndpoint>(
        peer.owner, peer.plans.back(),
        SimulatedEndpoint::Observer{[this](const std::byte* at) { on_landing(at); },
                                    [this, &peer] { check_under_way(peer); }});
    peer.counters.push_back(endpoint->counter());
    lanes.push_back({std::move(endpoint)});
  }
  const size_t num_lanes = lanes.size();
  const auto inline_ns = random().one_of<int64_t>({0, 20'000, 300'000});
  peer.connection = std::make_shared<Connection>(std::move(lanes), nullptr, inline_ns, scratch(), threads_,
                                                 std::make_shared<PathStats>());
  const auto regions =
      peer.connection->establish(chance(50) ? 77 : 0, std::vector<std::string>(num_lanes, "reply"), {"pool"},
                                 {"slots", "words"}, kEpoch, 100'000'000);
  if (!regions.ok() && peer.healthy()) fail("a connection is not established: " + regions.status().what());
  if (!regions.ok()) close(peer);
}

void World::close(Peer& peer) {
  if (std::exchange(peer.closed, true)) return;
  peer.connection->close();
  const Scheduler::Undisturbed undisturbed;  // callers add pulls of other peers
  for (const Pull* const pull : pulls_) {
    if (peers_[pull->peer].get() == &peer && !pull->transfer->done()) fail("a pull outlives its connection");
  }
}

void World::on_landing(const std::byte* at) {
  const std::byte* const pool = reader_pool().data();
  if (at < pool || at >= pool + reader_pool().size()) return;  // a slot's words
  const Pull* const pull = pull_of_block_[static_cast<size_t>(at - pool) / kBlockBytes];
  if (pull && pull->transfer && pull->transfer->done()) fail("a byte lands after the pull ended");
}

void World::check_by(int64_t ns, const Pull& pull, const char* what) {
  scheduler_.at(ns + kTickNs + kSlackNs + peers_[pull.peer]->recall_ns(), [&pull, what] {
    if (!pull.transfer->done()) fail(what);
  });
}

/// The owner would cut off the others of this connection at the end of the lease.
void World::check_withdrawn(const Pull& pull) {
  const Peer& peer = *peers_[pull.peer];
  scheduler_.at(pull.deadline_ns + peer.recall_ns() + kWithdrawnNs, [&pull, &peer] {
    if (!pull.transfer || peer.closed || !peer.healthy()) return;
    const bool settled = pull.transfer->state() == TransferState::kSettled;
    if (!settled && peer.owner.has_readers(pull.slot)) fail("a pull that did not settle stays announced");
  });
}

/// Nothing is under way: if pulls are left, somebody must go on with them.
void World::check_under_way(Peer& peer) {
  const uint64_t number = ++peer.num_quiet;
  scheduler_.at(now() + kForgottenNs, [this, &peer, number] {
    if (peer.closed || peer.num_quiet != number || peer.num_posts() > 0) return;
    for (const Pull* const pull : pulls_) {
      const bool started_before = pull->transfer->started_ns() < now() - kForgottenNs;
      if (peers_[pull->peer].get() == &peer && started_before && !pull->transfer->done()) {
        fail("a pull has nothing under way for 3.5 ms");
      }
    }
  });
}

void World::check_pulls() {
  for (const Pull* const pull : pulls_) check_pull(*pull);
  scheduler_.sleep(kQuietNs);
  for (const auto& peer : peers_) {
    if (peer->connection->pending() != 0) fail("ended pulls stay in a lane's queue");
    if (!peer->healthy() || peer->closed) continue;
    if (peer->num_posts() != 0) fail("posts are under way though nobody waits for them");
    for (const Pull* const pull : pulls_) {
      const bool settled = pull->transfer->state() == TransferState::kSettled;
      if (peers_[pull->peer] == peer && settled && !peer->owner.has(pull->settle_nonce)) {
        fail("a settle did not reach the owner");
      }
    }
  }
}

void World::check_pull(const Pull& pull) {
  const bool valid = pull.transfer->state() != TransferState::kFailed;
  const Code code = pull.transfer->status().code();
  if (valid != (code == Code::kOk)) fail("a pull's state and its status say different things");
  if (!valid) return;
  ++num_valid_;
  for (size_t index = 0; index < pull.reader_blocks.size(); ++index) {
    const std::byte* const mine = reader_pool().data() + uint64_t{pull.reader_blocks[index]} * kBlockBytes;
    if (std::memcmp(mine, owner_block(pull.owner_blocks[index]), kBlockBytes) != 0) {
      fail("a valid pull has wrong bytes");
    }
  }
}

}  // namespace kvlink::simulation

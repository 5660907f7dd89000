// SPDX-License-Identifier: Apache-2.0
#include "peers.h"

#include <algorithm>
#include <array>

#include "coverage.h"
#include "simulated_sync.h"
#include "staging/staged_transport.h"
#include "world.h"

namespace kvlink::simulation {
namespace {

constexpr int64_t kCancelNs = 200'000'000;  // csrc/engine/lane.cc has it
constexpr int64_t kMillisecond = 1'000'000;

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

Rails rails_of(const Peer& peer) {
  if (peer.manner != Manner::kQueue) return Rails::kNone;
  constexpr std::array kinds{Rails::kAllUsed, Rails::kOneAside, Rails::kOneToBeTried};
  return kinds[static_cast<size_t>(peer.delay_ns) % kinds.size()];  // which is drawn
}

void slow_down(RailRates& rates, Rails kind) {
  if (kind < Rails::kOneAside) return;
  const Scheduler::Undisturbed undisturbed;
  const bool to_be_tried = kind == Rails::kOneToBeTried;
  note(to_be_tried ? Event::kRailToBeTried : Event::kRailAside);
  const std::array<Rail, 2> rails{Rail{"nic0", 1, 1}, Rail{"nic1", 2, 1}};
  const std::array<RailWork, 2> work{RailWork{2, 1'000}, RailWork{2, 1}};
  const int64_t at = now_ns() - (to_be_tried ? RailRates::kFirstPauseNs : 0);
  for (uint32_t number = 0; number < RailRates::kPulls; ++number) rates.add(rails, work, {}, at);
}

}  // namespace

std::span<std::byte> reader_pool() {
  static std::array<std::byte, kReaderBlocks * kBlockBytes> pool;
  return pool;
}

std::shared_ptr<ScratchPool> make_scratch() {
  static const auto memory = HostMemory::allocate(uint64_t{kReaderBlocks} * ScratchPool::kLineBytes, false);
  return std::make_shared<ScratchPool>(*memory, 1);
}

namespace {

/// A ring of three slots for all lanes of a run.
MemoryRange staging_memory() {
  static const auto memory = HostMemory::allocate(3 * uint64_t{SlotRing::kSlotBytes}, false);
  return (*memory)->range();
}

}  // namespace

int64_t recall_ns(Manner manner) {
  return manner == Manner::kStream || manner == Manner::kCopy ? 0 : kCancelNs;
}

bool Link::healthy() const {
  return established &&
         std::all_of(plans.begin(), plans.end(), [](const EndpointPlan& plan) { return plan.healthy(); });
}

size_t Link::num_posts() const {
  size_t num_posts = 0;
  for (const auto& count : counters) num_posts += count();
  return num_posts;
}

Peer& World::make_peer(bool is_self) {
  Peer& peer = *peers_.emplace_back(std::make_unique<Peer>());
  if (!is_self) peer.pool.resize(size_t{kOwnerBlocks} * kBlockBytes);
  peer.owner = std::make_unique<Owner>(is_self ? reader_pool() : std::span(peer.pool));
  peer.manner = random().one_of({Manner::kStream, Manner::kQueue, Manner::kLaunch, Manner::kCopy});
  peer.delay_ns = random().one_of<int64_t>({2'000, 20'000, 100'000, 700'000});
  peer.inline_ns = random().one_of<int64_t>({0, 20'000, 300'000});
  peer.steady = !is_self && chance(25);
  scheduler_.spawn("owner", [owner = peer.owner.get()] { owner->run(); });
  if (is_self || chance(75)) return peer;
  const int64_t at = now() + random().between(0, 5 * kMillisecond);
  switch (random().between(0, 3)) {
    case 0:
      peer.restarted = std::make_unique<Owner>(std::span(peer.pool), kEpoch + 1);
      [[fallthrough]];
    case 1:
      peer.dies_at_ns = at;
      break;
    case 2:
      peer.hangs_at_ns = at;
      break;
    default:
      peer.refuses_at_ns = at;
  }
  return peer;
}

EndpointPlan World::draw_plan(const Peer& peer, bool faulty) {
  EndpointPlan plan;
  plan.manner = peer.manner;
  plan.delay_ns = peer.delay_ns;
  plan.ordered = plan.manner != Manner::kLaunch && (plan.manner != Manner::kQueue || chance(50));
  plan.breaks_order = plan.ordered && plan.manner == Manner::kQueue && peer.steady && chance(50);
  plan.window.depth = static_cast<uint32_t>(random().between(1, 4));
  plan.window.chunk_bytes = random().one_of({1u, 2 * kBlockBytes, UINT32_MAX});
  plan.window.bytes = random().one_of<uint64_t>({kBlockBytes, 3 * kBlockBytes, UINT64_MAX});
  plan.window.stripe_bytes = random().one_of<uint64_t>({0, 4 * kBlockBytes, UINT64_MAX});
  if (!peer.restarted || now() < peer.dies_at_ns) plan.breaks_at_ns = peer.dies_at_ns;
  plan.silent_at_ns = peer.hangs_at_ns;
  if (!faulty) return plan;
  const int64_t at = now() + random().between(0, 3 * kMillisecond);
  switch (random().between(0, 4)) {
    case 4:
      plan.failed_write_percent = 20;
      break;
    case 0:
      plan.breaks_at_ns = std::min(plan.breaks_at_ns, at);
      break;
    case 1:
      plan.silent_at_ns = std::min(plan.silent_at_ns, at);
      break;
    case 2:
      plan.refused_percent = 10;
      break;
    default:
      plan.failed_post_percent = 10;
  }
  return plan;
}

Link& World::make_link(Peer& peer) {
  Link& link = *peer.links.emplace_back(std::make_unique<Link>());
  const bool other_process = peer.restarted && now() >= peer.dies_at_ns;
  link.owner = other_process ? peer.restarted.get() : peer.owner.get();
  link.planner = planner();
  if (chance(50)) link.id = static_cast<uint32_t>(peer.links.size());
  std::vector<LaneEnd> lanes;
  std::shared_ptr<StagingPolicy> policy;
  std::shared_ptr<StagingBuffer> buffer;
  if (peer.manner != Manner::kCopy && chance(20)) {
    policy = std::make_shared<StagingPolicy>(
        StagingCosts{{.start_us = 10, .op_ns = 5'000}, {.start_us = 20}, chance(50)}, 0);
    if (!staging_) {
      const auto landing = [this](const std::byte* at) { on_landing(at); };
      staging_ = std::make_shared<StagingBuffer>(staging_memory(), make_copier(landing));
    }
    buffer = staging_;
    link.staged = true;
  }
  if (other_process) note(Event::kRestarted);
  link.rails = rails_of(peer);
  for (int64_t left = random().between(1, 3); left > 0; --left) {
    link.plans.push_back(draw_plan(peer, chance(25)));
    EndpointPlan& plan = link.plans.back();
    if (link.rails != Rails::kNone) plan.path = "nic" + std::to_string(lanes.size());
    if (link.rails == Rails::kOneToBeTried) plan.window.chunk_bytes = 1;  // short pulls suffice for a trial
    auto endpoint = std::make_unique<SimulatedEndpoint>(
        *link.owner, link.plans.back(),
        SimulatedEndpoint::Observer{[this](const std::byte* at) { on_landing(at); },
                                    [this, &link] { check_under_way(link); }});
    link.counters.push_back(endpoint->counter());
    link.work.push_back(endpoint->work());
    if (!buffer) {
      lanes.push_back({std::move(endpoint)});
      continue;
    }
    auto staged = *stage_endpoint(std::move(endpoint), buffer, {}, 0);
    StageableEndpoint* const staging = staged.get();
    lanes.push_back({std::move(staged), staging});
  }
  const size_t num_lanes = lanes.size();
  if (num_lanes == 3) note(Event::kThreeLanes);
  link.path_stats = std::make_shared<PathStats>();
  if (num_lanes > 1) slow_down(link.path_stats->rails(), link.rails);
  link.connection = std::make_shared<Connection>(std::move(lanes), std::move(policy), peer.inline_ns,
                                                 scratch_, threads_, link.path_stats, control_);
  const auto regions = link.connection->establish(link.id, std::vector<std::string>(num_lanes, "reply"),
                                                  {"pool"}, {"slots", "words"}, kEpoch, 20 * kMillisecond);
  link.established = regions.ok();
  const bool may_fail = other_process || link.closed || peer.ever_fails() ||
                        !std::all_of(link.plans.begin(), link.plans.end(),
                                     [](const EndpointPlan& plan) { return plan.healthy(); });
  if (!regions.ok() && !may_fail) fail("a connection is not established: " + regions.status().what());
  if (regions.ok() && other_process) fail("another process passes for the one that was asked for");
  if (!regions.ok()) close(link);
  return link;
}

/// Null: it cannot be reached.
Link* World::connect(Peer& peer, int64_t until_ns) {
  scheduler_.sleep(random().between(0, kMillisecond / 5));
  if (now() >= peer.hangs_at_ns) {
    scheduler_.sleep(std::max<int64_t>(until_ns - now(), 0));
    return nullptr;
  }
  if (closed_ || now() >= peer.refuses_at_ns || (now() >= peer.dies_at_ns && !peer.restarted)) return nullptr;
  if (Link* const link = peer.link(); link && link->usable()) return link;
  Link& link = make_link(peer);
  return link.usable() ? &link : nullptr;
}

void World::close(Link& link) {
  if (std::exchange(link.closed, true)) return;
  link.connection->close();
  for (const auto& transfer : link.transfers) {
    if (!transfer->done()) fail("a pull outlives its connection");
  }
}

}  // namespace kvlink::simulation

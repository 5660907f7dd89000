// SPDX-License-Identifier: Apache-2.0
// What must hold of a run, while it goes on and at its end.
#include <algorithm>

#include "coverage.h"
#include "simulated_sync.h"
#include "world.h"

namespace kvlink::simulation {
namespace {

// csrc/engine/progress_thread.cc has the first; then time to be given a CPU.
constexpr int64_t kTickNs = 1'000'000;
constexpr int64_t kSlackNs = 1'500'000;
constexpr int64_t kCrowdedNs = 1'500'000;
// A streaming pull may look for what is ready as rarely as once a tick.
constexpr int64_t kForgottenNs = 2 * kTickNs + kSlackNs;
constexpr int64_t kQuietNs = 1'002'000'000;  // lanes with work are checked once a second
// The longest that three posts of a slow endpoint take, and a tick for each.
constexpr int64_t kWithdrawnNs = 40'000'000;
// A streaming pull looks eight times for each block, and then once a tick.
constexpr uint64_t kLooksForReady = 64;
// The most of 10,000 seeds, and half as much again.
constexpr uint64_t kStepsOfEvent = 800, kStepsOfTick = 50, kAllocationsOfEvent = 20, kAllocationsOfLane = 15;
// csrc/staging/staged_endpoint.cc looks every 320 us for a slot that another lane holds.
constexpr uint64_t kLooksForSlot = 4;

bool has_ended_well(const Transfer& transfer) {
  return transfer.state() == TransferState::kValid || transfer.state() == TransferState::kSettled;
}

}  // namespace

/// The end of a call as somebody sees it, for the first time or again.
void World::see(Call& call) {
  const PullState end = call.pull->state();
  if (end < PullState::kFailed) fail("a pull goes on after its end");
  if (std::exchange(call.seen, true)) {
    if (end != call.end) fail("a pull ends twice");
    return;
  }
  call.end = end;
  end == PullState::kFailed ? see_failed(call) : see_valid(call);
  call.checked = true;
  if (call.is_relay && peers_.front()->owner->has_ended(call.lease)) free_blocks(call);
}

void World::see_valid(const Call& call) {
  ++num_valid_;
  if (!call.pull->failure().ok()) fail("a pull that is valid says why it failed");
  for (size_t part = 0; part < call.pull->num_parts(); ++part) {
    const auto transfer = call.pull->transfer(part);
    if (!transfer || !has_ended_well(*transfer)) fail("a pull is valid, and a part of it is not");
    const Source& source = call.sources[call.is_relay ? call.source : part];
    for (size_t index = 0; index < source.reader_blocks.size(); ++index) {
      const std::byte* const mine = &reader_pool()[size_t{source.reader_blocks[index]} * kBlockBytes];
      if (!has_content(mine, source.contents[index])) fail("a valid pull has wrong bytes");
    }
  }
}

void World::see_failed(const Call& call) {
  const LeaseTable& leases = peers_.front()->owner->leases();
  for (const LeaseSeat& seat : call.seats) {
    if (leases.holds(seat.slot, seat.nonce)) fail("a relay has failed, and is offered on");
  }
  bool says_why = !call.pull->failure().ok();
  for (size_t part = 0; part < call.pull->num_parts(); ++part) {
    const auto transfer = call.pull->transfer(part);
    says_why |= !transfer || (transfer->done() && !transfer->status().ok());
  }
  if (!says_why) fail("a pull has failed for no reason");
}

/// These units are about to be offered on.
void World::see_proven(const Call& call, uint64_t units) {
  if (call.pull->done()) fail("a relay that has ended is offered on");
  const Source& source = call.sources[call.source];
  for (size_t index = 0; index < units; ++index) {
    const std::byte* const mine = &reader_pool()[size_t{source.reader_blocks[index]} * kBlockBytes];
    if (!has_content(mine, source.contents[index])) fail("what is offered on is wrong");
  }
}

/// The relay and its offer have both ended: its blocks are used for something else.
void World::free_blocks(Call& call) {
  if (std::exchange(call.freed, true)) return;
  for (const uint32_t block : call.reader_blocks) {
    write_block(&reader_pool()[size_t{block} * kBlockBytes], kUnwritten);
  }
}

void World::on_landing(const std::byte* at) {
  const std::byte* const pool = reader_pool().data();
  if (at < pool || at >= pool + reader_pool().size()) return;  // a slot's words
  const auto block = static_cast<uint32_t>(static_cast<size_t>(at - pool) / kBlockBytes);
  const Call* const call = call_of_block_[block];
  if (!call || !call->pull) return;
  if (call->pull->done()) fail("a byte lands after the pull ended");
  if (call->is_relay && block - call->reader_blocks.front() < call->pull->proven_tokens()) {
    fail("a relay writes what it has offered on");
  }
}

/// Whether a pull ends although nobody waits for it.
bool World::can_end_alone() const { return ticks_ && answers_ != Answers::kDies; }

void World::check_by(int64_t ns, const Call& call, const char* what) {
  int64_t recall = 0;
  for (const Source& source : call.sources) recall = std::max(recall, recall_ns(source.peer->manner));
  const int64_t late = answers_ == Answers::kLate ? kLateNs : 0;
  const auto holds = [this, &call] {
    return !call.pull || call.pull->done() || !(call.waited_for_ns < now() - kSlackNs || can_end_alone());
  };
  expect_by(ns + kTickNs + kSlackNs + recall + late, holds, [&call, what] {
    fail(std::string(what) + ", state " + std::to_string(static_cast<int>(call.pull->state())) +
         ", attempt " + std::to_string(call.num_attempts) + (call.is_relay ? " of a relay" : ""));
  });
}

/// Looks twice: with ten threads at once, one may wait for its turn for longer than kSlackNs.
void World::expect_by(int64_t ns, std::function<bool()> holds, std::function<void()> otherwise) {
  scheduler_.at(ns, [=, this] {
    if (holds()) return;
    scheduler_.at(ns + kCrowdedNs, [=] {
      if (!holds()) otherwise();
    });
  });
}

void World::check_transfer(Link& link, const std::shared_ptr<Transfer>& transfer) {
  const int64_t recall = recall_ns(link.plans.front().manner);
  const int64_t deadline = std::max(transfer->deadline_ns(), now());
  expect_by(
      deadline + kTickNs + kSlackNs + recall, [transfer] { return transfer->done(); },
      [] { fail("a transfer does not end by its deadline"); });
  // The owner would cut off the others of this connection at the end of the lease.
  scheduler_.at(deadline + recall + kWithdrawnNs, [transfer, &link] {
    if (link.closed || !link.healthy() || transfer->state() == TransferState::kSettled) return;
    if (link.owner->has_reader(transfer->seat().nonce, link.id))
      fail("a pull that did not settle stays announced");
  });
  check_under_way(link);
}

/// Nothing is under way: if transfers are left, somebody must go on with them.
void World::check_under_way(Link& link) {
  const uint64_t number = ++link.num_quiet;
  scheduler_.at(now() + kForgottenNs, [this, &link, number] {
    if (link.closed || link.num_quiet != number || link.num_posts() > 0) return;
    for (const auto& transfer : link.transfers) {
      if (transfer->started_ns() < now() - kForgottenNs && !transfer->done()) {
        fail("a pull has nothing under way for 3.5 ms");
      }
    }
  });
}

/// All calls have ended, and all threads are still there.
void World::check_end() {
  check_effort();
  scheduler_.sleep(kQuietNs);
  for (const auto& call : calls_) {
    see(*call);
    check_told(*call);
    if (can_end_alone() && call->pull->is_open()) fail("a pull that has ended asks for something in vain");
  }
  for (const auto& [link, seat] : released_) {
    if (link->healthy() && !link->closed && link->owner->num_settled(seat) != 1) {
      fail("a seat that was released is not settled");
    }
    const bool posted = link->owner->was_posted(seat.settle_nonce), lost = lost_.contains(seat.settle_nonce);
    if (posted && lost) fail("a settle that was posted is returned");
    if (!posted && !lost && can_end_alone() && !link->staged)
      fail("a queued settle is neither posted nor returned");
  }
  for (const auto& peer : peers_) {
    for (const auto& link : peer->links) {
      if (link->connection->pending() != 0) fail("ended pulls stay in a lane's queue");
      check_work(*link);
      check_rails(*link);
      if (!link->healthy() || link->closed) continue;
      if (link->connection->broken()) fail("a connection breaks for no reason");
      if (link->num_posts() != 0) fail("posts are under way though nobody waits for them");
    }
  }
}

/// The engine's threads sleep while there is nothing to do, and a round without work allocates nothing.
void World::check_effort() {
  uint64_t events = 1, lanes = 0;  // what it was asked for and did
  for (const auto& peer : peers_) {
    for (const auto& link : peer->links) {
      events += link->transfers.size();
      lanes += link->work.size();
      for (const auto& work : link->work) events += work->reads + work->stores + work->num_looks;
    }
  }
  const Work& work = scheduler_.work();
  const auto ms = static_cast<uint64_t>(scheduler_.since_start_ns() / kTickNs);
  Coverage::the().note_effort(events, work.steps, work.allocations);
  const uint64_t ticks = ms * (staging_ ? kLooksForSlot : 1);
  if (work.steps > kStepsOfEvent * events + kStepsOfTick * lanes * ticks) {
    fail("a thread is busy with nothing");
  }
  if (work.allocations > kAllocationsOfEvent * events + kAllocationsOfLane * lanes)
    fail("memory is allocated in vain");
}

/// Nothing is asked for more often than it has to: each range once, and again if its lane returned it; each
/// word once by each lane.
void World::check_work(const Link& link) {
  uint64_t posted = 0, stores = 0, most = 0;
  for (const auto& work : link.work) {
    posted += work->reads;
    stores += work->stores;
  }
  bool staged = false;  // its ranges are cut otherwise
  for (const auto& transfer : link.transfers) {
    if (!transfer->done()) return;
    const TransferStats stats = transfer->stats();
    most += stats.num_ops + stats.redone;
    staged |= stats.staged;
    check_looks(link, *transfer);
  }
  const uint64_t most_stores = link.transfers.size() * (2 * link.work.size() + 1) + link.num_settles;
  if (stores > most_stores) fail("words are stored more often than needed");
  if (staged) return;
  Coverage::the().note_work(link.transfers.size(), posted, most);
  if (posted > most) fail("ranges are read twice");
}

/// A rail that is set aside reads no block, and one pull tries it with one post. A run is far shorter than
/// RailRates::kFirstPauseNs.
void World::check_rails(const Link& link) {
  if (link.rails < Rails::kOneAside || link.connection->paths().size() < 2) return;
  const RailRates& rates = link.path_stats->rails();
  const bool to_be_tried = link.rails == Rails::kOneToBeTried;
  if (!rates.is_aside(link.plans.front().path)) {
    if (!to_be_tried) fail("a rail that was set aside is used again, untried");
    return;
  }
  // Pulls end on the rails that are left once one breaks, and a rail may be good for a while.
  if (to_be_tried && (link.connection->broken() || rates.num_set_aside() > 1)) return;
  if (link.work.front()->reads > to_be_tried) fail("a rail that is set aside reads blocks");
}

/// One answered read of the slot ends a pull, and one more each time a lane returned what it had to validate,
/// unless an endpoint broke its promise of order. A second attempt looks first. A streaming pull looks again
/// for what is ready, less and less often while there is nothing.
void World::check_looks(const Link& link, Transfer& transfer) {
  const std::byte* const words = transfer.slot_chunk(kLeaseRegion).segments->local;
  uint64_t looks = 0;
  for (const auto& work : link.work) {
    if (const auto found = work->looks.find(words); found != work->looks.end()) looks += found->second;
  }
  const bool promised = std::none_of(link.plans.begin(), link.plans.end(),
                                     [](const EndpointPlan& plan) { return plan.breaks_order; });
  if (link.streaming.contains(&transfer)) {
    const int64_t took = transfer.stats().total_ns;  // 0 of one that was cancelled
    const uint64_t most = kLooksForReady + static_cast<uint64_t>(took / kTickNs);
    if (took > 0 && looks > most) fail("a slot is checked too often");
  } else if (promised && looks > 1 + transfer.stats().redone + link.looking_first.contains(&transfer)) {
    fail("a slot is checked again in vain");
  }
}

/// Every seat whose part is valid was settled: by its transfer, or by its owner's agent.
void World::check_told(const Call& call) {
  for (size_t part = 0; part < call.pull->num_parts(); ++part) {
    const auto transfer = call.pull->transfer(part);
    const Source& source = call.sources[call.is_relay ? call.source : part];
    if (!transfer || !source.settles() || !has_ended_well(*transfer)) continue;
    const bool by_transfer = transfer->state() == TransferState::kSettled;
    if (by_transfer && source.settle_asked) fail("a seat is settled by its transfer and by its agent");
    if (!by_transfer && !source.settle_asked && can_end_alone()) fail("an owner is left untold");
    const bool arrives = by_transfer ? source.link->healthy() && !source.link->closed : source.settle_asked;
    if (arrives && source.peer->owner->num_settled(source.seat) != 1)
      fail("a settle did not reach the owner");
  }
  const size_t first_unused = call.source + 1;
  if (!call.is_relay || call.end == PullState::kFailed || !can_end_alone()) return;
  for (size_t index = first_unused; index < call.sources.size(); ++index) {
    if (!call.sources[index].settle_asked) fail("a source that was not needed is not released");
  }
}

}  // namespace kvlink::simulation

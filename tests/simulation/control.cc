// SPDX-License-Identifier: Apache-2.0
// The control thread of a run, as kvlink/transfer/pulls.py has it, except that it answers late, twice or
// never, repeats old answers, and dies.
#include <algorithm>

#include "base/clock.h"
#include "coverage.h"
#include "simulated_sync.h"
#include "world.h"

namespace kvlink::simulation {
namespace {

constexpr int64_t kMillisecond = 1'000'000;

}  // namespace

void World::control() {
  const int64_t dies_at =
      answers_ == Answers::kDies ? now() + random().between(0, 5 * kMillisecond) : INT64_MAX;
  while (!control_stopped_ && now() < dies_at) {
    if (answers_ == Answers::kLate) scheduler_.sleep(random().between(0, kLateNs));
    for (const uint64_t token : control_->drain()) take(token);
    int64_t next = INT64_MAX;
    for (size_t index = 0; index < calls_.size() && ticks_; ++index) {
      const Call& call = *calls_[index];
      if (!call.pull || call.pull->done()) continue;
      const int64_t due = call.deadline_ns + kAnswerNs;
      if (now() >= due) {
        Coverage::the().note(Kind::kTick, static_cast<size_t>(call.pull->state()));
        call.pull->tick(now_ns());
      }
      if (now() < due) next = std::min(next, due);
    }
    pollfd watched{control_->fd(), POLLIN, 0};
    wait_ready({&watched, 1},
               std::min(next, dies_at) == INT64_MAX ? INT64_MAX : std::min(next, dies_at) - now());
  }
}

void World::take(uint64_t token) {
  for (size_t index = 0; index < calls_.size(); ++index) {
    Call& call = *calls_[index];
    if (!call.pull || call.pull->token() != token) continue;
    for (const PullAction& action : call.pull->take_actions()) act(call, action);
    return;
  }
  for (size_t index = 0; index < peers_.size(); ++index) {
    for (const auto& link : peers_[index]->links) {
      if (!link->connection || link->connection->token() != token) continue;
      for (const LaneWord& word : link->connection->take_lost()) {
        if (!lost_.insert(word.value).second) fail("a settle is returned twice");
        note(Event::kReturnedSettle);
        peers_[index]->owner->settle({word.slot, 0, word.value});
      }
      return;
    }
  }
}

void World::act(Call& call, const PullAction& action) {
  if (scheduler_.traces()) {
    scheduler_.trace("is asked: kind " + std::to_string(static_cast<int>(action.kind)) + ", number " +
                     std::to_string(action.number));
  }
  switch (action.kind) {
    case PullAction::Kind::kConnect: {
      const size_t most = call.is_relay ? call.sources.size() : 2;
      if (action.number != call.num_attempts++ || action.number >= most) fail("a wrong attempt is asked for");
      if (action.until_ns > std::max(call.deadline_ns, now())) fail("an attempt lasts longer than its pull");
      helpers_.push_back(scheduler_.spawn(
          "answer", [this, &call, action] { answer(call, action.number, action.until_ns); }));
      return;
    }
    case PullAction::Kind::kSettle:
      return settle_by_agent(call, action.number);
    case PullAction::Kind::kGiveUp:
      if (!call.pull->done()) fail("an attempt is given up by a pull that goes on");
      return;
    case PullAction::Kind::kUnused:
      for (size_t index = action.number; index < call.sources.size(); ++index) {
        Source& source = call.sources[index];
        if (source.link) fail("a source that was read from counts as unused");
        if (std::exchange(source.settle_asked, true)) fail("a source is released twice");
        if (source.settles()) source.peer->owner->settle(source.seat);
      }
  }
}

/// A thread of its own: attempts of several pulls do not wait for each other.
void World::answer(Call& call, uint32_t attempt, int64_t until_ns) {
  Pull& pull = *call.pull;
  const bool is_late = answers_ == Answers::kLate && chance(30);
  const int64_t most = is_late ? std::max<int64_t>(2 * (until_ns - now()), kMillisecond) : kMillisecond / 3;
  scheduler_.sleep(random().between(0, most));
  if (answers_ == Answers::kSometimes && chance(30)) return;
  std::vector<uint32_t> parts = pull.wanted();
  if (call.is_relay) {
    parts = {attempt};
  } else if (parts.empty()) {
    for (uint32_t part = 0; part < call.sources.size(); ++part) parts.push_back(part);
  }
  std::vector<StartReads> reads;
  for (const uint32_t part : parts) {
    Source& source = call.sources[part];
    Link* const link = connect(*source.peer, until_ns);
    if (!link) Coverage::the().note(Kind::kRefused, static_cast<size_t>(pull.state()));
    if (!link)
      return pull.refused(attempt, Status::Unreachable("the owner is gone"), call.is_relay || chance(5));
    reads.push_back(start_of(call, source, *link, attempt));
  }
  Coverage::the().note(Kind::kConnected, static_cast<size_t>(pull.state()));
  const bool had_ended = pull.done();
  if (pull.connected(attempt, reads) && had_ended) fail("a pull that has ended starts");
  const bool twice = chance(10);
  if (twice) Coverage::the().note(Kind::kConnected, static_cast<size_t>(pull.state()));
  if (twice && pull.connected(attempt, reads)) fail("an answer counts twice");
  if (attempt > 0 && chance(20) && pull.connected(attempt - 1, reads)) fail("an old answer counts");
  if (!chance(5)) return;
  Coverage::the().note(Kind::kRefused, static_cast<size_t>(pull.state()));
  pull.refused(attempt, Status::Config("too late"), false);
}

StartReads World::start_of(Call& call, Source& source, Link& link, uint32_t attempt) {
  return [this, &call, &source, &link, attempt](int64_t deadline_ns) -> std::shared_ptr<Transfer> {
    if (call.pull && call.pull->done()) fail("a part starts after its pull has ended");
    source.link = &link;
    if (call.pull) disturb_start(call);
    if (chance(4)) {  // as if it broke just now
      if (call.pull) Coverage::the().note(Kind::kPartCut, static_cast<size_t>(call.pull->state()));
      return nullptr;
    }
    if (call.is_relay) call.source = static_cast<size_t>(&source - call.sources.data());
    PullRequest request = request_of(call, source, link, deadline_ns);
    request.looks_first = attempt > 0;
    scheduler_.trace("pulls " + std::to_string(source.owner_blocks.size()) + " blocks");
    const std::shared_ptr<Transfer> transfer = [&] {
      const Scheduler::InEngine engine;
      return link.connection->pull(request);
    }();
    if (!transfer) return nullptr;
    link.transfers.push_back(transfer);
    if (request.stream != StreamUnit::kNone) {
      link.streaming.insert(transfer.get());
    } else if (request.looks_first) {
      link.looking_first.insert(transfer.get());
    }
    check_transfer(link, transfer);
    return transfer;
  };
}

/// Does what other threads may do just then: it stops the pull, or begins to wait for it.
void World::disturb_start(Call& call) {
  if (chance(3)) request_cancel(call);
  if (chance(3)) close_pull(call);
  if (chance(3)) helpers_.push_back(scheduler_.spawn("canceller", [this, &call] { cancel(call); }));
  if (!chance(6)) return;
  note_waiting(call);
  helpers_.push_back(scheduler_.spawn("waiter", [this, &call] {
    call.pull->wait(-1);
    see(call);
  }));
  scheduler_.sleep(random().between(0, 20'000));  // a start takes some time
}

PullRequest World::request_of(Call& call, Source& source, Link& link, int64_t deadline_ns) {
  PullRequest request;
  request.planner = link.planner;
  request.owner_blocks = source.owner_blocks;
  request.reader_blocks = source.reader_blocks;
  request.tokens = {0, static_cast<uint32_t>(source.owner_blocks.size())};
  request.stream = source.streams || call.is_relay ? StreamUnit::kBlocks : StreamUnit::kNone;
  request.seat = source.seat;
  request.deadline_ns = deadline_ns;
  if (call.is_relay) {
    request.tokens.begin = static_cast<uint32_t>(call.pull->proven_tokens());
    request.batch_units = random().one_of<uint64_t>({0, 1, 2});
    request.on_proven = [this, &call](uint64_t units) { prove(call, units); };
  } else if (!source.streams && chance(10)) {
    request.prepared = *link.connection->prepare(request);
    note(Event::kPrepared);
  }
  return request;
}

/// As kvlink/_core does for a relay.
void World::prove(Call& call, uint64_t units) {
  const Scheduler::InEngine not_here(false);
  see_proven(call, units);
  Coverage::the().note(Kind::kProves, static_cast<size_t>(call.pull->state()));
  peers_.front()->owner->leases().set_ready(call.lease, units);
  call.pull->prove(units);
}

void World::settle_by_agent(Call& call, size_t part) {
  Source& source = call.sources[call.is_relay ? call.source : part];
  if (std::exchange(source.settle_asked, true)) fail("a seat is settled twice by its agent");
  const auto transfer = call.pull->transfer(part);
  if (!transfer || transfer->state() != TransferState::kValid)
    fail("what is not valid is settled by its agent");
  source.peer->owner->settle(source.seat);
}

}  // namespace kvlink::simulation

// SPDX-License-Identifier: Apache-2.0
// What the callers of a run do: pulls and relays that they start and wait for in every way, and calls that
// get in the way of others.
#include <algorithm>

#include "base/clock.h"
#include "coverage.h"
#include "simulated_sync.h"
#include "world.h"

namespace kvlink::simulation {
namespace {

constexpr uint64_t kPullBlocks = 6;
constexpr int64_t kMillisecond = 1'000'000, kLongNs = 10'000 * kMillisecond;

}  // namespace

void World::call() {
  for (int64_t left = random().between(2, 6); left > 0 && !closed_; --left) {
    if (chance(30)) {
      meddle();
    } else if (chance(2)) {
      start_tree();
    } else if (Call* const call = chance(25) ? start_relay(false) : start_call()) {
      wait_for(*call);
    }
    if (chance(50))
      scheduler_.sleep(random().between(0, random().one_of<int64_t>({5'000, 200'000, 2'000'000})));
    if (chance(3))
      scheduler_.sleep(random().between(100, 200) * kMillisecond);  // longer than an owner may be silent
  }
}

/// Takes blocks of the reader, one after the other.
std::vector<uint32_t> World::take_reader_blocks(Call& call, size_t num) {
  std::vector<uint32_t> blocks(num);
  for (uint32_t& block : blocks) {
    block = num_blocks_++;
    call.reader_blocks.push_back(block);
    call_of_block_[block] = &call;
  }
  return blocks;
}

Call& World::add_call() {
  Call& call = *calls_.emplace_back(std::make_unique<Call>());
  call.started_ns = now();
  const int64_t timeout =
      random().one_of<int64_t>({kMillisecond / 10, kMillisecond, 5 * kMillisecond, 50 * kMillisecond,
                                150 * kMillisecond, 600 * kMillisecond});
  call.deadline_ns = now() + random().between(timeout / 2, timeout);
  return call;
}

/// Null: there is nothing to read, or no room for it.
Call* World::start_call() {
  const auto num_parts = static_cast<size_t>(chance(25) ? random().between(2, 3) : 1);
  if (num_blocks_ + num_parts * kPullBlocks > kReaderBlocks) return nullptr;
  std::vector<Source> sources;
  for (size_t left = num_parts; left > 0; --left) {
    Source& source = sources.emplace_back();
    if (!offered_.empty() && chance(30)) {  // another reader of an offer
      source = std::move(offered_.back());
      offered_.pop_back();
      note(source.seat.is_shared() ? Event::kSharedSoftOffer : Event::kSharedOffer);
      continue;
    }
    std::vector<Content> contents(static_cast<size_t>(random().between(1, kPullBlocks)));
    for (Content& content : contents) content = next_content_++;
    if (!draw_source(source, contents, chance(25) ? find_relay() : nullptr)) return nullptr;
  }
  Call& call = add_call();
  if (num_parts == 3) note(Event::kThreeParts);
  call.sources = std::move(sources);
  for (Source& source : call.sources) {
    source.reader_blocks = take_reader_blocks(call, source.owner_blocks.size());
  }
  if (num_parts > 1 || chance(40) || !start_at_once(call)) start_waiting(call, {});
  return &call;
}

/// Relays that mostly read from each other.
void World::start_tree() {
  std::vector<Call*> relays;
  for (int left = 8; left > 0; --left) {
    if (Call* const relay = start_relay(true)) relays.push_back(relay);
  }
  for (Call* const relay : relays) wait_for(*relay);
}

/// A relay from the first of several sources that have the same.
Call* World::start_relay(bool of_tree) {
  if (num_blocks_ + kPullBlocks > kReaderBlocks) return nullptr;
  std::vector<Source> sources;
  Call* const parent = chance(of_tree ? 90 : 50) ? find_relay() : nullptr;
  std::vector<Content> contents(static_cast<size_t>(random().between(1, kPullBlocks)));
  for (Content& content : contents) content = next_content_++;
  if (parent) {
    contents = parent->sources.front().contents;
    note(Event::kRelayOfRelay);
  }
  for (int64_t left = random().between(1, 3); left > 0; --left) {
    Source source;
    if (!draw_source(source, contents, sources.empty() ? parent : nullptr)) break;
    sources.push_back(std::move(source));
  }
  if (sources.empty()) return nullptr;
  Peer& self = *peers_.front();
  const uint64_t lease = next_lease_++;
  const int64_t ttl = random().one_of<int64_t>({kLongNs, kLongNs, kLongNs, 3 * kMillisecond});
  Call& call = add_call();
  call.is_relay = true;
  call.sources = std::move(sources);
  call.lease = lease;
  take_reader_blocks(call, contents.size());
  for (Source& source : call.sources) source.reader_blocks = call.reader_blocks;
  call.seats = self.owner->grant(lease, static_cast<uint32_t>(random().between(1, 3)), 0, ttl, [&call, this] {
    if (call.checked) free_blocks(call);
  });
  LeaseTable* const leases = &self.owner->leases();
  start_waiting(call, {static_cast<uint32_t>(call.sources.size()), [=] { leases->abort(lease); }});
  return &call;
}

/// One that still has a seat to read from. Null: there is none.
Call* World::find_relay() {
  std::vector<Call*> found;
  for (const auto& call : calls_) {
    if (call->is_relay && call->num_seats_given < call->seats.size() && !call->freed) found.push_back(&*call);
  }
  return found.empty() ? nullptr : found[static_cast<size_t>(random().between(0, int64_t(found.size()) - 1))];
}

/// An offer of these contents, by a relay if there is one, or by an owner of their own. False: none has room.
bool World::draw_source(Source& source, const std::vector<Content>& contents, Call* relay) {
  if (relay) {
    source.peer = peers_.front().get();
    source.seat = relay->seats[relay->num_seats_given++];
    source.lease = relay->lease;
    source.owner_blocks = relay->reader_blocks;
    source.contents = relay->sources.front().contents;
    source.streams = source.lease_may_end = true;
    return true;
  }
  source.peer = peers_[static_cast<size_t>(random().between(1, int64_t(peers_.size()) - 1))].get();
  source.contents = contents;
  if (source.peer->owner->num_blocks_left() < contents.size()) return false;
  return draw_lease(source);
}

bool World::draw_soft_lease(Source& source, uint64_t ready, int64_t soon,
                            const std::function<void()>& release) {
  Owner& owner = *source.peer->owner;
  const auto seat = owner.leases().grant_soft(source.owner_blocks, ready, kNoExpiryNs, now_ns());
  if (!seat.ok()) return false;
  source.seat = *seat;
  source.lease_may_end = chance(50);
  for (int64_t more = random().between(0, 2); more > 0; --more) offered_.push_back(source);
  if (!source.lease_may_end) return true;
  owner.later(soon, [&owner, blocks = source.owner_blocks, release] {
    note(Event::kSoftRevoked);
    owner.leases().revoke(blocks);
    release();
  });
  return true;
}

bool World::draw_lease(Source& source) {
  Peer& peer = *source.peer;
  Owner& owner = *peer.owner;
  std::vector<uint32_t> blocks = owner.take_blocks(source.contents.size());
  if (chance(50)) std::ranges::reverse(blocks);  // a range each, rather than one for all
  source.owner_blocks = blocks;
  const uint64_t lease = source.lease = next_lease_++;
  const bool is_late =
      !peer.steady && chance(12);  // a scheduler has written the ticket, and tells its worker later
  source.streams = chance(is_late ? 80 : 25);
  if (!source.streams) {
    for (size_t at = 0; at < blocks.size(); ++at) write_block(owner.block(blocks[at]), source.contents[at]);
  }
  const uint64_t ready = source.streams ? 0 : UINT64_MAX;
  const auto release = [&owner, blocks] {
    for (const uint32_t block : blocks) write_block(owner.block(block), kUnwritten);
  };
  const int64_t soon = now() + random().between(0, kMillisecond);
  if (!peer.steady && !is_late && !source.streams && chance(8))
    return draw_soft_lease(source, ready, soon, release);
  const int64_t ttl = peer.steady ? kLongNs
                                  : random().one_of<int64_t>({kLongNs, kLongNs, kLongNs, kLongNs,
                                                              20 * kMillisecond, 2 * kMillisecond});
  source.lease_may_end = ttl != kLongNs;
  if (is_late) {
    source.lease_may_end = true;
    source.seat = {owner.used_slot(), random().next() | 1ull << 63, random().next() | 1ull << 63};
    owner.when_read(source.seat.slot, [this, &owner, source, ready, ttl, release] {
      owner.grant_at(source.lease, source.seat, ready, ttl, release);
      if (source.streams) grow(source, 0);
    });
  } else {
    const auto seats = owner.grant(lease, chance(20) ? 2 : 1, ready, ttl, release);
    if (seats.empty()) return false;
    source.seat = seats.front();
    const bool shares = chance(50);
    for (size_t other = 1; other < seats.size(); ++other) {
      if (!shares) spare_.push_back({&peer, seats[other]});
      if (!shares) continue;
      offered_.push_back(source);
      offered_.back().seat = seats[other];
    }
    if (chance(20)) source.seat.settle_nonce = 0;
    if (source.streams) grow(source, 0);
  }
  if (!offered_.empty() && offered_.back().lease == lease)
    offered_.back().lease_may_end = source.lease_may_end = true;
  if (chance(20)) owner.later(soon, [&owner, lease, ttl] { owner.extend(lease, ttl); });
  if (!peer.steady && chance(12)) {
    source.lease_may_end = true;
    owner.later(soon, [&owner, lease] { owner.leases().abort(lease); });
  }
  return true;
}

/// The owner writes one block after the other, or stops.
void World::grow(const Source& source, uint64_t ready) {
  if (ready == source.owner_blocks.size() || chance(3)) return;
  source.peer->owner->later(now() + random().between(0, kMillisecond), [this, source, ready] {
    Owner& owner = *source.peer->owner;
    if (owner.has_ended(source.lease)) return;  // the blocks are not its any more
    write_block(owner.block(source.owner_blocks[ready]), source.contents[ready]);
    owner.leases().set_ready(source.lease, ready + 1);
    grow(source, ready + 1);
  });
}

/// As a caller does who has a connection. False: it is broken.
bool World::start_at_once(Call& call) {
  Source& source = call.sources.front();
  Link* const link = source.peer->link();
  if (!link || !link->usable()) return false;
  const std::shared_ptr<Transfer> transfer = start_of(call, source, *link, 0)(call.deadline_ns);
  if (!transfer) return false;
  call.pull = Pull::started(transfer, control_);
  call.num_attempts = 1;
  check_by(call.deadline_ns + kAnswerNs, call, "a pull does not end by its deadline");
  if (call.pull->is_open()) call.pull->begin();
  return true;
}

void World::start_waiting(Call& call, RelayContext relaying) {
  call.pull = Pull::waiting(call.deadline_ns, control_, std::move(relaying));
  check_by(call.deadline_ns + kAnswerNs, call, "a pull does not end by its deadline");
  if (chance(3)) request_cancel(call);
  call.pull->begin();
  if (closed_) close_pull(call);
}

void World::wait_for(Call& call) {
  if (chance(15)) {
    if (chance(80))
      scheduler_.sleep(random().between(0, random().one_of({kMillisecond / 5, 2 * kMillisecond})));
    chance(60) ? cancel(call) : request_cancel(call);
  }
  Pull& pull = *call.pull;
  const int64_t way = random().between(0, 4);
  const auto wait_ns = [&pull](int64_t ns) {
    const Scheduler::InEngine engine;
    return pull.wait(ns);
  };
  if (way < 4) Coverage::the().note(way < 3 ? Kind::kWait : Kind::kAwait, static_cast<size_t>(pull.state()));
  if (way < 3) note_waiting(call);
  switch (way) {
    case 0:
      wait_ns(-1);
      break;
    case 1:
      while (!wait_ns(random().between(kMillisecond, 20 * kMillisecond))) {
      }
      break;
    case 2:
      while (!wait_ns(0)) scheduler_.sleep(random().between(1, kMillisecond));
      break;
    case 3:
      return await(call);
    default:
      return;  // nobody waits
  }
  if (!pull.done()) fail("a wait returns before the end");
  see(call);
}

/// As an event loop does, which works along with nobody.
void World::await(Call& call) {
  if (!can_end_alone()) return;
  const auto queue = *CompletionQueue::make();
  if (!call.pull->notify(queue, 7)) return see(call);
  const auto wait = [&](int64_t ns) {
    pollfd watched{queue->fd(), POLLIN, 0};
    wait_ready({&watched, 1}, ns);
    return queue->drain().size();
  };
  size_t told = 0;
  while (told == 0) told = wait(INT64_MAX);
  if (!call.pull->done()) fail("an await is told before the end");
  see(call);
  if (told + wait(kMillisecond) != 1) fail("an await is told twice");
}

void World::cancel(Call& call) {
  check_by(now(), call, "a cancelled pull goes on");
  note_waiting(call);
  Coverage::the().note(Kind::kCancel, static_cast<size_t>(call.pull->state()));
  call.pull->cancel();
  if (!call.pull->done()) fail("cancel() returns before the end");
  see(call);
}

void World::request_cancel(Call& call) {
  check_by(now(), call, "a cancelled pull goes on");
  Coverage::the().note(Kind::kRequestCancel, static_cast<size_t>(call.pull->state()));
  call.pull->request_cancel();
}

/// Calls that hold a lane, ask about one, or end what others wait for.
void World::meddle() {
  Peer& peer = *peers_[static_cast<size_t>(random().between(0, int64_t(peers_.size()) - 1))];
  Link* const link = peer.link();
  switch (random().between(0, 4)) {
    case 0:
    case 1:
      for (int64_t left = random().between(1, 5); left > 0; --left) release();
      break;
    case 2:
      if (link && !link->closed) link->connection->look_after();
      break;
    case 3:
      if (Call* const call = any_call()) chance(20) ? close_pull(*call) : cancel(*call);
      break;
    default:
      if (!link || link->closed) return;
      static_cast<void>(link->connection->why_broken());
      static_cast<void>(link->connection->pending());
  }
}

void World::close_pull(Call& call) {
  Coverage::the().note(Kind::kClose, static_cast<size_t>(call.pull->state()));
  call.pull->close();
}

Call* World::any_call() {
  if (calls_.empty()) return nullptr;
  Call* const call = calls_[static_cast<size_t>(random().between(0, int64_t(calls_.size()) - 1))].get();
  return call->pull ? call : nullptr;
}

/// Settles a seat that nobody reads under, by its connection or else by the owner's agent.
void World::release() {
  if (spare_.empty()) return;
  const auto [peer, seat] = spare_.back();
  spare_.pop_back();
  Link* const link = peer->link();
  if (link) ++link->num_settles;
  if (link && link->usable() && link->connection->settle(seat.slot, seat.settle_nonce)) {
    released_.push_back({link, seat});
  } else if (peer->owner->was_posted(seat.settle_nonce)) {  // the owner takes the first that arrives
    peer->owner->leases().settle(seat.slot, seat.settle_nonce);
  } else {
    peer->owner->settle(seat);
  }
}

}  // namespace kvlink::simulation

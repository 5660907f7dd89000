// SPDX-License-Identifier: Apache-2.0
#include "world.h"

#include <algorithm>

#include "base/check.h"

namespace kvlink::memory_model {
namespace {

constexpr int64_t kUnit = kMostAgeingNs;
constexpr uint64_t kNonceStep = (uint64_t{2} << 32) + 1000;  // tags differ, too
constexpr uint64_t kLateNonce = 200 * kNonceStep;

uint64_t id_of(size_t request) { return request + 1; }

}  // namespace

World::World(const Config& config)
    : config_(config),
      words_per_slot_(2 + config.settles + config.announces),
      table_(std::span(slots_).first(LeaseTable::slots_bytes(config.num_slots)),
             std::span(words_).first(LeaseTable::words_bytes(config.num_slots)), 1,
             [this](std::span<uint64_t> drawn) {
               for (uint64_t& nonce : drawn) nonce = next_nonce_ += kNonceStep;
               return Status();
             }),
      state_(std::make_unique<State>()) {
  for (size_t request = 0; request < config_.requests.size(); ++request) {
    const Request& one = config_.requests[request];
    for (uint8_t reader = 0; reader < one.readers; ++reader)
      readers_of_.emplace_back(request, one.soft ? 0 : reader);
  }
  KVLINK_CHECK(config_.requests.size() <= kMostRequests && readers_of_.size() <= kMostReaders);
  share_memory();
  state_->table = std::make_shared<LeaseTableState>(LeaseTableState::of(table_));
}

/// The locations, and what each thread may load of them.
void World::share_memory() {
  Run& run = Run::the();
  run.forget();
  auto* const slots = reinterpret_cast<LeaseSlot*>(slots_.data());
  auto* const words = reinterpret_cast<PeerWords*>(words_.data());
  uint32_t of_owner = 0, of_readers = 0, of_blocks = 0;
  for (size_t slot = 1; slot <= config_.num_slots; ++slot) {
    run.share(&slots[slot].nonce, nonce_at(slot));
    run.share(&slots[slot].ready, ready_at(slot));
    if (config_.settles) run.share(&words[slot].settled, settled_at(slot));
    if (config_.announces) run.share(&words[slot].reader, reader_at(slot));
    of_owner |= 3u << nonce_at(slot);
    if (config_.settles) of_readers |= 1u << settled_at(slot);
    if (config_.announces) of_readers |= 1u << reader_at(slot);
  }
  for (size_t block = 0; block < kMostBlocks; ++block) of_blocks |= 1u << block_at(block);
  size_t num = block_at(kMostBlocks);
  if (config_.sleeps) {
    run.share(LeaseTableState::num_active_of(table_), num);
    run.share(sleep_.flag(), num + 1);
    num += 2;
  }
  run.own(of_owner);
  run.on_store(
      [this](size_t location, uint64_t before, uint64_t after) { note_store(location, before, after); });
  state_->memory = Memory(num);
  state_->memory.thread(kScheduler).loads = of_owner | of_readers;
  state_->memory.thread(kOwner).loads = of_owner | of_readers;
  if (config_.sleeps) {
    state_->memory.thread(kScheduler).loads |= 2u << (num - 2);
    state_->memory.thread(kOwner).loads |= 1u << (num - 2);
  }
  for (size_t reader = 0; reader < readers_of_.size(); ++reader)
    state_->memory.thread(kFirstReader + reader).loads = of_owner | of_blocks;
}

std::vector<Action> World::actions(const Config& config) {
  std::vector<Action> all;
  const auto add = [&all](Do what, size_t count) {
    for (uint8_t who = 0; who < count; ++who) all.push_back({what, who});
  };
  const size_t requests = config.requests.size();
  size_t readers = 0;
  for (const Request& one : config.requests) readers += one.readers;
  for (const Do what : {Do::kGrant, Do::kWrite, Do::kSetReady}) add(what, requests);
  if (config.extends) add(Do::kExtend, requests);
  if (config.renews) add(Do::kRenew, requests);
  if (config.aborts) add(Do::kAbort, requests);
  add(Do::kRevoke, requests);
  if (config.last_time > 0) add(Do::kTime, 1);
  if (config.stands_still) add(Do::kStandStill, 1);
  add(Do::kSweep, 1);
  add(Do::kTake, requests);
  if (config.sleeps) add(Do::kSleep, 1);
  add(Do::kReader, readers);
  add(Do::kContinue, kMostThreads);
  return all;
}

void World::put(const State& state) {
  *state_ = state;
  violated_.clear();
}

void World::reset_table() {
  Run::the().silently(state_->memory, [this] { state_->table->put_into(table_); });
  next_nonce_ = state_->next_nonce;
}

uint64_t World::content_of(size_t request) const {
  const int relays = config_.requests[request].relays;
  return relays < 0 ? request + 1 : content_of(readers_of_[static_cast<size_t>(relays)].first);
}

/// Belongs to a reader.
uint64_t World::load(size_t thread, size_t location, std::memory_order order) {
  const size_t candidates = state_->memory.num_candidates(thread, location, order);
  num_choices_ = std::max(num_choices_, candidates);
  return state_->memory.load(thread, location, order, candidates > 1 ? choice_ : 0);
}

/// Properties (b) and (g), at each store of the owner.
void World::note_store(size_t location, uint64_t before, uint64_t after) {
  if (location >= config_.num_slots * words_per_slot_) return;
  const size_t slot = 1 + location / words_per_slot_;
  const auto is_of = [slot](const Lease& lease, uint64_t nonce) {
    return lease.granted && std::any_of(lease.seats.begin(), lease.seats.end(), [&](const LeaseSeat& seat) {
             return seat.slot == slot && seat.nonce == nonce;
           });
  };
  const uint64_t stands = state_->memory.latest(nonce_at(slot));
  if (location == ready_at(slot)) {
    if (stands >= kSmallestNonce &&
        !std::any_of(state_->leases.begin(), state_->leases.end(),
                     [&](const Lease& one) { return is_of(one, stands) && !one.aborted; }))
      violate("(b) `ready` is stored under a nonce of another lease");
    return;
  }
  if (location != nonce_at(slot)) return;
  if (after >= kSmallestNonce && before >= kSmallestNonce) violate("(b) a nonce is stored over another");
  if (after < kSmallestNonce && before < kSmallestNonce) violate("(b) a tombstone is stored over another");
  for (const Lease& one : state_->leases) {
    const bool early = after == static_cast<uint64_t>(LeaseEnd::kExpired) && state_->aged < one.deadline;
    if (is_of(one, before) && early) violate("(g) a seat expires before its time");
  }
}

/// The table ages by one unit at most between two looks.
void World::look_at_clock() {
  state_->aged += std::min<int64_t>(state_->now - state_->looked, 1);
  state_->looked = state_->now;
}

/// Starts a call on a thread. Calls that lock the table exclude each other.
bool World::begin(size_t thread, Action action, bool locks) {
  for (size_t other = 0; other < kMostThreads; ++other) {
    const auto& call = state_->calls[other];
    if (call.active && (other == thread || (locks && call.locks))) return false;
  }
  state_->calls[thread] = {true, locks, action, {}};
  return advance(thread);
}

bool World::advance(size_t thread) {
  State::Call& call_now = state_->calls[thread];
  if (!call_now.active) return false;
  reset_table();
  const Action action = call_now.action;
  Run& run = Run::the();
  seats_.clear();
  swept_ = {};
  const bool ended = run.step(state_->memory, thread, call_now.log, choice_, [&] { call(action); });
  num_choices_ = std::max(num_choices_, run.num_choices());
  if (!ended) return true;
  if (call_now.locks) {
    run.silently(state_->memory,
                 [this] { state_->table = std::make_shared<LeaseTableState>(LeaseTableState::of(table_)); });
    state_->next_nonce = next_nonce_;
  }
  call_now = {};
  finish(action);
  return true;
}

void World::call(Action action) {
  const uint8_t who = action.who;
  const int64_t now = state_->now * kUnit, ttl = config_.ttl * kUnit;
  Lease& lease = state_->leases[who];
  switch (action.what) {
    case Do::kGrant: {
      const Request& request = config_.requests[who];
      const uint64_t ready = request.streams ? 0 : 1;
      if (request.soft) {
        const auto seat = table_.grant_soft(std::array<uint32_t, 1>{request.block}, ready,
                                            request.expires ? ttl : kNoExpiryNs, now);
        if ((result_ = seat.ok())) seats_ = {*seat};
      } else if (request.late) {
        seats_ = {lease.seats[0]};
        result_ = table_.grant_at(id_of(who), seats_, ready, ttl, now).ok();
      } else {
        const auto seats = table_.grant(id_of(who), request.seats, ready, ttl, now);
        if ((result_ = seats.ok())) seats_ = *seats;
      }
      if (config_.sleeps && result_ && sleep_.asleep()) state_->woken = true;
      return;
    }
    case Do::kSetReady:
      result_ = table_.set_ready(id_of(who), 1);
      return;
    case Do::kExtend:
      result_ = table_.extend(id_of(who), ttl, now);
      return;
    case Do::kRenew:
      result_ = table_.renew(lease.seats[0].slot, lease.seats[0].settle_nonce, now);
      return;
    case Do::kAbort:
      result_ = table_.abort(id_of(who));
      return;
    case Do::kRevoke:
      table_.revoke(std::array<uint32_t, 1>{config_.requests[who].block});
      return;
    case Do::kSweep:
      table_.sweep(now, swept_);
      return;
    case Do::kSleep:
      if (state_->asleep) return sleep_.awake();
      result_ = sleep_.may_sleep([this] { return table_.num_active() > 0; });
      return;
    default:
      return;
  }
}

void World::finish(Action action) {
  const uint8_t who = action.who;
  Lease& lease = state_->leases[who];
  switch (action.what) {
    case Do::kGrant: {
      if (!result_) return;
      std::copy(seats_.begin(), seats_.end(), lease.seats.begin());
      lease.granted = true;
      lease.deadline = state_->aged + config_.ttl;
      for (size_t reader = 0; reader < readers_of_.size(); ++reader) {  // the ticket
        if (readers_of_[reader].first == who && !config_.requests[who].late)
          state_->memory.hand(kScheduler, kFirstReader + reader);
      }
      return;
    }
    case Do::kExtend:
    case Do::kRenew:
      if (result_) lease.deadline = std::max(lease.deadline, state_->aged + config_.ttl);
      return;
    case Do::kRevoke:
      for (size_t request = 0; request < config_.requests.size(); ++request) {
        const Request& one = config_.requests[request];
        Lease& covered = state_->leases[request];
        if (!one.soft || one.block != config_.requests[who].block || !covered.granted) continue;
        covered.revoked = true;
        const LeaseSeat& seat = covered.seats[0];
        if (state_->memory.latest(nonce_at(seat.slot)) == seat.nonce) violate("(d) a revoked lease stands");
      }
      return;
    case Do::kSweep:
      return report();
    case Do::kSleep:
      state_->woken &= !state_->asleep;
      state_->asleep = !state_->asleep && result_;
      return;
    default:
      return;
  }
}

/// As the engine does, which cuts readers off before it reports what has ended.
void World::report() {
  for (const uint64_t connection : swept_.to_fence) state_->readers[connection - 1].cut = true;
  for (const EndedLease& one : swept_.ended) {
    Lease& lease = state_->leases[one.lease - 1];
    if (++lease.reports > 1) violate("(d) a lease ended twice");
    for (const LeaseSeat& seat : lease.seats) {
      if (seat.slot != 0 && state_->memory.latest(nonce_at(seat.slot)) == seat.nonce)
        violate("(d) a lease is reported, and stands");
    }
  }
  if (!swept_.ended.empty()) state_->memory.unlock(kOwner, 1);
}

/// Returns whether the requests before released the block, or it was revoked from them.
bool World::free_block(const Request& request) const {
  for (size_t other = 0; &config_.requests[other] != &request; ++other) {
    const Request& one = config_.requests[other];
    const Lease& lease = state_->leases[other];
    if (!lease.granted) return false;  // in turn
    if (one.block == request.block && !(one.soft ? lease.revoked : lease.taken)) return false;
  }
  return true;
}

bool World::grant(uint8_t who) {
  const Request& request = config_.requests[who];
  Lease& lease = state_->leases[who];
  if (lease.granted || state_->calls[kScheduler].active || !free_block(request)) return false;
  if (request.late) lease.seats[0] = {1, kLateNonce, kLateNonce + 500};
  look_at_clock();
  return begin(kScheduler, {Do::kGrant, who}, true);
}

/// The content of a block. Whoever computes it may do so after an abort, until the block is back.
bool World::write(uint8_t who) {
  const Request& request = config_.requests[who];
  Lease& lease = state_->leases[who];
  if (lease.written || lease.taken || request.relays >= 0 || state_->calls[kScheduler].active) return false;
  if (request.streams ? !lease.granted : lease.granted || !free_block(request)) return false;
  lease.written = true;
  state_->memory.store(kScheduler, block_at(request.block), who + 1u, std::memory_order_relaxed);
  return true;
}

/// The scheduler learns of the end, and may give the blocks new content.
bool World::take(uint8_t who) {
  Lease& lease = state_->leases[who];
  if (lease.reports == 0 || lease.taken || state_->calls[kScheduler].active) return false;
  lease.taken = true;
  state_->memory.lock(kScheduler, 1);
  if (config_.taker_fences) state_->memory.fence(kScheduler, std::memory_order_release);
  return true;
}

/// One access of a reader, as the transports over shared memory make them, or of the NIC that reads for it.
bool World::step_reader(uint8_t who) {
  const auto [request, seat_index] = readers_of_[who];
  Lease& lease = state_->leases[request];
  Reader& reader = state_->readers[who];
  const Request& of = config_.requests[request];
  const size_t thread = kFirstReader + who;
  Memory& memory = state_->memory;
  const LeaseSeat seat = of.late ? LeaseSeat{1, kLateNonce, kLateNonce + 500} : lease.seats[seat_index];
  if (!lease.granted && !of.late) return false;
  if (state_->calls[thread].active) return false;
  const bool reused = std::any_of(state_->leases.begin(), state_->leases.end(), [&](const Lease& other) {
    return &other > &lease && other.granted && other.seats[0].slot == seat.slot;
  });
  const bool arrives = !config_.stores_arrive || !reused;
  switch (reader.phase) {
    case Phase::kNone:
      reader.phase = of.streams ? Phase::kNonce : config_.announces ? Phase::kAnnounce : Phase::kData;
      return step_reader(who);
    case Phase::kNonce:
      if (!config_.ready_behind_nonce) {
        reader.got = load(thread, ready_at(seat.slot), std::memory_order_relaxed);
        reader.phase = Phase::kReady;
        return true;
      }
      if (load(thread, nonce_at(seat.slot), std::memory_order_acquire) != seat.nonce)
        return end_read(who, false), true;
      reader.phase = Phase::kReady;
      return true;
    case Phase::kReady:
      return read_ready(who, seat);
    case Phase::kAnnounce:
      reader.phase = Phase::kData;
      if (!arrives) return true;
      reader.in_time = memory.latest(nonce_at(seat.slot)) == seat.nonce;
      memory.store(thread, reader_at(seat.slot),
                   Announcement{who + 1u, Announcement::tag_of(seat.nonce)}.word(),
                   std::memory_order_release);
      memory.fence(thread, std::memory_order_seq_cst);  // a NIC's reads do not pass its writes
      return true;
    case Phase::kData:
      return read_data(who);
    case Phase::kValidate:
      if (config_.reader_fences) memory.fence(thread, std::memory_order_acquire);
      end_read(who, load(thread, nonce_at(seat.slot), std::memory_order_acquire) == seat.nonce);
      return true;
    case Phase::kValid:
      if (!config_.settles || !seat.settles()) return false;
      reader.phase = Phase::kDone;
      if (!arrives) return true;
      reader.settled = memory.latest(nonce_at(seat.slot)) == seat.nonce;
      memory.store(thread, settled_at(seat.slot), seat.settle_nonce, std::memory_order_release);
      return true;
    default:
      return false;
  }
}

bool World::read_ready(uint8_t who, const LeaseSeat& seat) {
  Reader& reader = state_->readers[who];
  const bool behind = config_.ready_behind_nonce;
  const uint64_t word =
      load(kFirstReader + who, behind ? ready_at(seat.slot) : nonce_at(seat.slot), std::memory_order_acquire);
  if (!behind && word != seat.nonce) return end_read(who, false), true;
  const bool is_ready = (behind ? word : reader.got) > 0;
  reader.got = 0;
  reader.phase = !is_ready ? Phase::kNonce : config_.announces ? Phase::kAnnounce : Phase::kData;
  return true;
}

bool World::read_data(uint8_t who) {
  Reader& reader = state_->readers[who];
  if (reader.cut) return end_read(who, false), true;
  const auto request = readers_of_[who].first;
  const size_t thread = kFirstReader + who;
  reader.got = load(thread, block_at(config_.requests[request].block), std::memory_order_relaxed);
  if (state_->leases[request].taken && reader.in_time)
    violate("(c) a byte is read after the blocks have gone back");
  for (const Request& other : config_.requests) {  // what a relay offers on
    if (other.relays == who)
      state_->memory.store(thread, block_at(other.block), reader.got, std::memory_order_relaxed);
  }
  reader.phase = Phase::kValidate;
  return true;
}

void World::end_read(uint8_t who, bool valid) {
  Reader& reader = state_->readers[who];
  reader.phase = valid ? Phase::kValid : Phase::kFailed;
  if (valid && reader.got != content_of(readers_of_[who].first))
    violate("(a) foreign or unwritten bytes are valid");
  reader.got = 0;
}

bool World::act(Action action, size_t choice) {
  choice_ = choice;
  num_choices_ = 1;
  const uint8_t who = action.who;
  Lease& lease = state_->leases[who];
  State& state = *state_;
  const bool hard = who < config_.requests.size() && !config_.requests[who].soft;
  switch (action.what) {
    case Do::kGrant:
      return (config_.requests[who].streams || lease.written) && grant(who);
    case Do::kWrite:
      return write(who);
    case Do::kSetReady: {
      const int relays = config_.requests[who].relays;
      if (!config_.requests[who].streams || lease.ready || !lease.granted) return false;
      if (relays < 0) {
        if (!lease.written || !begin(kScheduler, action, true)) return false;
      } else {
        const Phase phase = state.readers[static_cast<size_t>(relays)].phase;
        const bool proven = phase == Phase::kValid || phase == Phase::kDone;
        if (!(proven || (!config_.relay_proves && phase == Phase::kValidate))) return false;
        if (!begin(kFirstReader + static_cast<size_t>(relays), action, true)) return false;
      }
      return lease.ready = true;
    }
    case Do::kExtend:
    case Do::kRenew:
      if (!hard || !lease.granted || lease.renewals > 0 || lease.reports > 0) return false;
      look_at_clock();
      ++lease.renewals;
      return begin(action.what == Do::kExtend ? kScheduler : kOwner, action, true);
    case Do::kAbort:
      if (!hard || !lease.granted || lease.aborted) return false;
      lease.aborted = true;
      return begin(kScheduler, action, true);
    case Do::kRevoke:
      return !hard && lease.granted && !lease.revoked && begin(kScheduler, action, true);
    case Do::kTime:
    case Do::kStandStill:
      if (std::any_of(state.calls.begin(), state.calls.end(), [](const auto& call) { return call.active; }))
        return false;
      if (state.now >= config_.last_time) return false;
      state.now += action.what == Do::kTime ? 1 : 3;
      return true;
    case Do::kSweep:
      if (config_.sleeps && state.asleep) return false;
      look_at_clock();
      return begin(kOwner, action, true);
    case Do::kTake:
      return take(who);
    case Do::kSleep:
      if (state.asleep ? !state.woken : state.sleeps == 2) return false;
      state.sleeps += !state.asleep;
      return begin(kOwner, action, false);
    case Do::kReader:
      return step_reader(who);
    case Do::kContinue:
      return advance(who);
    default:
      return false;
  }
}

std::string World::key() const {
  std::string key;
  State& state = *state_;
  state.memory.tidy();
  state.memory.add_to(key);
  const auto add = [&key](auto... values) { (key.push_back(static_cast<char>(values)), ...); };
  state.table->add_to(key);
  for (const int64_t deadline : state.table->deadlines.all()) add(deadline / kUnit);
  add(state.table->looked_ns / kUnit, state.table->paused_ns / kUnit);
  add(state.now, state.looked, state.aged, state.asleep, state.woken, state.sleeps);
  for (const Lease& one : state.leases) {
    add(one.granted, one.written, one.ready, one.aborted, one.taken, one.revoked, one.reports, one.renewals);
    add(one.deadline, one.seats[0].slot, one.seats[1].slot);
  }
  for (const Reader& one : state.readers) add(one.phase, one.in_time, one.cut, one.settled, one.got);
  for (const State::Call& one : state.calls) {
    add(one.active);
    if (!one.active) continue;
    add(one.action.what, one.action.who);
    for (const uint64_t word : one.log) add(word, word >> 8, word >> 32);
    add(-1);
  }
  return key;
}

std::string World::name_of(Action action) const {
  std::string name = kNames[static_cast<size_t>(action.what)];
  if (action.what == Do::kContinue) return std::string("thread ") + std::to_string(action.who) + " goes on";
  return name + " " + std::to_string(action.who);
}

void World::check_all_end() {
  State& state = *state_;
  if (config_.sleeps && state.asleep && !state.woken && !state.calls[kScheduler].active &&
      state.table->num_active_count() > 0)
    violate("(h) the sweeper sleeps for ever while there is a lease");
  if (std::any_of(state.calls.begin(), state.calls.end(), [](const auto& call) { return call.active; }))
    return;
  const State before = state;
  Run& run = Run::the();
  reset_table();
  std::array<uint32_t, kMostBlocks> blocks{0, 1};
  run.at_once(state.memory, kOwner, [&] {
    table_.sweep(state.now * kUnit, swept_ = {});
    report();
    for (uint8_t who = 0; who < readers_of_.size(); ++who) {
      const auto [request, seat_index] = readers_of_[who];
      const LeaseSeat& seat = state.leases[request].seats[seat_index];
      if (before.readers[who].settled && state.memory.latest(nonce_at(seat.slot)) == seat.nonce)
        violate("(d) a settle is lost");
    }
    for (int64_t later = 1; later < 6; ++later) {
      table_.sweep((state.now + later) * kUnit, swept_ = {});
      report();
    }
    table_.revoke(blocks);
  });
  for (size_t request = 0; request < config_.requests.size(); ++request) {
    if (state.leases[request].granted && !config_.requests[request].soft &&
        state.leases[request].reports != 1)
      violate("(d) a lease did not end");
  }
  run.silently(state.memory, [&] {
    const LeaseTableState end = LeaseTableState::of(table_);
    if (end.free.size() != config_.num_slots || end.soft.size() != 0)
      violate("(d) leases ended, and left a slot behind");
  });
  *state_ = before;
}

}  // namespace kvlink::memory_model

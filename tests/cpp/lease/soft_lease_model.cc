// SPDX-License-Identifier: Apache-2.0
#include "cpp/lease/soft_lease_model.h"

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace kvlink::soft_lease_model {
namespace {

constexpr int64_t kTtl = 1;
constexpr int64_t kLastTime = 1;
constexpr uint64_t kHardId = 7;

}  // namespace

World::Snapshot World::save() const {
  return {LeaseTableState::of(table_),
          save_words(memory_, words_),
          seen_,
          next_nonce_,
          now_,
          num_enforced_,
          num_granted_,
          hard_reported_,
          settled_,
          leases_,
          readers_,
          blocks_};
}

void World::restore(const Snapshot& snapshot) {
  snapshot.table.put_into(table_);
  restore_words(snapshot.words, memory_, words_);
  seen_ = snapshot.seen;
  next_nonce_ = snapshot.next_nonce;
  now_ = snapshot.now;
  num_enforced_ = snapshot.num_enforced;
  num_granted_ = snapshot.num_granted;
  hard_reported_ = snapshot.hard_reported;
  settled_ = snapshot.settled;
  leases_ = snapshot.leases;
  readers_ = snapshot.readers;
  blocks_ = snapshot.blocks;
  violated_.clear();
}

/// Nonces and contents count only by what they are equal to.
std::string World::key() const {
  std::string key;
  const LeaseTableState table = LeaseTableState::of(table_);
  table.add_to(key);
  const auto add = [&key](auto... values) { (key.push_back(static_cast<char>(values)), ...); };
  const auto add_word = [&](uint64_t word) {
    const auto is_of = [word](const Lease& lease) { return lease.granted && lease.seat.nonce == word; };
    const auto of = std::find_if(leases_.begin(), leases_.end(), is_of) - leases_.begin();
    add(of, of == kNumLeases ? word : 0);
  };
  for (size_t slot = 1; slot < memory_.size(); ++slot) {
    add_word(memory_[slot].nonce);
    add_word(seen_[slot]);
    add(std::min<uint64_t>(words_[slot].settled, kSharedSeat + 1));
  }
  add(now_, num_enforced_ == table.num_soft_ended, hard_reported_, settled_[0], settled_[1]);
  for (const Lease& one : leases_) add(one.granted, one.granted ? one.seat.slot : 0, one.ended);
  for (uint8_t index = 0; index < kNumReaders; ++index) {
    const Reader& one = readers_[index];
    add(one.phase, one.num_slices, one.compared, one.looked, one.nonce_stood, one.foreign);
  }
  for (uint8_t block = 0; block < kNumBlocks; ++block) {
    add(blocks_[block].revoked);
    for (const Lease& lease : {leases_[kOld], leases_[kGrown]})
      add(lease.granted && lease.offered[block] != blocks_[block].content);
  }
  return key;
}

/// Calls the table. Property (b): it changes only slots that it grants, and those of leases that end.
template <typename Call>
void World::call(Call call) {
  std::vector<uint64_t> before;
  for (const LeaseSlot& slot : memory_) before.push_back(slot.nonce);
  call();
  for (size_t slot = 1; slot < memory_.size(); ++slot) {
    if (memory_[slot].nonce == before[slot]) continue;
    for (const Lease& lease : leases_) {
      const bool was = lease.granted && lease.seat.slot == slot && lease.seat.nonce == before[slot];
      if (was && !lease.ended) violate("(b) a lease lost its slot, and nothing had ended it");
    }
  }
  for (const Lease& lease : leases_) {
    if (lease.ended && stands(lease)) violate("(d) a lease stands that was ended");
  }
  if (rules_.writes_after_tombstone) arrive();
}

void World::arrive() {
  for (size_t slot = 1; slot < memory_.size(); ++slot) seen_[slot] = memory_[slot].nonce;
}

uint32_t World::num_taken() const {
  return stands(kOld) + stands(kGrown) + (leases_[kHard].granted && !hard_reported_);
}

/// A lease needs a slot: property (f), the oldest soft lease ends if none is free. Returns false if there is
/// none.
bool World::displace() {
  if (num_taken() < rules_.num_slots) return true;
  Lease* oldest = nullptr;
  for (const uint8_t lease : {kOld, kGrown}) {
    if (!stands(lease)) continue;
    if (oldest == nullptr || leases_[lease].number < oldest->number) oldest = &leases_[lease];
  }
  if (oldest != nullptr) oldest->ended = true;
  return oldest != nullptr;
}

bool World::offer(uint8_t lease) {
  Lease& one = leases_[lease];
  if (one.granted) return false;
  const bool has_room = displace();
  std::vector<uint32_t> blocks;
  for (uint8_t block = 0; block < kNumBlocks; ++block) {
    if (covers(lease, block)) blocks.push_back(block);
  }
  const int64_t ttl = lease == kGrown ? kNoExpiryNs : kTtl;
  bool granted = false;
  call([&] {
    if (lease == kHard) {
      const auto seats = table_.grant(kHardId, 1, 1, ttl, now_);
      if ((granted = seats.ok())) one.seat = seats->front();
    } else {
      const auto seat = table_.grant_soft(blocks, 1, ttl, now_);
      if ((granted = seat.ok())) one.seat = *seat;
    }
  });
  if (granted != has_room)
    violate("(f) a lease was refused for slots of soft leases, or granted without one");
  if (!granted) return !violated_.empty();
  one.granted = true;
  one.number = num_granted_++;
  if (lease != kGrown) one.deadline = now_ + kTtl;
  for (const uint32_t block : blocks) {
    one.offered[block] = blocks_[block].content;
    blocks_[block].revoked = false;
  }
  return true;
}

/// As Engine::revoke does.
bool World::revoke(uint8_t block) {
  uint32_t expected = 0;
  for (const uint8_t lease : {kOld, kGrown}) {
    if (!stands(lease) || !covers(lease, block)) continue;
    leases_[lease].ended = true;
    ++expected;
  }
  Revoked revoked;
  const std::array<uint32_t, 1> blocks{block};
  call([&] { revoked = table_.revoke(blocks); });
  if (revoked.num_ended != expected) violate("(d) a revoke reports another number of leases than it ended");
  const bool due =
      rules_.enforced == Enforced::kAll ? num_enforced_ < revoked.all_ended_so_far : revoked.num_ended > 0;
  if (due && rules_.enforced != Enforced::kNone) enforce_guards();
  num_enforced_ = revoked.all_ended_so_far;
  blocks_[block].revoked = true;
  return true;
}

void World::enforce_guards() {
  for (uint8_t reader = 0; reader < kNumReaders; ++reader) {
    if (!stands(lease_of(reader))) readers_[reader].compared = false;
  }
}

bool World::overwrite(uint8_t block) {
  Block& one = blocks_[block];
  if (rules_.revokes_first && !one.revoked) return false;
  ++one.content;
  return true;
}

void World::sweep() {
  for (Lease& lease : leases_) lease.ended |= lease.granted && now_ >= lease.deadline;
  Lease& hard = leases_[kHard];
  if (stands(hard) && words_[hard.seat.slot].settled == hard.seat.settle_nonce) hard.ended = true;
  Swept swept;
  call([&] { table_.sweep(now_, swept); });
  for (const EndedLease& one : swept.ended) {
    if (one.lease != kHardId || hard_reported_) violate("(d) a sweep reports a soft lease, or a lease twice");
    hard_reported_ = true;
  }
}

/// The hard lease's reader settles, maybe after the slot was granted again, or one of `old` settles as if its
/// seat were its own.
bool World::settle(uint8_t who) {
  const Lease& lease = leases_[who == 0 ? kHard : kOld];
  if (!lease.granted || settled_[who]) return false;
  settled_[who] = true;
  words_[lease.seat.slot].settled = lease.seat.settle_nonce;
  return true;
}

bool World::compare(uint8_t reader) {
  Reader& one = readers_[reader];
  if (!rules_.guards || one.phase != Reader::kReading) return false;
  if (one.compared || one.num_slices == kNumSlices) return false;
  if (stands(lease_of(reader))) {
    one.compared = true;
  } else {
    one = {.phase = Reader::kEnded};
  }
  return true;
}

bool World::send(uint8_t reader) {
  Reader& one = readers_[reader];
  if (one.phase != Reader::kReading || one.num_slices == kNumSlices) return false;
  if (rules_.guards && !std::exchange(one.compared, false)) return false;
  const uint8_t block = block_of(reader, one.num_slices++);
  const bool foreign = blocks_[block].content != lease_of(reader).offered[block];
  if (foreign && rules_.guards) violate("(c) a byte of new content was sent");
  one.foreign |= foreign;
  if (one.looked) end(one);
  return true;
}

bool World::look(uint8_t reader) {
  Reader& one = readers_[reader];
  if (one.phase != Reader::kReading || one.looked) return false;
  if (rules_.looks_last && one.num_slices < kNumSlices) return false;
  one.looked = true;
  one.nonce_stood = seen_standing(lease_of(reader));
  end(one);
  return true;
}

/// Ends the read if it has its data and has checked the slot.
void World::end(Reader& one) {
  if (one.num_slices < kNumSlices) return;
  if (one.nonce_stood && one.foreign) violate("(a) the nonce stands, and the read came after the overwrite");
  one = {.phase = Reader::kEnded};
}

std::vector<std::pair<std::string, Action>> World::actions() {
  using Names = std::vector<std::string>;
  const Names leases{"old", "grown", "hard"}, blocks{"0", "1"}, readers{"A", "B", "C"}, one{""};
  const std::vector<std::tuple<Do, std::string, Names>> all{{Do::kOffer, "offer ", leases},
                                                            {Do::kRevoke, "revoke ", blocks},
                                                            {Do::kOverwrite, "overwrite ", blocks},
                                                            {Do::kAbort, "abort hard", one},
                                                            {Do::kTime, "time", one},
                                                            {Do::kSweep, "sweep", one},
                                                            {Do::kArrive, "stores arrive", one},
                                                            {Do::kStart, "start ", readers},
                                                            {Do::kCompare, "compare ", readers},
                                                            {Do::kSend, "send ", readers},
                                                            {Do::kLook, "look ", readers},
                                                            {Do::kSettle, "settle ", {"hard", "old"}}};
  std::vector<std::pair<std::string, Action>> named;
  for (const auto& [what, verb, names] : all) {
    for (uint8_t who = 0; who < names.size(); ++who) named.emplace_back(verb + names[who], Action{what, who});
  }
  return named;
}

/// Expiry and late stores do not meet several readers, which would make it ten times as many states.
bool World::is_left_out(Action action) const {
  switch (action.what) {
    case Do::kTime:
    case Do::kSettle:
      return !rules_.disturbs;
    case Do::kStart:
      return rules_.disturbs && action.who > 0;
    default:
      return false;
  }
}

bool World::act(Action action) {
  if (is_left_out(action)) return false;
  const uint8_t who = action.who;
  switch (action.what) {
    case Do::kOffer:
      return offer(who);
    case Do::kRevoke:
      return revoke(who);
    case Do::kOverwrite:
      return overwrite(who);
    case Do::kAbort:
      if (!leases_[kHard].granted || leases_[kHard].ended) return false;
      leases_[kHard].ended = true;
      call([&] { table_.abort(kHardId); });
      return true;
    case Do::kTime:
      return now_ < kLastTime && ++now_ > 0;
    case Do::kSweep:
      return sweep(), true;
    case Do::kArrive:
      return arrive(), true;
    case Do::kStart:
      if (!lease_of(who).granted || readers_[who].phase != Reader::kNone) return false;
      readers_[who].phase = Reader::kReading;
      return true;
    case Do::kCompare:
      return compare(who);
    case Do::kSend:
      return send(who);
    case Do::kLook:
      return look(who);
    case Do::kSettle:
      return settle(who);
  }
  return false;
}

void World::check_all_end() {
  for (uint8_t block = 0; block < kNumBlocks; ++block) revoke(block);
  now_ += 2 * kTtl;
  sweep();
  const LeaseTableState table = LeaseTableState::of(table_);
  if (table.free.size() != rules_.num_slots || table.soft.size() != 0 || table.num_active != 0)
    violate("(d) leases ended, and left a slot or an entry behind");
}

}  // namespace kvlink::soft_lease_model

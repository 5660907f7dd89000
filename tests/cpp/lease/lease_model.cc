// SPDX-License-Identifier: Apache-2.0
#include "cpp/lease/lease_model.h"

#include <algorithm>

namespace kvlink::lease_model {
namespace {

constexpr int64_t kTtl = 1;
constexpr int64_t kLastTime = 2;

uint8_t name_of(int who) { return static_cast<uint8_t>(who + 1); }
uint64_t lease_of(int who) { return static_cast<uint64_t>(who) + 1; }

}  // namespace

World::Snapshot World::save() const {
  return {LeaseTableState::of(table_),
          save_words(memory_, words_),
          next_nonce_,
          now_,
          requests_,
          seats_,
          readers_,
          blocks_};
}

void World::restore(const Snapshot& snapshot) {
  snapshot.table.put_into(table_);
  restore_words(snapshot.words, memory_, words_);
  next_nonce_ = snapshot.next_nonce;
  now_ = snapshot.now;
  requests_ = snapshot.requests;
  seats_ = snapshot.seats;
  readers_ = snapshot.readers;
  blocks_ = snapshot.blocks;
  violated_.clear();
}

std::string World::key() const {
  std::string key;
  LeaseTableState::of(table_).add_to(key);
  for (const auto& words : save().words) {
    for (const uint64_t word : words) {
      for (const int byte : {0, 1, 3, 4}) key += static_cast<char>(word >> 8 * byte);  // none has others
    }
  }
  const auto add = [&key](auto... values) { (key.push_back(static_cast<char>(values)), ...); };
  add(now_);
  for (const Request& one : requests_)
    add(one.seat.slot, one.block, one.reports, one.granted, one.written, one.streams, one.back);
  for (const Reader& one : readers_) {
    add(one.phase, one.num_slices, one.got[0], one.got[1], one.compared, one.announced, one.in_time);
    add(one.withdrew, one.cut);
  }
  for (int who = 0; who < kNumRequests; ++who) add(blocks_.content[who], blocks_.holder[who]);
  return key;
}

/// Property (b): the call may change the slot in which the request's own nonce stands, and no other.
template <typename Call>
void World::on_behalf_of(int who, Call call) {
  std::vector<std::array<uint64_t, 2>> before;
  for (const LeaseSlot& slot : memory_) before.push_back({slot.nonce, slot.ready});
  const bool stood = stands(who);
  const bool took = call();
  for (uint32_t index = 1; index < memory_.size(); ++index) {
    const bool changed = before[index][0] != memory_[index].nonce || before[index][1] != memory_[index].ready;
    const Seats& own = seats_[who];
    const bool owns = std::any_of(own.begin(), own.end(), [&](const LeaseSeat& seat) {
      return seat.slot == index && seat.nonce == before[index][0];
    });
    if (changed && !owns) violate("(b) a lease stored to a slot without its nonce");
  }
  if (took && !stood && seats_[who].size() == 1)
    violate("(b) a call for an ended lease was told that all is well");
}

bool World::offer(int who, bool written) {
  if (requests_[who].granted || (who > 0 && !requests_[who - 1].granted)) return false;
  const auto block = std::find(blocks_.holder.begin(), blocks_.holder.end(), 0) - blocks_.holder.begin();
  const uint32_t num_seats = who == 0 ? rules_.seats_of_first : 1;
  std::vector<uint64_t> nonces;
  for (const LeaseSlot& slot : memory_) nonces.push_back(slot.nonce);
  const auto seats = table_.grant(lease_of(who), num_seats, written ? 1 : 0, kTtl, now_);
  if (!seats.ok()) return false;
  for (const LeaseSeat& seat : *seats) {
    if (nonces[seat.slot] >= kSmallestNonce)
      violate("(b) a slot was granted under a lease that stands in it");
    if (nonces[seat.slot] == static_cast<uint64_t>(LeaseEnd::kAborted) && who > 0 &&
        requests_[0].reports == 0)
      violate("(b) a slot was granted before the report of the aborted lease that had it");
  }
  seats_[who] = *seats;
  blocks_.holder[block] = name_of(who);
  if (written) blocks_.content[block] = name_of(who);
  Request& one = requests_[who];
  one.seat = seats->front();
  one.block = static_cast<uint8_t>(block);
  one.granted = true;
  one.written = written;
  one.streams = !written;
  return true;
}

/// Also for a lease that was aborted meanwhile: the computing thread learns of it later. Not once its blocks
/// are back.
bool World::write(int who) {
  Request& one = requests_[who];
  if (!one.granted || one.written || one.back) return false;
  one.written = true;
  blocks_.content[one.block] = name_of(who);
  return true;
}

/// As the engine does, which cuts readers off before it reports what has ended.
void World::sweep() {
  std::vector<std::array<uint64_t, 2>> before;
  for (const LeaseSlot& slot : memory_) before.push_back({slot.nonce, slot.ready});
  Swept swept;
  table_.sweep(now_, swept);
  for (uint32_t index = 1; index < memory_.size(); ++index) {
    if (before[index][1] != memory_[index].ready) violate("(b) a sweep stored to `ready`");
    if (before[index][0] != memory_[index].nonce && before[index][0] < kSmallestNonce)
      violate("(b) a sweep stored to a slot that no lease had");
  }
  for (const uint64_t connection : swept.to_fence) {
    Reader& reader = readers_[connection - 1];
    if (rules_.stores_arrive && reader.in_time && (reader.withdrew || reader.phase == Phase::kSettled))
      violate("(e) a reader that had ended was cut off");
    reader.cut = true;
  }
  for (const EndedLease& one : swept.ended) {
    if (++requests_[one.lease - 1].reports > 1) violate("(d) a lease ended twice");
  }
}

/// The owner is told that the lease has ended, and may write its blocks again.
bool World::give_blocks_back(int who) {
  Request& one = requests_[who];
  if (one.reports == 0 || one.back) return false;
  if (stands(who)) violate("(d) blocks came back under a lease that stands");
  if (rules_.enforces_guards) readers_[who].compared = false;
  one.back = true;
  blocks_.holder[one.block] = 0;
  return true;
}

bool World::start(int who) {
  Reader& reader = readers_[who];
  if (!requests_[who].granted || reader.phase != Phase::kNone) return false;
  reader.phase = requests_[who].streams ? Phase::kPeeking : Phase::kReading;
  return true;
}

bool World::announce(int who) {
  Reader& reader = readers_[who];
  if (rules_.path != Path::kFence || reader.announced || reader.phase != Phase::kReading || reader.cut)
    return false;
  if (!may_store(who)) {  // it arrived before, for the owner to see
    reader.announced = true;
    return true;
  }
  reader.announced = true;
  reader.in_time = stands(who);
  words_of(who).reader = Announcement{name_of(who), Announcement::tag_of(requests_[who].seat.nonce)}.word();
  return true;
}

bool World::withdraw(int who) {
  Reader& reader = readers_[who];
  if (!reader.announced || reader.withdrew || reader.phase != Phase::kFailed) return false;
  reader.withdrew = true;
  if (!may_store(who)) return true;
  words_of(who).reader =
      Announcement{name_of(who), Announcement::tag_of(requests_[who].seat.nonce), true}.word();
  return true;
}

bool World::peek(int who) {
  Reader& reader = readers_[who];
  if (reader.phase != Phase::kPeeking) return false;
  if (!stands(who)) {
    reader.phase = Phase::kFailed;
  } else if (slot_of(who).ready > 0) {
    reader.phase = Phase::kReading;
  } else {
    return false;
  }
  return true;
}

bool World::compare(int who) {
  Reader& reader = readers_[who];
  if (rules_.path != Path::kGuard || reader.phase != Phase::kReading) return false;
  if (reader.compared || reader.num_slices == reader.got.size()) return false;
  if (stands(who)) {
    reader.compared = true;
  } else {
    reader.phase = Phase::kFailed;
  }
  return true;
}

bool World::send(int who) {
  Reader& reader = readers_[who];
  if (reader.phase != Phase::kReading || reader.num_slices == reader.got.size()) return false;
  if (rules_.path == Path::kGuard && !reader.compared) return false;
  if (rules_.path == Path::kFence && !reader.announced) return false;
  reader.compared = false;
  if (reader.cut) {
    reader.phase = Phase::kFailed;
    return true;
  }
  const Request& one = requests_[who];
  reader.got[reader.num_slices++] = blocks_.content[one.block];
  const bool promised = rules_.path == Path::kGuard || (rules_.path == Path::kFence && reader.in_time);
  if (one.back && promised) violate("(c) a byte was sent after the blocks had gone back");
  return true;
}

bool World::validate(int who) {
  Reader& reader = readers_[who];
  if (reader.phase != Phase::kReading || reader.num_slices < reader.got.size()) return false;
  reader.phase = stands(who) ? Phase::kValid : Phase::kFailed;
  const bool all =
      std::all_of(reader.got.begin(), reader.got.end(), [who](uint8_t got) { return got == name_of(who); });
  if (reader.phase == Phase::kValid && !all) violate("(a) foreign or unwritten bytes are valid");
  return true;
}

/// Streaming and longer leases have nothing to do with how readers are fenced, and would make it ten times as
/// many states.
bool World::is_left_out(Do what) const {
  return rules_.path == Path::kFence && (what == Do::kOffer || what == Do::kExtend);
}

std::vector<std::pair<std::string, Action>> World::actions() {
  std::vector<std::pair<std::string, Action>> all;
  for (size_t what = 0; what < kNames.size(); ++what) {
    for (uint8_t who = 0; who < kNumRequests; ++who)
      all.emplace_back(std::string(kNames[what]) + " " + "AB" [who], Action { static_cast<Do>(what), who });
  }
  return all;
}

bool World::act(Action action) {
  if (is_left_out(action.what)) return false;
  const int who = action.who;
  Request& one = requests_[who];
  Reader& reader = readers_[who];
  switch (action.what) {
    case Do::kOffer:
      return offer(who, false);
    case Do::kOfferWritten:
      return offer(who, true);
    case Do::kWrite:
      return write(who);
    case Do::kSetReady:
      if (!one.written || !one.streams) return false;
      on_behalf_of(who, [&] { return table_.set_ready(lease_of(who), 1); });
      return true;
    case Do::kExtend:
      if (!one.granted) return false;
      on_behalf_of(who, [&] { return table_.extend(lease_of(who), kTtl, now_); });
      return true;
    case Do::kAbort:
      if (!one.granted) return false;
      on_behalf_of(who, [&] { return table_.abort(lease_of(who)) && stands(who); });
      return true;
    case Do::kTime:
      return who == 0 && now_ < kLastTime && ++now_ > 0;
    case Do::kSweep:
      return who == 0 && (sweep(), true);
    case Do::kBlocksBack:
      return give_blocks_back(who);
    case Do::kStart:
      return start(who);
    case Do::kAnnounce:
      return announce(who);
    case Do::kPeek:
      return peek(who);
    case Do::kCompare:
      return compare(who);
    case Do::kSend:
      return send(who);
    case Do::kValidate:
      return validate(who);
    case Do::kSettle:
      if (reader.phase != Phase::kValid) return false;
      reader.phase = Phase::kSettled;
      if (may_store(who)) words_of(who).settled = one.seat.settle_nonce;
      return true;
    case Do::kWithdraw:
      return withdraw(who);
  }
  return false;
}

void World::check_all_end() {
  now_ += 2 * kTtl;
  sweep();
  for (const Request& one : requests_) {
    if (one.granted && one.reports != 1) violate("(d) a lease did not end");
  }
}

}  // namespace kvlink::lease_model

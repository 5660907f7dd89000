// SPDX-License-Identifier: Apache-2.0
#include "lease/lease_table.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>
#include <string>

#include "base/check.h"

namespace kvlink {
namespace {

bool settles(uint64_t settle_nonce, uint64_t settled) { return (settled ^ settle_nonce) <= kMaxSeats; }

constexpr uint32_t kSlotsAtOnce = 8;

/// Returns whether no peer has stored a word of these slots, kSlotsAtOnce of them. A sweep checks the words
/// of all slots, almost all of which are 0, because nothing else tells it of a one-sided store.
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
bool are_zero(const PeerWords* words) {
  static_assert(sizeof(PeerWords) == sizeof(__m128i));
  __m128i any = _mm_setzero_si128();
  for (uint32_t slot = 0; slot < kSlotsAtOnce; ++slot)
    any = _mm_or_si128(any, _mm_load_si128(reinterpret_cast<const __m128i*>(&words[slot])));
  return _mm_movemask_epi8(_mm_cmpeq_epi8(any, _mm_setzero_si128())) == 0xffff;
}
#else
bool are_zero(const PeerWords* words) {
  uint64_t any = 0;
  for (uint32_t slot = 0; slot < kSlotsAtOnce; ++slot) {
    any |= words[slot].settled.load(std::memory_order_relaxed);
    any |= words[slot].reader.load(std::memory_order_relaxed);
  }
  return any == 0;
}
#endif

}  // namespace

Status draw_from_kernel(std::span<uint64_t> words) {
  if (::getentropy(words.data(), words.size_bytes()) == 0) return {};
  return {Code::kConfig,
          std::string("no lease can be granted: the kernel gives no random numbers: getentropy: ") +
              std::strerror(errno),
          "Allow getrandom in the seccomp profile of this process"};
}

LeaseTable::LeaseTable(std::span<std::byte> slots, std::span<std::byte> words, uint64_t epoch,
                       DrawRandom draw)
    : slots_(reinterpret_cast<LeaseSlot*>(slots.data())),
      words_(reinterpret_cast<PeerWords*>(words.data())),
      free_(static_cast<uint32_t>(slots.size() / sizeof(LeaseSlot))),
      records_(slots.size() / sizeof(LeaseSlot)),
      deadlines_(records_.size()),
      draw_(std::move(draw)) {
  KVLINK_CHECK(records_.size() > 1 && slots.size() == slots_bytes(records_.size() - 1));
  KVLINK_CHECK(words.size() == words_bytes(records_.size() - 1));
  KVLINK_CHECK(reinterpret_cast<uintptr_t>(slots.data()) % alignof(LeaseSlot) == 0);
  new (slots.data()) LeaseTableHeader{LeaseTableHeader::kMagic, epoch, records_.size(), {}};
  for (size_t slot = 1; slot < records_.size(); ++slot) {
    new (&slots_[slot]) LeaseSlot{};
    new (&words_[slot]) PeerWords{};
  }
}

/// Draws enough for `num` calls of take_nonce().
Status LeaseTable::draw_nonces(size_t num) {
  while (random_.size() < num) {
    std::array<uint64_t, 32> words;
    if (Status status = draw_(words); !status.ok()) return status;
    std::copy_if(words.begin(), words.end(), std::back_inserter(random_),
                 [](uint64_t word) { return word >= kSmallestNonce; });
  }
  return {};
}

uint64_t LeaseTable::take_nonce() {
  const uint64_t nonce = random_.back();
  random_.pop_back();
  return nonce;
}

/// Returns the time by which leases end. It grows by kMostAgeingNs at most between two reads of the clock. To
/// be called before anything else that takes the time. If there is no lease, no thread sweeps, and the time
/// between does not count.
int64_t LeaseTable::aged(int64_t now_ns) {
  const int64_t since = now_ns - looked_ns_;
  looked_ns_ = std::max(looked_ns_, now_ns);
  if (since > kMostAgeingNs) paused_ns_ += since - kMostAgeingNs;
  return now_ns - paused_ns_;
}

LeaseTable::Lease LeaseTable::make_lease(uint64_t id, int64_t ttl_ns, int64_t now_ns) {
  return {id, {}, now_ns, ttl_ns, aged(now_ns) + ttl_ns, LeaseEnd::kSettled};
}

bool LeaseTable::may_grant(uint64_t lease, size_t num_seats) const {
  return num_seats - 1 < kMaxSeats && !leases_.contains(lease);
}

Status LeaseTable::why_not(uint64_t lease, size_t num_seats) const {
  if (leases_.contains(lease)) return Status::Config("this lease is already granted");
  return Status::Config("a lease has 1 to " + std::to_string(kMaxSeats) + " seats, not " +
                        std::to_string(num_seats));
}

Result<std::vector<LeaseSeat>> LeaseTable::grant(uint64_t lease, uint32_t readers, uint64_t ready,
                                                 int64_t ttl_ns, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  Lease granted = make_lease(lease, ttl_ns, now_ns);
  if (!may_grant(lease, readers)) return why_not(lease, readers);
  if (readers > free_.size() + soft_.size()) {
    return Status(Code::kConfig,
                  "the lease table is full: " + std::to_string(leases_.size()) + " leases are active",
                  "Settle or abort offers, shorten their time to live, or raise KVLINK_LEASE_SLOTS");
  }
  if (Status status = draw_nonces(2 * size_t{readers}); !status.ok()) return status;
  make_room(readers);
  std::vector<LeaseSeat> seats;
  for (uint32_t reader = 0; reader < readers; ++reader) {
    seats.push_back({free_.pop(), take_nonce(), take_nonce()});
    open_seat(granted, seats.back(), ready);
  }
  add(std::move(granted));
  return seats;
}

Status LeaseTable::grant_at(uint64_t lease, std::span<const LeaseSeat> seats, uint64_t ready, int64_t ttl_ns,
                            int64_t now_ns) {
  std::lock_guard lock(mutex_);
  Lease granted = make_lease(lease, ttl_ns, now_ns);
  if (!may_grant(lease, seats.size())) return why_not(lease, seats.size());
  for (size_t index = 0; index < seats.size(); ++index) {
    const LeaseSeat& seat = seats[index];
    const auto before = seats.first(index);
    const bool twice = std::any_of(before.begin(), before.end(),
                                   [&](const LeaseSeat& other) { return other.slot == seat.slot; });
    const bool is_free = free_.contains(seat.slot) || soft_.has(seat.slot);
    if (twice || !is_free || seat.nonce < kSmallestNonce || seat.settle_nonce < kSmallestNonce) {
      return Status::Config("lease slot " + std::to_string(seat.slot) +
                            " is taken or does not exist, or a nonce of it is not random");
    }
  }
  for (const LeaseSeat& seat : seats) {
    if (soft_.has(seat.slot)) end_soft(seat.slot, LeaseEnd::kEvicted, soft_counts_.displaced);
    free_.remove(seat.slot);
    open_seat(granted, seat, ready);
  }
  add(std::move(granted));
  return {};
}

void LeaseTable::open_seat(Lease& lease, const LeaseSeat& seat, uint64_t ready) {
  publish(seat, {lease.id, seat.settle_nonce, Announcement::tag_of(seat.nonce)}, lease.deadline_ns, ready);
  lease.seats.push_back({seat.slot, true});
  ++lease.num_open;
}

/// Puts a seat into its slot, which readers accept from then on.
void LeaseTable::publish(const LeaseSeat& seat, const SlotRecord& record, int64_t deadline_ns,
                         uint64_t ready) {
  add_reader(seat.slot);  // a late one of the slot's last lease
  readers_.take(seat.slot, to_fence_);
  words_[seat.slot].settled.store(0, std::memory_order_relaxed);
  records_[seat.slot] = record;
  deadlines_.set(seat.slot, deadline_ns);
  LeaseSlot& shared = slots_[seat.slot];
  KVLINK_CHECK(shared.nonce.load(std::memory_order_relaxed) <
               kSmallestNonce);  // pair of end_seat(), end_soft()
  shared.ready.store(ready, std::memory_order_relaxed);
  shared.nonce.store(seat.nonce, std::memory_order_release);
}

void LeaseTable::add(Lease lease) {
  leases_.emplace(lease.id, std::move(lease));
  count_active();
  ++counts_.granted;
}

void LeaseTable::count_active() {
  // Sequentially consistent, like the flag of a sweeper that is about to sleep: each stores, then loads the
  // other's word, and one of them must see the other.
  num_active_.store(static_cast<uint32_t>(leases_.size()) + num_expiring_soft_);
}

bool LeaseTable::set_ready(uint64_t id, uint64_t ready) {
  std::lock_guard lock(mutex_);
  Lease* const lease = open_lease(id);
  if (lease == nullptr) return false;
  for (const Seat& seat : lease->seats) {
    if (!seat.open) continue;
    Atomic<uint64_t>& shared = slots_[seat.slot].ready;
    if (shared.load(std::memory_order_relaxed) < ready) shared.store(ready, std::memory_order_release);
  }
  return true;
}

void LeaseTable::set_deadline(Lease& lease, int64_t deadline_ns) {
  lease.deadline_ns = deadline_ns;
  for (const Seat& seat : lease.seats) {
    if (seat.open) deadlines_.set(seat.slot, deadline_ns);
  }
}

bool LeaseTable::extend(uint64_t id, int64_t ttl_ns, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  const int64_t now = aged(now_ns);
  Lease* const lease = open_lease(id);
  if (lease == nullptr) return false;
  set_deadline(*lease, std::max(lease->deadline_ns, now + ttl_ns));
  return true;
}

bool LeaseTable::set_ttl(uint64_t id, int64_t ttl_ns, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  const int64_t now = aged(now_ns);
  Lease* const lease = open_lease(id);
  if (lease == nullptr) return false;
  lease->ttl_ns = ttl_ns;
  set_deadline(*lease, now + ttl_ns);
  return true;
}

uint64_t LeaseTable::lease_at(uint32_t slot, uint64_t settle_nonce) {
  std::lock_guard lock(mutex_);
  return slot < records_.size() && records_[slot].settle_nonce == settle_nonce ? records_[slot].lease : 0;
}

bool LeaseTable::renew(uint32_t slot, uint64_t settle_nonce, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  const int64_t now = aged(now_ns);
  if (!is_settled_by(slot, settle_nonce) || !is_open(slot)) return false;
  Lease& lease = leases_.at(records_[slot].lease);
  set_deadline(lease, std::max(lease.deadline_ns, now + lease.ttl_ns));
  return true;
}

bool LeaseTable::abort(uint64_t id) {
  std::lock_guard lock(mutex_);
  Lease* const lease = open_lease(id);
  return lease != nullptr && abort(*lease);
}

void LeaseTable::abort_all() {
  std::lock_guard lock(mutex_);
  for (auto& [id, lease] : leases_) abort(lease);
  uint64_t uncounted = 0;
  while (soft_.size() > 0) end_soft(soft_.oldest(), LeaseEnd::kAborted, uncounted);
}

void LeaseTable::void_all() {
  std::lock_guard lock(mutex_);
  for (size_t slot = 1; slot < records_.size(); ++slot)
    slots_[slot].nonce.store(static_cast<uint64_t>(LeaseEnd::kAborted), std::memory_order_release);
  full_fence();
}

/// Returns false if its readers had settled before.
bool LeaseTable::abort(Lease& lease) {
  for (const Seat& seat : lease.seats) {
    if (seat.open) take_settled(seat.slot);
  }
  if (lease.num_open == 0) return false;
  lease.how = LeaseEnd::kAborted;
  for (Seat& seat : lease.seats) end_seat(lease, seat, LeaseEnd::kAborted);
  return true;
}

/// Returns null if there is none, or every seat of it has ended.
LeaseTable::Lease* LeaseTable::open_lease(uint64_t id) {
  const auto found = leases_.find(id);
  return found != leases_.end() && found->second.num_open > 0 ? &found->second : nullptr;
}

bool LeaseTable::settle(uint32_t slot, uint64_t settled) {
  std::lock_guard lock(mutex_);
  if (!is_settled_by(slot, settled) || !is_open(slot)) return false;
  words_[slot].settled.store(settled, std::memory_order_release);
  return true;
}

/// Returns whether there is a seat at the slot, maybe ended, that `settled` settles.
bool LeaseTable::is_settled_by(uint32_t slot, uint64_t settled) const {
  return slot < records_.size() && records_[slot].tag != 0 && settles(records_[slot].settle_nonce, settled);
}

/// Takes a reader's announcement if it concerns the last lease of the slot.
void LeaseTable::add_reader(uint32_t slot) {
  Atomic<uint64_t>& word = words_[slot].reader;
  if (word.load(std::memory_order_relaxed) == 0) return;
  const auto said = Announcement::of(word.exchange(0, std::memory_order_acq_rel));
  if (said.tag != records_[slot].tag || said.connection == 0) return;
  readers_.add(slot, said);
  if (!is_open(slot)) late_slots_.push_back(slot);
}

/// Ends the seat whose reader has settled, and the seats that it said are not needed.
void LeaseTable::take_settled(uint32_t slot) {
  Atomic<uint64_t>& word = words_[slot].settled;
  if (word.load(std::memory_order_relaxed) == 0) return;
  const uint64_t settled = word.exchange(0, std::memory_order_acq_rel);
  if (!is_settled_by(slot, settled)) return;
  if (!is_open(slot)) return readers_.forget(slot);  // it came too late, and reads no more
  Lease& lease = leases_.at(records_[slot].lease);
  const uint64_t num_readers = settled ^ records_[slot].settle_nonce;
  for (size_t index = 0; index < lease.seats.size(); ++index) {
    Seat& seat = lease.seats[index];
    if (seat.slot == slot || (num_readers > 0 && index >= num_readers))
      end_seat(lease, seat, LeaseEnd::kSettled);
  }
}

void LeaseTable::end_seat(Lease& lease, Seat& seat, LeaseEnd how) {
  if (!seat.open) return;
  const uint64_t ends = slots_[seat.slot].nonce.load(std::memory_order_relaxed);  // pair of publish()
  KVLINK_CHECK(lease.num_open > 0 && ends >= kSmallestNonce);
  KVLINK_CHECK(records_[seat.slot].lease == lease.id &&
               records_[seat.slot].tag == Announcement::tag_of(ends));
  seat.open = false;
  deadlines_.remove(seat.slot);
  ended_slots_.push_back(seat.slot);
  if (--lease.num_open == 0) ended_leases_.push_back(lease.id);
  slots_[seat.slot].nonce.store(static_cast<uint64_t>(how), std::memory_order_release);
  // The owner's later writes into the blocks are ordered after the nonce's removal.
  full_fence();
  add_reader(seat.slot);
  if (how == LeaseEnd::kSettled) readers_.forget(seat.slot);  // a reader that settled reads no more
}

/// Ends the lease that has the slot.
void LeaseTable::expire(uint32_t slot) {
  if (soft_.has(slot)) return end_soft(slot, LeaseEnd::kExpired, soft_counts_.expired);
  Lease& lease = leases_.at(records_[slot].lease);
  lease.how = LeaseEnd::kExpired;
  for (Seat& seat : lease.seats) end_seat(lease, seat, LeaseEnd::kExpired);
}

void LeaseTable::sweep(int64_t now_ns, Swept& swept) {
  std::lock_guard lock(mutex_);
  const int64_t now = aged(now_ns);
  const auto num_slots = static_cast<uint32_t>(records_.size());
  const PeerWords* const words = words_;
  for (uint32_t slot = 1; slot < num_slots;) {
    if (num_slots - slot >= kSlotsAtOnce && are_zero(&words[slot])) {
      slot += kSlotsAtOnce;
      continue;
    }
    for (const uint32_t end = std::min(slot + kSlotsAtOnce, num_slots); slot < end; ++slot) {
      add_reader(slot);
      take_settled(slot);
    }
  }
  deadlines_.take_passed(now, [this](uint32_t slot) { expire(slot); });
  report(now_ns, swept);
}

void LeaseTable::report(int64_t now_ns, Swept& swept) {
  // After the tombstones: a reader that announced itself before them is cut off before its blocks are
  // returned.
  for (const uint32_t slot : ended_slots_) add_reader(slot);
  for (const std::vector<uint32_t>* slots : {&ended_slots_, &late_slots_}) {
    for (const uint32_t slot : *slots) {
      if (!is_open(slot)) readers_.take(slot, to_fence_);
    }
  }
  late_slots_.clear();
  counts_.fenced_readers += to_fence_.size();
  swept.to_fence.insert(swept.to_fence.end(), to_fence_.begin(), to_fence_.end());
  to_fence_.clear();
  for (const uint32_t slot : ended_slots_) free_.push(slot);
  ended_slots_.clear();
  for (const uint64_t id : ended_leases_) {
    const auto found = leases_.find(id);
    KVLINK_CHECK(found != leases_.end() && found->second.num_open == 0);  // it is reported once
    const LeaseEnd how = found->second.how;
    counts_.settled += how == LeaseEnd::kSettled;
    counts_.expired += how == LeaseEnd::kExpired;
    counts_.aborted += how == LeaseEnd::kAborted;
    swept.ended.push_back({id, how, now_ns - found->second.granted_ns});
    leases_.erase(found);
  }
  ended_leases_.clear();
  count_active();
}

LeaseCounts LeaseTable::counts(int64_t now_ns) const {
  std::lock_guard lock(mutex_);
  LeaseCounts counts = counts_;
  counts.active = leases_.size();
  for (const auto& [id, lease] : leases_)
    counts.oldest_ns = std::max(counts.oldest_ns, now_ns - lease.granted_ns);
  return counts;
}

// Soft leases, which end before their blocks get new content.

/// Ends soft leases, the oldest first, until so many slots are free. Returns false, and ends none, if they
/// have too few.
bool LeaseTable::make_room(uint32_t num_slots) {
  if (num_slots > free_.size() + soft_.size()) return false;
  while (free_.size() < num_slots) end_soft(soft_.oldest(), LeaseEnd::kEvicted, soft_counts_.displaced);
  return true;
}

Result<LeaseSeat> LeaseTable::grant_soft(std::span<const uint32_t> blocks, uint64_t ready, int64_t ttl_ns,
                                         int64_t now_ns) {
  std::lock_guard lock(mutex_);
  if (Status status = check_soft(blocks); !status.ok()) return status;
  if (Status status = draw_nonces(1); !status.ok()) return status;
  if (!make_room(1)) {
    return Status(Code::kConfig,
                  "the lease table is full of leases that pin blocks: " + std::to_string(leases_.size()),
                  "Offer again once some have ended, or raise KVLINK_LEASE_SLOTS");
  }
  const LeaseSeat seat{free_.pop(), take_nonce(), kSharedSeat};
  open_soft(seat, blocks, ready, ttl_ns, now_ns);
  return seat;
}

Status LeaseTable::grant_soft_at(const LeaseSeat& seat, std::span<const uint32_t> blocks, uint64_t ready,
                                 int64_t ttl_ns, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  if (Status status = check_soft(blocks); !status.ok()) return status;
  if ((!free_.contains(seat.slot) && !soft_.has(seat.slot)) || seat.nonce < kSmallestNonce ||
      !seat.is_shared()) {
    return Status::Config("lease slot " + std::to_string(seat.slot) +
                          " is taken or does not exist, or it is no shared seat with a random nonce");
  }
  if (soft_.has(seat.slot)) end_soft(seat.slot, LeaseEnd::kEvicted, soft_counts_.displaced);
  free_.remove(seat.slot);
  open_soft(seat, blocks, ready, ttl_ns, now_ns);
  return {};
}

Status LeaseTable::check_soft(std::span<const uint32_t> blocks) {
  if (blocks.empty() || blocks.size() > SoftLeases::kMaxEntries) {
    return Status::Config("a soft lease covers 1 to " + std::to_string(SoftLeases::kMaxEntries) + " blocks");
  }
  return {};
}

void LeaseTable::open_soft(const LeaseSeat& seat, std::span<const uint32_t> blocks, uint64_t ready,
                           int64_t ttl_ns, int64_t now_ns) {
  while (!soft_.has_room_for(blocks.size()))
    end_soft(soft_.oldest(), LeaseEnd::kEvicted, soft_counts_.displaced);
  const int64_t now = aged(now_ns);
  const bool expires = ttl_ns < kNoExpiryNs - now;
  soft_.add(seat.slot, blocks);
  num_expiring_soft_ += expires;
  publish(seat, {}, expires ? now + ttl_ns : SeatDeadlines::kNever, ready);
  count_active();
  ++soft_counts_.granted;
}

Revoked LeaseTable::revoke(std::span<const uint32_t> blocks) {
  std::lock_guard lock(mutex_);
  const uint64_t before = num_soft_ended_;
  soft_.end_covering(blocks,
                     [this](uint32_t slot) { end_soft(slot, LeaseEnd::kEvicted, soft_counts_.evicted); });
  release_fence();  // for leases that another thread has ended: this one has seen their tombstones
  return {static_cast<uint32_t>(num_soft_ended_ - before), num_soft_ended_};
}

bool LeaseTable::withdraw_soft(uint32_t slot, uint64_t nonce) {
  std::lock_guard lock(mutex_);
  if (!soft_.has(slot) || !holds(slot, nonce)) return false;
  uint64_t uncounted = 0;
  end_soft(slot, LeaseEnd::kAborted, uncounted);
  return true;
}

/// The slot is free at once: no reader stores to it, and nothing but the nonce names the lease.
void LeaseTable::end_soft(uint32_t slot, LeaseEnd how, uint64_t& count) {
  KVLINK_CHECK(soft_.has(slot) && slots_[slot].nonce.load(std::memory_order_relaxed) >= kSmallestNonce);
  slots_[slot].nonce.store(static_cast<uint64_t>(how), std::memory_order_release);
  // The owner's later writes into the blocks are ordered after the nonce's removal.
  full_fence();
  num_expiring_soft_ -= deadlines_.at(slot) != SeatDeadlines::kNever;
  deadlines_.remove(slot);
  soft_.end(slot);
  free_.push(slot);
  ++num_soft_ended_;
  ++count;
  count_active();
}

SoftLeaseCounts LeaseTable::soft_counts() const {
  std::lock_guard lock(mutex_);
  SoftLeaseCounts counts = soft_counts_;
  counts.active = soft_.size();
  return counts;
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "lease_table.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>

namespace kvlink {
namespace {

bool settles(uint64_t settle_nonce, uint64_t settled) { return (settled ^ settle_nonce) <= kMaxSeats; }

uint32_t slots_in(std::span<std::byte> memory) {
  return static_cast<uint32_t>(memory.size() / sizeof(LeaseSlot));
}

}  // namespace

Status draw_from_kernel(std::span<uint64_t> words) {
  std::span<std::byte> left = std::as_writable_bytes(words);
  while (!left.empty()) {
    const ssize_t drawn = ::getrandom(left.data(), left.size(), 0);
    if (drawn > 0) {
      left = left.subspan(static_cast<size_t>(drawn));
    } else if (drawn == 0 || errno != EINTR) {
      return {Code::kConfig,
              std::string("no lease can be granted: the kernel gives no random numbers: getrandom: ") +
                  std::strerror(errno),
              "Allow getrandom in the seccomp profile of this process"};
    }
  }
  return {};
}

LeaseTable::LeaseTable(std::span<std::byte> memory, uint64_t epoch, DrawRandom draw)
    : slots_(reinterpret_cast<LeaseSlot*>(memory.data())), free_(slots_in(memory)), draw_(std::move(draw)) {
  const uint32_t num_slots = slots_in(memory);
  new (memory.data()) LeaseTableHeader{LeaseTableHeader::kMagic, epoch, num_slots, {}};
  lease_of_slot_.resize(num_slots);
  for (uint32_t index = 1; index < num_slots; ++index) new (&slots_[index]) LeaseSlot{};
}

/// Afterwards take_nonce() may be called `num` times.
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

/// Before anything else that takes the time. No lease, nobody sweeps: the time between does not count.
void LeaseTable::look_at_clock(int64_t now_ns) {
  const int64_t since = now_ns - looked_ns_;
  looked_ns_ = std::max(looked_ns_, now_ns);
  if (since <= kMostAgeingNs) return;
  for (auto& [id, lease] : leases_) lease.deadline_ns += since - kMostAgeingNs;
}

Result<std::vector<LeaseSeat>> LeaseTable::grant(uint64_t lease, uint32_t readers, uint64_t ready,
                                                 int64_t ttl_ns, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  look_at_clock(now_ns);
  if (readers == 0) return Status::Config("a lease needs at least one reader");
  if (leases_.contains(lease)) return Status::Config("this lease is already granted");
  if (readers > free_.size()) {
    return Status(Code::kConfig,
                  "the lease table is full: " + std::to_string(leases_.size()) + " leases are active",
                  "Settle or abort offers, shorten their time to live, or raise KVLINK_LEASE_SLOTS");
  }
  if (Status status = draw_nonces(2 * size_t{readers}); !status.ok()) return status;
  Lease granted{{}, now_ns, ttl_ns, now_ns + ttl_ns, LeaseEnd::kSettled, {}};
  std::vector<LeaseSeat> seats;
  for (uint32_t reader = 0; reader < readers; ++reader) {
    seats.push_back({free_.pop(), take_nonce(), take_nonce()});
    open_seat(granted, seats.back(), ready);
  }
  add(lease, std::move(granted));
  return seats;
}

Status LeaseTable::grant_at(uint64_t lease, std::span<const LeaseSeat> seats, uint64_t ready, int64_t ttl_ns,
                            int64_t now_ns) {
  std::lock_guard lock(mutex_);
  look_at_clock(now_ns);
  if (seats.empty() || seats.size() > kMaxSeats) return Status::Config("a lease has 1 to 255 seats");
  if (leases_.contains(lease)) return Status::Config("this lease is already granted");
  for (size_t index = 0; index < seats.size(); ++index) {
    const LeaseSeat& seat = seats[index];
    const auto before = seats.first(index);
    const bool twice = std::any_of(before.begin(), before.end(),
                                   [&](const LeaseSeat& other) { return other.slot == seat.slot; });
    if (twice || !free_.contains(seat.slot) || seat.nonce < kSmallestNonce ||
        seat.settle_nonce < kSmallestNonce) {
      return Status::Config("lease slot " + std::to_string(seat.slot) +
                            " is taken or does not exist, or a nonce of it is not random");
    }
  }
  Lease granted{{}, now_ns, ttl_ns, now_ns + ttl_ns, LeaseEnd::kSettled, {}};
  for (const LeaseSeat& seat : seats) {
    free_.remove(seat.slot);
    open_seat(granted, seat, ready);
  }
  add(lease, std::move(granted));
  return {};
}

void LeaseTable::open_seat(Lease& lease, const LeaseSeat& seat, uint64_t ready) {
  LeaseSlot& shared = slot(seat.slot);
  // A late store of an earlier reader may still hit `settled`: it carries a settle nonce that ended.
  shared.settled.store(0, std::memory_order_relaxed);
  shared.reader.store(0, std::memory_order_relaxed);
  shared.ready.store(ready, std::memory_order_relaxed);
  shared.nonce.store(seat.nonce, std::memory_order_release);
  lease.seats.push_back({seat.slot, seat.settle_nonce, SeatState::kOpen});
  ++lease.num_open;
}

void LeaseTable::add(uint64_t id, Lease lease) {
  for (const Seat& seat : lease.seats) lease_of_slot_[seat.slot] = id;
  leases_.emplace(id, std::move(lease));
  num_active_.store(static_cast<uint32_t>(leases_.size()), std::memory_order_relaxed);
  ++counts_.granted;
}

bool LeaseTable::set_ready(uint64_t id, uint64_t ready) {
  std::lock_guard lock(mutex_);
  Lease* const lease = open_lease(id);
  if (lease == nullptr) return false;
  for (const Seat& seat : lease->seats) {
    if (!seat.open()) continue;
    std::atomic<uint64_t>& shared = slot(seat.slot).ready;
    if (shared.load(std::memory_order_relaxed) < ready) shared.store(ready, std::memory_order_release);
  }
  return true;
}

bool LeaseTable::extend(uint64_t id, int64_t ttl_ns, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  look_at_clock(now_ns);
  Lease* const lease = open_lease(id);
  if (lease == nullptr) return false;
  lease->deadline_ns = std::max(lease->deadline_ns, now_ns + ttl_ns);
  return true;
}

bool LeaseTable::set_ttl(uint64_t id, int64_t ttl_ns, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  look_at_clock(now_ns);
  Lease* const lease = open_lease(id);
  if (lease == nullptr) return false;
  lease->ttl_ns = ttl_ns;
  lease->deadline_ns = now_ns + ttl_ns;
  return true;
}

bool LeaseTable::renew(uint32_t index, uint64_t settle_nonce, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  look_at_clock(now_ns);
  Lease* const lease = lease_at(index, settle_nonce);
  if (lease == nullptr) return false;
  lease->deadline_ns = std::max(lease->deadline_ns, now_ns + lease->ttl_ns);
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
}

/// False: its readers had settled before.
bool LeaseTable::abort(Lease& lease) {
  end_settled(lease);
  if (!lease.open()) return false;
  lease.how = LeaseEnd::kAborted;
  for (Seat& seat : lease.seats) end_seat(lease, seat, LeaseEnd::kAborted);
  return true;
}

/// Null: there is none, or every seat of it has ended.
LeaseTable::Lease* LeaseTable::open_lease(uint64_t id) {
  const auto found = leases_.find(id);
  return found != leases_.end() && found->second.open() ? &found->second : nullptr;
}

bool LeaseTable::settle(uint32_t index, uint64_t settled) {
  std::lock_guard lock(mutex_);
  if (lease_at(index, settled) == nullptr) return false;
  slot(index).settled.store(settled, std::memory_order_release);
  return true;
}

/// The lease with an open seat at the slot that `settled` settles, or null.
LeaseTable::Lease* LeaseTable::lease_at(uint32_t index, uint64_t settled) {
  const auto found = leases_.find(index < lease_of_slot_.size() ? lease_of_slot_[index] : 0);
  if (found == leases_.end()) return nullptr;
  for (const Seat& seat : found->second.seats) {
    if (seat.slot == index && seat.open() && settles(seat.settle_nonce, settled)) return &found->second;
  }
  return nullptr;
}

void LeaseTable::end_seat(Lease& lease, Seat& seat, LeaseEnd how) {
  if (!seat.open()) return;
  seat.state = SeatState::kEnded;
  --lease.num_open;
  ++lease.num_ended;
  slot(seat.slot).nonce.store(static_cast<uint64_t>(how), std::memory_order_release);
  // Whatever the owner writes into the blocks from here on is ordered after the nonce is gone.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

/// Ends the seats whose readers have settled, and those that a reader said nobody will take.
void LeaseTable::end_settled(Lease& lease) {
  for (Seat& seat : lease.seats) {
    if (!seat.open()) continue;
    const uint64_t settled = slot(seat.slot).settled.load(std::memory_order_acquire);
    if (!settles(seat.settle_nonce, settled)) continue;
    end_seat(lease, seat, LeaseEnd::kSettled);
    const uint64_t num_readers = settled ^ seat.settle_nonce;
    if (num_readers == 0) continue;
    for (size_t unused = num_readers; unused < lease.seats.size(); ++unused)
      end_seat(lease, lease.seats[unused], LeaseEnd::kSettled);
  }
}

void LeaseTable::end_expired(Lease& lease) {
  for (Seat& seat : lease.seats) {
    if (!seat.open()) continue;
    lease.how = LeaseEnd::kExpired;
    const uint64_t reader = slot(seat.slot).reader.load(std::memory_order_acquire);
    if (reader != 0) lease.readers.push_back(reader);
    end_seat(lease, seat, LeaseEnd::kExpired);
  }
}

/// Slots of seats that have ended may be granted again.
void LeaseTable::give_slots_back(Lease& lease) {
  for (Seat& seat : lease.seats) {
    if (seat.state != SeatState::kEnded) continue;
    seat.state = SeatState::kGone;
    free_.push(seat.slot);
  }
  lease.num_ended = 0;
}

void LeaseTable::sweep(int64_t now_ns, std::vector<EndedLease>& ended) {
  std::lock_guard lock(mutex_);
  look_at_clock(now_ns);
  for (auto it = leases_.begin(); it != leases_.end();) {
    Lease& lease = it->second;
    end_settled(lease);
    if (now_ns >= lease.deadline_ns) end_expired(lease);
    if (lease.num_ended > 0) give_slots_back(lease);
    if (lease.open()) {
      ++it;
      continue;
    }
    counts_.settled += lease.how == LeaseEnd::kSettled;
    counts_.expired += lease.how == LeaseEnd::kExpired;
    counts_.aborted += lease.how == LeaseEnd::kAborted;
    counts_.fenced_readers += lease.readers.size();
    ended.push_back({it->first, lease.how, std::move(lease.readers), now_ns - lease.granted_ns});
    it = leases_.erase(it);
  }
  num_active_.store(static_cast<uint32_t>(leases_.size()), std::memory_order_relaxed);
}

LeaseCounts LeaseTable::counts(int64_t now_ns) const {
  std::lock_guard lock(mutex_);
  LeaseCounts counts = counts_;
  counts.active = leases_.size();
  for (const auto& [id, lease] : leases_)
    counts.oldest_ns = std::max(counts.oldest_ns, now_ns - lease.granted_ns);
  return counts;
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The part of the lease table that grants soft leases, and ends them before their blocks get new content.
#include <string>

#include "lease/lease_table.h"

namespace kvlink {

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
  slots_[slot].nonce.store(static_cast<uint64_t>(how), std::memory_order_release);
  // The owner's later writes into the blocks are ordered after the nonce's removal.
  std::atomic_thread_fence(std::memory_order_seq_cst);
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

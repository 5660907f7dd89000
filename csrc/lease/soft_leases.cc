// SPDX-License-Identifier: Apache-2.0
#include "lease/soft_leases.h"

#include <algorithm>

namespace kvlink {

void SoftLeases::add(uint32_t slot, std::span<const uint32_t> blocks) {
  KVLINK_CHECK(slot != 0 && !has(slot));
  forget_ended();
  if (!blocks.empty()) {
    const size_t num_blocks = size_t{*std::max_element(blocks.begin(), blocks.end())} + 1;
    if (heads_.size() < num_blocks) heads_.resize(num_blocks);
  }
  if (by_slot_.size() <= slot) by_slot_.resize(size_t{slot} + 1);
  if (unused_.empty()) {
    unused_.push_back(static_cast<uint32_t>(leases_.size()));
    leases_.emplace_back();
  }
  const uint32_t index = unused_.back();
  unused_.pop_back();
  Lease& lease = leases_[index];
  lease.slot = slot;
  lease.older = leases_[0].older;
  lease.newer = 0;
  leases_[lease.older].newer = index;
  leases_[0].older = index;
  lease.entries.reserve(blocks.size());
  for (const uint32_t block : blocks) {
    lease.entries.push_back({block, {}, {}});
    list({index, static_cast<uint32_t>(lease.entries.size() - 1)});
  }
  by_slot_[slot] = index;
  num_live_entries_ += blocks.size();
  ++size_;
}

void SoftLeases::end(uint32_t slot) {
  KVLINK_CHECK(has(slot));
  const uint32_t index = by_slot_[slot];
  Lease& lease = leases_[index];
  leases_[lease.older].newer = lease.newer;
  leases_[lease.newer].older = lease.older;
  lease.slot = 0;
  by_slot_[slot] = 0;
  ended_.push_back(index);
  num_live_entries_ -= lease.entries.size();
  --size_;
}

void SoftLeases::list(Place at) {
  Place& head = heads_[entry(at).block];
  entry(at).next = head;
  if (head.lease != 0) entry(head).previous = at;
  head = at;
}

void SoftLeases::unlist(const Entry& one) {
  if (one.next.lease != 0) entry(one.next).previous = one.previous;
  (one.previous.lease != 0 ? entry(one.previous).next : heads_[one.block]) = one.next;
}

void SoftLeases::forget_ended() {
  for (const uint32_t index : ended_) {
    for (const Entry& one : leases_[index].entries) unlist(one);
    leases_[index].entries = {};
    unused_.push_back(index);
  }
  ended_.clear();
}

}  // namespace kvlink

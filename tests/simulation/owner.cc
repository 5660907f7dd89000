// SPDX-License-Identifier: Apache-2.0
#include "owner.h"

#include <cstring>

#include "scheduler.h"

namespace kvlink::simulation {
namespace {

using Pool = std::array<uint64_t, kOwnerBlocks * kBlockBytes / sizeof(uint64_t)>;

const Pool& pool() {
  static const Pool words = [] {
    Pool words{};
    Random random(7);
    for (uint64_t& word : words) word = random.next();
    return words;
  }();
  return words;
}

}  // namespace

const std::byte* owner_block(uint32_t block) {
  return reinterpret_cast<const std::byte*>(pool().data()) + uint64_t{block} * kBlockBytes;
}

Owner::Owner() {
  const LeaseTableHeader header{LeaseTableHeader::kMagic, kEpoch, kSlots, {}};
  std::memcpy(leases_.data(), &header, sizeof header);
}

const std::byte* Owner::at(uint32_t region, uint64_t offset, uint64_t bytes) const {
  const uint64_t size = region == kPoolRegion ? sizeof(Pool) : sizeof(leases_);
  if (region > kLeaseRegion || offset > size || bytes > size - offset) fail("a read leaves its region");
  return (region == kPoolRegion ? owner_block(0) : reinterpret_cast<const std::byte*>(leases_.data())) +
         offset;
}

void Owner::store(uint32_t region, uint64_t offset, uint64_t value) {
  const auto slot = static_cast<uint32_t>(offset / sizeof(PeerWords));
  if (region != kWordRegion || offset % sizeof value != 0 || slot == 0 || slot > kSlots) {
    fail("a write leaves the peer words");
  }
  stored_.insert(value);
  if (offset != reader_offset(slot)) return;
  const Announcement said = Announcement::of(value);
  if (said.tag != Announcement::tag_of(nonces_[slot])) fail("a reader announces itself for another lease");
  readers_.hear(slot, said);
  if (Scheduler::the().traces()) {
    Scheduler::the().trace((said.withdrawn ? "withdraws from slot " : "announces slot ") +
                           std::to_string(slot));
  }
}

uint32_t Owner::grant(uint64_t nonce, uint64_t ready) {
  if (num_granted_ == kSlots) fail("the simulation grants more leases than there are slots");
  const uint32_t slot = ++num_granted_;
  word(slot, offsetof(LeaseSlot, nonce)) = nonces_[slot] = nonce;
  word(slot, offsetof(LeaseSlot, ready)) = ready;
  return slot;
}

}  // namespace kvlink::simulation

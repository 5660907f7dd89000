// SPDX-License-Identifier: Apache-2.0
// Which soft leases cover a block, and which soft lease is the oldest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"

namespace kvlink {

/// An index by slot, block and age. The lease table guards it, and stores the words of the slots.
///
/// Ending a lease takes constant time, because a scheduler waits for it: the lists of the blocks keep the
/// entries of ended leases until the next add(). A list is walked at most once after its leases have ended.
class SoftLeases {
 public:
  /// One entry is a block of a lease, and takes 20 bytes.
  static constexpr size_t kMaxEntries = size_t{4} << 20;

  /// The lease becomes the newest one. REQUIRES that no lease has the slot. Memory grows with the largest
  /// block.
  void add(uint32_t slot, std::span<const uint32_t> blocks);
  /// REQUIRES has(slot).
  void end(uint32_t slot);
  /// Calls `end_slot(slot)`, which calls end(), for each lease that covers one of the blocks.
  template <typename EndSlot>
  void end_covering(std::span<const uint32_t> blocks, EndSlot end_slot) {
    for (const uint32_t block : blocks) {
      if (block >= heads_.size() || heads_[block].lease == 0) continue;
      for (Place at = heads_[block]; at.lease != 0; at = entry(at).next) {
        if (const uint32_t slot = leases_[at.lease].slot; slot != 0) end_slot(slot);
      }
      heads_[block] = {};
    }
  }

  bool has(uint32_t slot) const { return slot < by_slot_.size() && by_slot_[slot] != 0; }
  /// Returns the slot of the oldest lease. REQUIRES size() > 0.
  uint32_t oldest() const {
    KVLINK_CHECK(size_ > 0);
    return leases_[leases_[0].newer].slot;
  }
  uint32_t size() const { return size_; }
  /// Returns whether a lease over this many more blocks has room beside those that have not ended.
  bool has_room_for(size_t num_blocks) const { return num_live_entries_ + num_blocks <= kMaxEntries; }

 private:
  friend struct SoftLeasesState;  // tests/cpp/lease: compares indexes

  struct Place {
    uint32_t lease = 0, entry = 0;  // lease 0: none
  };
  struct Entry {
    uint32_t block;
    Place previous, next;
  };
  struct Lease {
    uint32_t slot = 0;  // 0: ended
    uint32_t older = 0, newer = 0;
    std::vector<Entry> entries;
  };

  Entry& entry(Place at) { return leases_[at.lease].entries[at.entry]; }
  void list(Place at);
  void unlist(const Entry& entry);
  void forget_ended();

  std::vector<Lease> leases_{1};   // the first one is the anchor of the ring from the oldest to the newest
  std::vector<uint32_t> by_slot_;  // index of the lease, or 0
  std::vector<Place> heads_;       // by block: its newest entry
  std::vector<uint32_t> ended_;    // leases whose entries may still be in lists
  std::vector<uint32_t> unused_;   // of leases_
  size_t num_live_entries_ = 0;
  uint32_t size_ = 0;
};

}  // namespace kvlink

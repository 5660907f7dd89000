// SPDX-License-Identifier: Apache-2.0
// Keeps the free slots of a lease table, the longest unused first. By the time a slot is granted again, a
// late store by its earlier reader has arrived.
#pragma once

#include <cstdint>
#include <vector>

#include "base/check.h"

namespace kvlink {

/// A ring of slot numbers, linked through two arrays; slot 0, the table's header, is its anchor. Every method
/// takes constant time.
class FreeSlots {
 public:
  /// Slots 1 to num_slots - 1 are free at first.
  explicit FreeSlots(uint32_t num_slots) : next_(num_slots), previous_(num_slots) {
    for (uint32_t slot = 1; slot < num_slots; ++slot) push(slot);
  }

  uint32_t size() const { return size_; }
  bool contains(uint32_t slot) const {
    return slot != 0 && slot < next_.size() && (next_[slot] != 0 || previous_[0] == slot);
  }
  /// Takes the slot that was unused the longest. REQUIRES size() > 0.
  uint32_t pop() {
    KVLINK_CHECK(size_ > 0);
    const uint32_t slot = next_[0];
    remove(slot);
    return slot;
  }
  /// REQUIRES contains(slot).
  void remove(uint32_t slot) {
    KVLINK_CHECK(contains(slot));
    next_[previous_[slot]] = next_[slot];
    previous_[next_[slot]] = previous_[slot];
    next_[slot] = 0;
    --size_;
  }
  /// REQUIRES !contains(slot), and that the table has the slot.
  void push(uint32_t slot) {
    KVLINK_CHECK(slot < next_.size() && !contains(slot));
    next_[slot] = 0;
    previous_[slot] = previous_[0];
    next_[previous_[0]] = slot;
    previous_[0] = slot;
    ++size_;
  }

 private:
  std::vector<uint32_t> next_, previous_;  // 0 in next_: the last one, or not free
  uint32_t size_ = 0;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "memory/slot_ring.h"

namespace kvlink {

SlotRing::SlotRing(const MemoryRange& memory) {
  for (uint64_t end = memory.bytes; end >= kSlotBytes; end -= kSlotBytes) {
    free_.push_back(memory.base + end - kSlotBytes);
  }
}

SlotRing::Slot SlotRing::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) return {nullptr, {this}};
  std::byte* const slot = free_.back();  // the one last used: its lines may still be in the cache
  free_.pop_back();
  return {slot, {this}};
}

size_t SlotRing::num_free() {
  std::lock_guard lock(mutex_);
  return free_.size();
}

void SlotRing::release(std::byte* slot) {
  std::lock_guard lock(mutex_);
  free_.push_back(slot);
}

}  // namespace kvlink

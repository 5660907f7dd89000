// SPDX-License-Identifier: Apache-2.0
// Slots of equal size for bytes in transit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/memory_range.h"

namespace kvlink {

/// Any thread.
class SlotRing {
 public:
  static constexpr uint32_t kSlotBytes = 512 << 10;  // 21 us at the 25 GB/s that PCIe 4 x16 carries

  /// The caller keeps the memory, which SlotRing never accesses.
  explicit SlotRing(const MemoryRange& memory);

  struct Return {
    SlotRing* ring;
    void operator()(std::byte* slot) const { ring->release(slot); }
  };
  using Slot = std::unique_ptr<std::byte, Return>;
  /// Returns null if all are taken.
  Slot take();
  size_t num_free();

 private:
  void release(std::byte* slot);

  std::mutex mutex_;
  std::vector<std::byte*> free_;
};

}  // namespace kvlink

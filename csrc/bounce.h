// SPDX-License-Identifier: Apache-2.0
// The bounce buffer: pinned host memory between the memory of a device and transports that do not reach it.
//
// A set amount, halved: one half for what this worker reads, one for what it sends. Each half would
// otherwise wait for the other, between two workers that read from each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device_copy.h"
#include "memory.h"
#include "transport.h"

namespace kvlink {

/// Slots of equal size. Any thread.
class BounceRing {
 public:
  static constexpr uint32_t kSlotBytes = 512 << 10;  // 21 us at the 25 GB/s that PCIe 4 x16 carries

  explicit BounceRing(const MemoryRange& memory);

  struct Return {
    BounceRing* ring;
    void operator()(std::byte* slot) const { ring->give_back(slot); }
  };
  using Slot = std::unique_ptr<std::byte, Return>;
  /// Null when all are taken.
  Slot take();

 private:
  void give_back(std::byte* slot);

  std::mutex mutex_;
  std::vector<std::byte*> free_;
};

class Bounce {
 public:
  static constexpr uint64_t kLeastBytes = 4 * BounceRing::kSlotBytes;

  /// Pins `bytes`, rounded down to whole slots, for the device that `memory` belongs to.
  static Result<std::shared_ptr<Bounce>> make(const std::byte* memory, uint64_t bytes,
                                              const MakeDeviceCopier& make_copier);

  /// Where reads land, for a NIC to register.
  MemoryRange landing_memory() const { return landing_memory_; }
  BounceRing& landing() { return landing_; }
  BounceRing& sending() { return sending_; }
  DeviceCopier& copier() { return *copier_; }

 private:
  Bounce(std::shared_ptr<HostMemory> memory, std::shared_ptr<DeviceCopier> copier, uint64_t half);

  const std::shared_ptr<HostMemory> memory_;
  const std::shared_ptr<DeviceCopier> copier_;  // unpins before the memory goes
  const MemoryRange landing_memory_;
  BounceRing landing_, sending_;
};

/// Gives `inner` a way into device memory: its reads land in pinned memory and are copied from there. It
/// lends such memory where Transport::lend_through() does; where not, peers are told `why_not`, or what it
/// says when that is empty. REQUIRES that nothing was registered yet; the first `num_regions` that will be
/// are the pool, in the memory of the device.
Result<std::unique_ptr<Transport>> bounce_wrap(std::unique_ptr<Transport> inner,
                                               std::shared_ptr<Bounce> bounce, uint32_t num_regions,
                                               const std::string& why_not);

/// The endpoints of bounce_wrap(). Region 0 of `inner` is the landing memory, 1 what follows the pool.
Result<std::unique_ptr<Endpoint>> bounce_endpoint(std::unique_ptr<Endpoint> inner,
                                                  std::shared_ptr<Bounce> bounce, uint32_t num_regions);

}  // namespace kvlink

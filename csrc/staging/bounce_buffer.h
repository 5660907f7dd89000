// SPDX-License-Identifier: Apache-2.0
// The bounce buffer: pinned host memory between the memory of a device and transports that do not reach it.
//
// A set amount, halved: one half for what this worker reads, one for what it sends. Each half would
// otherwise wait for the other, between two workers that read from each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/device_copier.h"
#include "memory/host_memory.h"
#include "memory/slot_ring.h"
#include "staging/staged_transport.h"
#include "transport_api/transport.h"

namespace kvlink {

class Bounce {
 public:
  static constexpr uint64_t kLeastBytes = 4 * (SlotRing::kSlotBytes + DeviceCopier::kTableBytes);

  /// Pins `bytes`, rounded down to whole slots and their tables, for the device that `memory` belongs to.
  static Result<std::shared_ptr<Bounce>> make(const std::byte* memory, uint64_t bytes,
                                              const MakeDeviceCopier& make_copier);

  const std::shared_ptr<StagingBuffer>& receiving() const { return receiving_; }
  SlotRing& sending() { return sending_; }
  DeviceCopier& copier() { return receiving_->copier(); }

 private:
  Bounce(const std::shared_ptr<HostMemory>& memory, std::shared_ptr<DeviceCopier> copier, uint64_t half);

  const std::shared_ptr<StagingBuffer> receiving_;  // keeps the memory
  SlotRing sending_;
};

/// Gives `inner` a way into device memory: its reads land in pinned memory and are copied from there. It
/// exports such memory where Capabilities::exports_through_bounce says so; where not, peers are told
/// `why_not`, or a general reason when that is empty. REQUIRES that nothing was registered yet; the first
/// `num_regions` that will be are the pool, in the memory of the device.
Result<std::unique_ptr<Transport>> bounce_wrap(std::unique_ptr<Transport> inner,
                                               std::shared_ptr<Bounce> bounce, uint32_t num_regions,
                                               const std::string& why_not);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The bounce buffer: pinned host memory between device memory and transports that do not reach it.
//
// Its size is fixed. One half is for what this worker reads, one for what it sends, because two workers that
// read from each other would otherwise block each other.
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
  static constexpr uint64_t kLeastBytes = 4 * SlotRing::kSlotBytes;

  /// Pins `bytes`, rounded down to whole slots, for the device that has `memory`.
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
/// exports device memory if Capabilities::exports_through_bounce is set. If not, peers are given `why_not`,
/// or a general reason if that is empty. REQUIRES that nothing was registered yet. The first `num_regions`
/// registered are the pool, in device memory, and so are those from the region `late_from` on.
Result<std::unique_ptr<Transport>> bounce_wrap(std::unique_ptr<Transport> inner,
                                               std::shared_ptr<Bounce> bounce, uint32_t num_regions,
                                               const std::string& why_not, uint32_t late_from = UINT32_MAX);

}  // namespace kvlink

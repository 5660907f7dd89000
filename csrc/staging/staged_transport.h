// SPDX-License-Identifier: Apache-2.0
// Reads that land in the slots of a ring, from where a device copies them to their places.
//
// The ring is in pinned host memory for transports that do not reach the device (the bounce buffer,
// staging/bounce_buffer.h). It is in the device's own memory for reads that would go there in many tiny
// pieces (the staging buffer, staging/device_staging.h).
#pragma once

#include <cstdint>
#include <memory>

#include "device/device_copier.h"
#include "memory/slot_ring.h"
#include "transport_api/forwarding.h"

namespace kvlink {

/// The memory of a ring, and the copier from it. Any thread.
class StagingBuffer {
 public:
  /// The caller or `keeper` keeps `memory`.
  StagingBuffer(const MemoryRange& memory, std::shared_ptr<DeviceCopier> copier,
                std::shared_ptr<const void> keeper = nullptr)
      : keeper_(std::move(keeper)), copier_(std::move(copier)), memory_(memory), ring_(memory) {}

  const MemoryRange& memory() const { return memory_; }
  SlotRing& ring() { return ring_; }
  DeviceCopier& copier() { return *copier_; }

 private:
  const std::shared_ptr<const void> keeper_;
  const std::shared_ptr<DeviceCopier> copier_;
  const MemoryRange memory_;
  SlotRing ring_;
};

struct StagingRules {
  /// The number of local regions, from the first on, that are not registered with the inner transport: all
  /// reads into them are staged. With 0 all are registered, and only reads of post_staged() are staged.
  uint32_t num_out_of_reach = 0;
  /// The same holds for all from this one on, which are registered after the others.
  uint32_t late_out_of_reach = UINT32_MAX;
  /// Gaps of up to this size between two ranges of the owner are read too, because that takes less time than
  /// another operation.
  uint32_t gap_bytes = 0;

  bool stages_all() const { return num_out_of_reach > 0 || late_out_of_reach != UINT32_MAX; }
  bool out_of_reach(uint32_t region) const {
    return region < num_out_of_reach || region >= late_out_of_reach;
  }
};

/// An endpoint that can also read through buffer memory.
class StageableEndpoint : public WrappedEndpoint {
 public:
  using WrappedEndpoint::WrappedEndpoint;
  /// Like post_read(), through the buffer memory.
  virtual Status post_staged(uint64_t token, const Chunk& chunk) = 0;
};

/// `slot_region` is the region of the buffer memory, as `inner` numbers it.
Result<std::unique_ptr<StageableEndpoint>> stage_endpoint(std::unique_ptr<Endpoint> inner,
                                                          std::shared_ptr<StagingBuffer> buffer,
                                                          const StagingRules& rules, uint32_t slot_region);

}  // namespace kvlink

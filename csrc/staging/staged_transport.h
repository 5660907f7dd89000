// SPDX-License-Identifier: Apache-2.0
// Reads that land on their way: in the slots of a ring, from where a device copies them to where they belong.
//
// In pinned host memory it is the bounce buffer (staging/bounce_buffer.h), for transports that do not reach
// the device. In the device's own memory it is the staging buffer (staging/device_staging.h), for reads that
// would go there in many tiny pieces.
#pragma once

#include <cstdint>
#include <memory>

#include "device/device_copier.h"
#include "memory/slot_ring.h"
#include "transport_api/forwarding.h"

namespace kvlink {

/// Where, and what copies from there. Any thread.
class StagingBuffer {
 public:
  /// `memory` is kept by the caller, or by `keeper`.
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
  /// So many local regions, the first, are not registered with the inner transport: all that is read into
  /// them lands first. 0: all are, and only what post_staged() takes lands first.
  uint32_t num_out_of_reach = 0;
  /// What two ranges of the owner have between them, up to this, is read along: that takes less time than
  /// another operation.
  uint32_t gap_bytes = 0;
};

/// An endpoint with a way over buffer memory.
class StageableEndpoint : public WrappedEndpoint {
 public:
  using WrappedEndpoint::WrappedEndpoint;
  /// As post_read(), by way of the buffer memory.
  virtual Status post_staged(uint64_t token, const Chunk& chunk) = 0;
};

/// `slot_region` is the buffer memory's, as `inner` numbers it.
Result<std::unique_ptr<StageableEndpoint>> stage_endpoint(std::unique_ptr<Endpoint> inner,
                                                          std::shared_ptr<StagingBuffer> buffer,
                                                          const StagingRules& rules, uint32_t slot_region);

}  // namespace kvlink

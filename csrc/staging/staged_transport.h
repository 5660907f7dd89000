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
#include "staging/staging_policy.h"
#include "transport_api/transport.h"

namespace kvlink {

/// Where, and what copies from there. Any thread.
class Landing {
 public:
  /// `memory` is kept by the caller, or by `keeper`.
  Landing(const MemoryRange& memory, std::shared_ptr<DeviceCopier> copier,
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

struct LandingRules {
  /// So many local regions, the first, are not registered with the inner transport: all that is read into
  /// them lands first. 0: all are, and what lands first is up to Chunk::staged.
  uint32_t num_out_of_reach = 0;
  /// What two ranges of the owner have between them, up to this, is read along: that takes less time than
  /// another operation.
  uint32_t gap_bytes = 0;
  /// What the ways cost, where there is a choice.
  std::shared_ptr<const LandingCosts> costs = nullptr;
};

/// The endpoints of `inner` get a way into the pool over `landing`. It lends the memory of devices when
/// `lends` is ok, and refuses to with that when not. REQUIRES that nothing was registered yet, and that the
/// landing memory will be, as scratch: first where regions are out of reach, else behind all others, so that
/// the pool keeps its numbers and most reads go on as they are. Until then nothing lands there.
std::unique_ptr<Transport> land_through(std::unique_ptr<Transport> inner, std::shared_ptr<Landing> landing,
                                        const LandingRules& rules, Status lends);

/// `slot_region` is the landing memory's, as `inner` numbers it.
Result<std::unique_ptr<Endpoint>> landing_endpoint(std::unique_ptr<Endpoint> inner,
                                                   std::shared_ptr<Landing> landing,
                                                   const LandingRules& rules, uint32_t slot_region);

}  // namespace kvlink

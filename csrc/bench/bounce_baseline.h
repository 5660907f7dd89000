// SPDX-License-Identifier: Apache-2.0
// Times the bounce buffer's copies without a wire.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "device/device_copier.h"
#include "device/gather_kernel.h"
#include "memory/memory_range.h"

namespace kvlink {

/// Times for the same number of bytes. `plain` copies pinned memory by the driver, in pieces as large as
/// possible.
struct BounceTimes {
  int64_t bounced_ns = 0, plain_ns = 0;
};

/// Moves all of a GPU's `memory` through slots, in pieces of `piece_bytes` in random order, with a few slots
/// under way as in a connection. If `to` is the device, the contents of the memory are undefined afterwards.
/// kTransportUnavailable without CUDA.
Result<BounceTimes> time_bounce(const MemoryRange& memory, uint32_t piece_bytes, CopyTo to,
                                std::shared_ptr<const GatherKernel> kernel);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// What the bounce buffer's copies take by themselves, without a wire, for benchmarks.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "device/device_copier.h"
#include "memory/memory_range.h"

namespace kvlink {

/// Of as many bytes. `plain`: by the driver, as large pieces of pinned memory as there are.
struct BounceTimes {
  int64_t bounced_ns = 0, plain_ns = 0;
};

/// Moves all of `memory`, of a GPU, through slots: pieces of `piece_bytes` in an order of their own, a few
/// slots under way as a connection has them. What the memory holds afterwards is of no use when it went
/// `to` the device. kTransportUnavailable without CUDA.
Result<BounceTimes> time_bounce(const MemoryRange& memory, uint32_t piece_bytes, CopyTo to,
                                std::string_view image);

}  // namespace kvlink

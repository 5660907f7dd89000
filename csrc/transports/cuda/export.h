// SPDX-License-Identifier: Apache-2.0
// The owner's side of shared GPU memory: how a region can be given to other processes.
#pragma once

#include "device/cuda_device.h"
#include "memory/memory_range.h"
#include "transports/cuda/protocol.h"
#include "transports/same_host/fd_server.h"

namespace kvlink {

/// The key to a region that `server` exports from now on: the physical allocations where it was mapped from
/// such (kvlink's own pools, torch's expandable segments), else cudaMalloc's handle. Refuses
/// (kTransportUnavailable, reason and fix) memory that CUDA does not share.
Result<CudaKey> export_cuda(const cuda::Device& device, FdServer& server, const MemoryRange& range);

}  // namespace kvlink

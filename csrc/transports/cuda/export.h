// SPDX-License-Identifier: Apache-2.0
// The owner's side of shared GPU memory: exports a region to other processes.
#pragma once

#include "device/cuda_device.h"
#include "memory/memory_range.h"
#include "transports/cuda/protocol.h"
#include "transports/same_host/fd_server.h"

namespace kvlink {

/// Exports a region through `server` and returns its key: its physical allocations if it was mapped from such
/// (kvlink's own pools, torch's expandable segments), else cudaMalloc's handle. Refuses
/// (kTransportUnavailable, reason and fix) memory that CUDA cannot share.
Result<CudaKey> export_cuda(const cuda::Device& device, FdServer& server, const MemoryRange& range);

}  // namespace kvlink

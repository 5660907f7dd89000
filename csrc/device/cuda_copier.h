// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "device/device_copier.h"
#include "device/gather_kernel.h"

namespace kvlink {

/// Makes a copier for the GPU that has `memory`, in its primary context, which is also torch's. See
/// MakeDeviceCopier. `kernel` is loaded into that GPU; without it the driver copies the pieces. `most_blocks`
/// is that of CudaGather.
Result<std::shared_ptr<DeviceCopier>> make_cuda_copier(const std::byte* memory,
                                                       std::shared_ptr<const GatherKernel> kernel,
                                                       uint32_t most_blocks);

}  // namespace kvlink

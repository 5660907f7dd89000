// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "device/device_copier.h"

namespace kvlink {

/// Makes a copier for the GPU that has `memory`, in its primary context, which is also torch's. See
/// MakeDeviceCopier. `image` is gather.cu compiled for that GPU; if empty, pieces are copied one by one.
/// `most_blocks` is that of CudaGather::make.
Result<std::shared_ptr<DeviceCopier>> make_cuda_copier(const std::byte* memory, std::string_view image,
                                                       uint32_t most_blocks);

}  // namespace kvlink

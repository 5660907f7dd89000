// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "device/device_copier.h"

namespace kvlink {

/// Makes a copier for the GPU that has `memory`, in its primary context, which is also torch's. See
/// MakeDeviceCopier. `image` is gather.cu compiled for that GPU; if empty, pieces are copied one by one.
Result<std::shared_ptr<DeviceCopier>> make_cuda_copier(const std::byte* memory, uint32_t num_slots,
                                                       std::string_view image);

}  // namespace kvlink

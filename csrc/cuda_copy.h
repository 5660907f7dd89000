// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device_copy.h"

namespace kvlink {

/// Copies of the GPU that `memory` is on, in its primary context, which is also torch's. See
/// MakeDeviceCopier.
Result<std::shared_ptr<DeviceCopier>> make_cuda_copier(const std::byte* memory);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Handles of the fabric: what CUDA gives for memory that hosts of one NVLink domain may share through IMEX.
// A process that knows such a handle may map the memory, so it travels as the contents of a descriptor, as
// secret as the descriptors of other memory, and not in a key.
#pragma once

#include "base/status.h"
#include "base/unique_fd.h"
#include "device/cuda_api.h"

namespace kvlink {

/// Returns a memfd with the allocation's handle in it. Refuses (kTransportUnavailable, reason and fix) where
/// there is no IMEX channel.
Result<UniqueFd> export_fabric(const cuda::Api& api, cuda::Allocation allocation);
/// Returns the allocation, which the caller releases. Refuses the same, and what is not such a memfd
/// (kAccessDenied).
Result<cuda::Allocation> import_fabric(const cuda::Api& api, int fd);

}  // namespace kvlink

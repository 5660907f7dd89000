// SPDX-License-Identifier: Apache-2.0
// What a GPU does without kvlink: its driver's own copies, for benchmarks to put beside a pull.
#pragma once

#include "base/status.h"
#include "bench/baselines.h"

namespace kvlink {

/// One cuMemcpyAsync a piece, by the GPU that the first piece lands on or comes from, and the wait for all.
/// Returns ns. kTransportUnavailable without CUDA.
Result<int64_t> baseline_cuda_copies(BaselinePieces pieces);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// What this machine does without kvlink: bare copies here, bare sockets in bench/tcp_baseline.h, for
// benchmarks to put beside a pull. Shares no code with the transports, so that a slow transport cannot lower
// the limit it is compared with. Every time is of the bare work alone: lists are prepared before the clock
// starts.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"

namespace kvlink {

/// One contiguous move. `from` is an address of the process that is read, `to` one of this process.
struct BaselinePiece {
  uint64_t from, to, bytes;
};
using BaselinePieces = std::span<const BaselinePiece>;

/// glibc's memcpy, piece after piece. Returns ns.
int64_t baseline_memcpy(BaselinePieces pieces);
/// Non-temporal stores, eight pages in turns. Returns ns.
int64_t baseline_streamed_copy(BaselinePieces pieces);
/// process_vm_readv out of process `pid`, 1,024 pieces a call. Returns ns.
Result<int64_t> baseline_process_vm_readv(int pid, BaselinePieces pieces);
/// One cuMemcpyAsync a piece, by the GPU that the first piece lands on or comes from, and the wait for all.
/// Returns ns. kTransportUnavailable without CUDA.
Result<int64_t> baseline_cuda_copies(BaselinePieces pieces);

}  // namespace kvlink

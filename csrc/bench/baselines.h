// SPDX-License-Identifier: Apache-2.0
// What this machine does without kvlink: bare copies, and bare sockets in bench/tcp_baseline.h. It shares no
// code with the transports, so that a slow transport cannot lower the limit it is compared with. Times cover
// the bare work alone: lists are prepared before the clock starts.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "base/status.h"

namespace kvlink {

/// One contiguous move. `from` is an address of the process that is read, `to` one of this process.
struct BaselinePiece {
  uint64_t from, to, bytes;
};
using BaselinePieces = std::span<const BaselinePiece>;

/// Moves shares of about the same size on `threads` threads, of which the caller is one. `move` gets the
/// number of the share, and returns ns. All begin together. Returns ns from the first beginning until the
/// last end.
Result<int64_t> baseline_at_once(BaselinePieces pieces, size_t threads,
                                 const std::function<Result<int64_t>(size_t, BaselinePieces)>& move);

/// Copies piece after piece by glibc's memcpy. Returns ns.
int64_t baseline_memcpy(BaselinePieces pieces);
/// Copies eight pages in turns by non-temporal stores. Returns ns.
int64_t baseline_streamed_copy(BaselinePieces pieces);
/// Copies out of process `pid` by process_vm_readv, 1,024 pieces a call. Returns ns.
Result<int64_t> baseline_process_vm_readv(int pid, BaselinePieces pieces);
/// Copies each piece by one cuMemcpyAsync of the GPU that the first piece lands on or comes from, and waits
/// for all. Returns ns, or kTransportUnavailable without CUDA.
Result<int64_t> baseline_cuda_copies(BaselinePieces pieces);

}  // namespace kvlink

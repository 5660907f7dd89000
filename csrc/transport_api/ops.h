// SPDX-License-Identifier: Apache-2.0
// What the engine passes to an endpoint and gets back: reads, their conditions and their completions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace kvlink {

/// One local piece that a read scatters into.
struct Segment {
  std::byte* local = nullptr;
  uint32_t bytes = 0;
  uint32_t region = 0;  // index of its local region, in order of registration
};

/// One contiguous range of the owner. It lands in segments [first_segment, first_segment + num_segments),
/// whose bytes add up to `bytes`. No two segments of one transfer overlap.
struct ReadOp {
  uint64_t offset = 0;  // from the start of the remote region
  uint32_t bytes = 0;
  uint32_t region = 0;  // as import_region returned it
  uint32_t first_segment = 0;
  uint32_t num_segments = 0;
};

/// Repeats the reads at another place, because every plane of a cache is laid out like the first.
struct Repeat {
  uint64_t offset = 0;                    // added to ReadOp::offset
  int64_t local = 0;                      // bytes, added to Segment::local
  uint32_t region = 0, local_region = 0;  // instead of the ReadOp's and the Segment's
};

/// Bytes may be sent only while the aligned word at `offset` of the owner's region is `value`.
struct Guard {
  uint64_t offset = 0;
  uint64_t value = 0;  // 0: there is no condition
  uint32_t region = 0;
};

/// The reads of one post_read. The caller keeps the arrays until the completion, cancel() or close().
struct Chunk {
  std::span<const ReadOp> ops;
  const Segment* segments = nullptr;  // ReadOp::first_segment counts from here
  /// Only for endpoints with Traits::supports_repeats. All ops then have the same region, and so do all
  /// segments.
  std::span<const Repeat> repeats = {};
  /// Transports with Capabilities::guards send nothing once it fails, and end the read with kStaleBlocks.
  /// Others ignore it.
  Guard guard = {};
};

struct Completion {
  uint64_t token = 0;
  Status status;
};

struct PollResult {
  Status status;  // not ok: the endpoint is broken for good; every outstanding token is lost with it
  bool progressed = false;  // bytes moved or completions appended since the last call
  /// When to call poll() again while a pull waits and nothing arrives. That call finds out whether the owner
  /// is gone. INT64_MAX: the transport cannot tell a gone owner from a slow one.
  int64_t next_check_ns = INT64_MAX;
};

}  // namespace kvlink

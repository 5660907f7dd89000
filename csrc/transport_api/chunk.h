// SPDX-License-Identifier: Apache-2.0
// Checks that every endpoint makes before it takes a read or a write, and cursors over the pieces of a read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "memory/memory_range.h"
#include "transport_api/ops.h"

namespace kvlink {

/// Points to the next byte of a chunk to move.
struct ChunkCursor {
  uint32_t op = 0, segment = 0;        // segment counts within the op
  uint32_t in_op = 0, in_segment = 0;  // bytes already moved of the op, of the segment

  void advance(const ReadOp& current, const Segment& landing, uint32_t bytes) {
    in_op += bytes;
    in_segment += bytes;
    if (in_segment < landing.bytes) return;
    in_segment = 0;
    if (++segment < current.num_segments) return;
    *this = {.op = op + 1};
  }
};

struct CountingCursor : ChunkCursor {
  uint64_t moved = 0;  // bytes of the whole chunk

  void advance(const ReadOp& current, const Segment& landing, uint32_t bytes) {
    moved += bytes;
    ChunkCursor::advance(current, landing, bytes);
  }
};

/// Visits the pieces from `at` on, at most `budget` bytes: move(op, bytes into the op, local, bytes). Stops
/// before a piece for which `move` returns false.
template <typename Cursor, typename Move>
void walk(const Chunk& chunk, Cursor& at, size_t budget, Move&& move) {
  while (at.op < chunk.ops.size() && budget > 0) {
    const ReadOp& op = chunk.ops[at.op];
    const Segment& segment = chunk.segments[op.first_segment + at.segment];
    const auto bytes = static_cast<uint32_t>(std::min<size_t>(segment.bytes - at.in_segment, budget));
    if (!move(op, at.in_op, segment.local + at.in_segment, bytes)) return;
    budget -= bytes;
    at.advance(op, segment, bytes);
  }
}

/// Advances the cursor without visiting the pieces.
template <typename Cursor>
void skip(const Chunk& chunk, Cursor& at, size_t bytes) {
  walk(chunk, at, bytes, [](auto&&...) { return true; });
}

inline bool fits(uint64_t offset, uint64_t bytes, uint64_t region_bytes) {
  return bytes <= region_bytes && offset <= region_bytes - bytes;
}

Status not_imported(uint32_t region);
Status out_of_bounds(const char* what, uint32_t region, uint64_t offset, uint64_t bytes,
                     uint64_t region_bytes);
Status not_readable(uint32_t region);
Status wrong_segments(const ReadOp& op, uint64_t landing);

/// Returns kConfig unless the segments of `op` are not empty and add up to its bytes. `allowed(segment)`
/// returns whether it may be read into; `refusal` is the reason if not.
template <typename Allowed>
Status check_segments(const ReadOp& op, const Segment* segments, Allowed&& allowed, const char* refusal) {
  uint64_t landing = 0;
  for (uint32_t i = 0; i < op.num_segments; ++i) {
    const Segment& segment = segments[op.first_segment + i];
    if (!allowed(segment)) return Status::Config(refusal);
    if (segment.bytes == 0) return Status::Config("a read has an empty segment");
    landing += segment.bytes;
  }
  if (landing == op.bytes && landing != 0) return {};
  return wrong_segments(op, landing);
}

/// Also returns kAccessDenied for a read that leaves the owner's region `remotes[op.region]`, whose `bytes`
/// and `access` are known.
template <typename Remotes, typename Allowed>
Status check_read(const ReadOp& op, const Segment* segments, const Remotes& remotes, Allowed&& allowed,
                  const char* refusal) {
  if (op.region >= remotes.size()) return not_imported(op.region);
  const auto& remote = remotes[op.region];
  if (remote.access == Access::kWriteWords) return not_readable(op.region);
  if (!fits(op.offset, op.bytes, remote.bytes)) {
    return out_of_bounds("a read", op.region, op.offset, op.bytes, remote.bytes);
  }
  return check_segments(op, segments, allowed, refusal);
}
template <typename Remotes>
Status check_read(const ReadOp& op, const Segment* segments, const Remotes& remotes) {
  return check_read(op, segments, remotes, [](const Segment&) { return true; }, "");
}

/// Returns kAccessDenied for an 8-byte store that leaves its region, is not aligned, or goes to a region that
/// may not be written.
Status check_store(uint64_t offset, uint32_t region, uint64_t region_bytes, Access access);

template <typename Remotes>
Status check_store(uint32_t region, uint64_t offset, const Remotes& remotes) {
  if (region >= remotes.size()) return not_imported(region);
  return check_store(offset, region, remotes[region].bytes, remotes[region].access);
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// What an owner lends, as readers that copy by themselves know it, and the way through what is asked of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/memory_range.h"
#include "transport_api/ops.h"

namespace kvlink {

/// One region of the owner; `address` in whatever space the transport copies from.
struct Remote {
  uint64_t address;
  uint64_t bytes;
  Access access;
};

/// How often a reader that copies by itself asks whether the owner is still there: it costs a system call or
/// two, too much for every slice of a small pull.
inline constexpr int64_t kCheckOwnerNs = 2'000'000;

class Remotes {
 public:
  /// Returns its index.
  uint32_t add(const Remote& remote);
  const Remote& operator[](uint32_t region) const { return remotes_[region]; }

  /// The bytes that `chunk` moves. kAccessDenied or kConfig for what leaves a region or does not add up.
  Result<uint64_t> check_read(const Chunk& chunk) const;
  /// That, and what its repeats move.
  Result<uint64_t> check_repeated(const Chunk& chunk) const;
  /// Of 8 bytes.
  Status check_write(uint32_t region, uint64_t offset) const;

 private:
  Status check(const ReadOp& op, const Segment* segments) const;

  std::vector<Remote> remotes_;
};

/// The next byte of a chunk to move.
struct Cursor {
  uint32_t op = 0, segment = 0;        // segment counts within the op
  uint32_t in_op = 0, in_segment = 0;  // bytes already moved of the op, of the segment
  uint64_t moved = 0;                  // of the whole chunk

  void advance(const ReadOp& current, const Segment& landing, uint32_t bytes) {
    moved += bytes;
    in_op += bytes;
    in_segment += bytes;
    if (in_segment < landing.bytes) return;
    in_segment = 0;
    if (++segment < current.num_segments) return;
    *this = {.op = op + 1, .moved = moved};
  }
};

/// Visits the pieces from `at` on, at most `budget` bytes of them: move(op, bytes into the op, local, bytes).
/// Stops before a piece for which `move` answers false.
template <typename Move>
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

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// A post of a BounceEndpoint, and how it is cut into the parts that are asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "device_copy.h"
#include "transport.h"

namespace kvlink {

/// What is asked for at a time, and where it belongs when it has arrived. Vectors are kept for their
/// capacity.
struct BouncePart {
  std::vector<ReadOp> ops = {};
  std::vector<Segment> segments = {};
  std::vector<CopyPiece> pieces = {};

  void clear();
};

struct BouncePost {
  uint64_t token = 0;
  Chunk chunk = {};     // without operations: a write
  bool staged = false;  // else it goes where the inner endpoint reaches
  uint32_t region = 0;  // of a write
  uint64_t offset = 0, value = 0;
  // The next byte to ask for.
  uint32_t op = 0, segment = 0, in_op = 0, in_segment = 0;
  bool asked = false;  // for all that will be
  uint32_t num_parts = 0;
  Status status = {};

  /// Cuts off as much as `slot` holds, in at most `max_ops` operations. The slot is of the first region.
  void fill(BouncePart& part, std::byte* slot, uint32_t slot_bytes, uint32_t max_ops);
  /// Takes all of what is not staged: the regions behind the pool's `num_regions` follow the first.
  void pass_on(BouncePart& part, uint32_t num_regions);

 private:
  void add_pieces(BouncePart& part, std::byte* host, uint32_t bytes);
};

/// Refuses chunks whose segments do not add up or lie on the device (`staged`: the first `num_regions`) in
/// part.
Status check_bounce(const Chunk& chunk, bool staged, uint32_t num_regions);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// A post of a StagedEndpoint, and how it is split into parts.
#pragma once

#include <cstdint>
#include <vector>

#include "device/device_copier.h"
#include "staging/staged_transport.h"
#include "transport_api/chunk.h"

namespace kvlink {

/// The reads of one part, and where their bytes go after they have arrived. Vectors are kept for their
/// capacity.
struct StagedPart {
  std::vector<ReadOp> ops = {};
  std::vector<Segment> segments = {};
  std::vector<CopyPiece> pieces = {};

  void clear();
  Chunk chunk(const Guard& guard) const { return {.ops = ops, .segments = segments.data(), .guard = guard}; }
};

/// Limits of a part.
struct PartLimits {
  uint32_t ops;        // of the owner's ranges
  uint32_t pieces;     // that are copied from the slot
  uint32_t gap_bytes;  // as StagingRules have it
};

struct StagedPost {
  uint64_t token = 0;
  Chunk chunk = {};     // without operations: a write
  bool lands = false;   // in slots; else it goes where the inner endpoint reaches
  uint32_t region = 0;  // of a write
  uint64_t offset = 0, value = 0;
  ChunkCursor at = {};  // the next byte to ask for
  bool asked = false;   // for all that will be
  uint32_t num_parts = 0;
  Status status = {};

  /// Cuts off as much as `slot` and the limits allow.
  void fill(StagedPart& part, const Segment& slot, const PartLimits& limits);
  /// Takes all reads that do not land in slots. The inner endpoint numbers their regions differently.
  void pass_on(StagedPart& part, uint32_t num_out_of_reach);
};

/// Returns whether its segments are out of reach. Refuses chunks without operations, chunks whose segments do
/// not add up, and chunks that are out of reach in part.
Result<bool> is_out_of_reach(const Chunk& chunk, const StagingRules& rules);

}  // namespace kvlink

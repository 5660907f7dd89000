// SPDX-License-Identifier: Apache-2.0
// Turns block lists and layouts into ReadOps. Pure: no I/O, no clock, no globals. Any thread may run it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "memory/memory_range.h"
#include "plan/token_split.h"
#include "transport_api/ops.h"

namespace kvlink {

/// Where one plane (one layer's K, or V, or both side by side) starts.
struct Plane {
  uint32_t region = 0;  // index among the owner's pool regions (remote side) or local regions (reader side)
  uint32_t layer = 0;
  uint64_t offset = 0;  // bytes from the start of the region to block 0
};

/// The layout of a worker's blocks in memory. One block of one plane holds block_tokens x num_heads rows of
/// row_bytes contiguous bytes. The strides (bytes) say where row (block, token, head) starts:
///   plane.offset + block * block_stride + token * token_stride + (head - first_head) * head_stride
/// so NHD, HND, MLA (one head), cross-layer blocks, and K/V together or apart use the same code. K and V are
/// always two planes; if they are side by side, V starts row_bytes after K.
struct Layout {
  uint32_t num_blocks = 0;
  uint32_t block_tokens = 0;
  uint32_t first_head = 0;  // of the model's KV heads, the first that this worker holds
  uint32_t num_heads = 0;   // how many it holds
  uint32_t row_bytes = 0;   // head_dim x dtype size
  uint64_t block_stride = 0, token_stride = 0, head_stride = 0;
  std::vector<Plane> planes;  // in model order; both ends list the same planes
  TokenSplit tokens{};
};

/// A half-open range; {0, UINT32_MAX} means everything.
struct Range {
  uint32_t begin = 0;
  uint32_t end = UINT32_MAX;
};

/// The part of a request that one plan covers.
struct PlanScope {
  Range tokens;  // positions in the request, counted over the block lists from their first block
  Range layers;
  bool fold = false;  // planes laid out as the first at both ends may become Plan::repeats
};

struct Plan {
  std::vector<ReadOp> ops;
  std::vector<Segment> segments;
  std::vector<Repeat> repeats;  // of all that is above
  uint64_t bytes = 0;           // repeats included

  void clear() {
    ops.clear();
    segments.clear();
    repeats.clear();
    bytes = 0;
  }
};

/// One plane as both ends see it.
struct PlanePair {
  uint32_t layer, remote_region, local_region;
  uint64_t remote;
  std::byte* local;
};

/// Planes that share the owner's blocks (cross-layer, K beside V), so that one read may serve several.
struct Group {
  uint32_t first, count;
  bool interleaved;  // their rows alternate within a block
  bool like_first;   // the first group, moved as a whole at both ends
};

/// Planes in the owner's address order, and their groups.
struct Arrangement {
  std::vector<PlanePair> planes;
  std::vector<Group> groups;
  bool all_alike = false;  // every group but the first is like it
};

class Writer;
struct Pieces;

/// Plans reads from one owner into one reader. Immutable after make().
class Planner final {
 public:
  /// Checks both layouts (positive sizes, strides that fit, planes inside their regions, equal planes and
  /// row_bytes, overlapping heads) and refuses with the field that differs.
  /// `local_regions` are the reader's registered ranges; `remote_region_bytes` the owner's region sizes;
  /// `remote_region_index` maps the owner's region numbers to what Endpoint::import_region returned.
  /// `heads` limits the model heads taken from this owner (a reader may take each head from one owner only).
  static Result<std::shared_ptr<const Planner>> make(Layout reader, Layout owner,
                                                     std::vector<MemoryRange> local_regions,
                                                     std::vector<uint64_t> remote_region_bytes,
                                                     std::vector<uint32_t> remote_region_index, Range heads);

  /// Owner and reader block ids each cover their worker's part of the request's tokens from position 0 on;
  /// the last block of either may be partial. Replaces `into` and reuses its memory; on failure it is empty.
  /// Refuses what check() refuses. Ops never exceed kMaxOpBytes nor kMaxOpSegments. Merges runs that are
  /// contiguous at the owner. An open token range ends where the shorter list does.
  Status plan(std::span<const uint32_t> owner_blocks, std::span<const uint32_t> reader_blocks,
              const PlanScope& scope, Plan& into) const;

  /// Refuses ids out of range and a reader block named twice, among the blocks of the scope; lists too short
  /// for its tokens; layers beyond the last. A pull that plans scope by scope checks its whole once.
  Status check(std::span<const uint32_t> owner_blocks, std::span<const uint32_t> reader_blocks,
               const PlanScope& scope) const;

  /// Returns the bytes that `plan` would move for that many tokens, without planning; UINT64_MAX on overflow.
  /// Where the ends do not hold all of the tokens it is an upper bound.
  uint64_t bytes(uint64_t num_tokens, Range layers) const;
  /// Returns the highest layer among the planes, plus one.
  uint32_t num_layers() const { return num_layers_; }
  /// Returns the tokens of the request that stand in the first so many of the owner's blocks, or at other
  /// ranks.
  uint64_t tokens_in(uint64_t num_owner_blocks) const {
    return owner_.tokens.position_of(num_owner_blocks * owner_.block_tokens);
  }

  static constexpr uint32_t kMaxOpBytes = 1 << 20;
  static constexpr uint32_t kMaxOpSegments = 256;

 private:
  Planner(Layout reader, Layout owner, const std::vector<MemoryRange>& local_regions,
          const std::vector<uint32_t>& remote_region_index, Range heads);
  template <typename Cuts>
  void plan_spans(const Cuts& spans, uint32_t num_tokens, const PlanScope& scope, Plan& into) const;
  Range closed(Range tokens, uint64_t num_owner_blocks, uint64_t num_reader_blocks) const;
  uint64_t token_bytes() const;
  Pieces pieces_of(uint32_t tokens) const;
  double num_spans(uint32_t tokens) const;
  double most_segments(uint32_t tokens) const;
  Arrangement arrange_in_blocks(std::vector<PlanePair> planes) const;
  Arrangement of_layers(Range layers) const;
  template <typename Cuts>
  size_t write(const Arrangement& made, const Cuts& spans, uint32_t tokens, bool fold, Plan& into) const;
  template <typename Cuts>
  void write_group(std::span<const PlanePair> planes, bool interleaved, Cuts spans, Writer& writer) const;

  Layout reader_, owner_;
  uint32_t num_heads_;
  uint32_t num_layers_ = 0;
  std::vector<std::pair<uint32_t, uint32_t>> overlaid_;  // layers that must not be in one pull
  double usual_pieces_ = 0, most_pieces_ = 0;            // of one span of one plane
  Arrangement all_;
};

}  // namespace kvlink

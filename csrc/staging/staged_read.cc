// SPDX-License-Identifier: Apache-2.0
#include "staging/staged_read.h"

#include <algorithm>
#include <span>

namespace kvlink {
namespace {

constexpr const char* kMixed = "a read has destinations on a device and elsewhere";
constexpr uint32_t kFirstInReach = 1;  // as the inner endpoint numbers it: 0 are the slots

std::span<const Segment> segments_of(const Chunk& chunk, const ReadOp& op) {
  return {chunk.segments + op.first_segment, op.num_segments};
}

/// Returns the gap between the part's last range and `offset`, or UINT32_MAX if that begins another range.
uint32_t gap_before(const StagedPart& part, uint32_t region, uint64_t offset, uint32_t most) {
  if (part.ops.empty() || part.ops.back().region != region) return UINT32_MAX;
  const uint64_t end = part.ops.back().offset + part.ops.back().bytes;
  return offset >= end && offset - end <= most ? static_cast<uint32_t>(offset - end) : UINT32_MAX;
}

bool goes_on(const StagedPart& part, const std::byte* device, const std::byte* slot) {
  if (part.pieces.empty()) return false;
  const CopyPiece& last = part.pieces.back();
  return last.device + last.bytes == device && last.slot + last.bytes == slot;
}

}  // namespace

void StagedPart::clear() {
  ops.clear();
  segments.clear();
  pieces.clear();
}

void StagedPost::fill(StagedPart& part, const Segment& slot, const PartLimits& limits) {
  uint32_t used = 0;
  while (!asked) {
    const ReadOp& from = chunk.ops[at.op];
    const Segment& to = chunk.segments[from.first_segment + at.segment];
    const uint64_t offset = from.offset + at.in_op;
    std::byte* const device = to.local + at.in_segment;
    const uint32_t gap = gap_before(part, from.region, offset, limits.gap_bytes);
    const bool same_range = gap != UINT32_MAX;
    const uint32_t along = same_range ? gap : 0;
    if (used + along >= slot.bytes || (!same_range && part.ops.size() == limits.ops)) return;
    const uint32_t bytes = std::min(to.bytes - at.in_segment, slot.bytes - used - along);
    std::byte* const place = slot.local + used + along;
    const bool same_piece = goes_on(part, device, place);
    if (!same_piece && part.pieces.size() == limits.pieces) return;

    if (same_range) {
      part.ops.back().bytes += along + bytes;
      part.segments.back().bytes += along + bytes;
    } else {
      const auto first_segment = static_cast<uint32_t>(part.segments.size());
      part.ops.push_back({offset, bytes, from.region, first_segment, 1});
      part.segments.push_back({place, bytes, slot.region});
    }
    if (same_piece) {
      part.pieces.back().bytes += bytes;
    } else {
      part.pieces.push_back({device, place, bytes});
    }
    used += along + bytes;
    at.advance(from, to, bytes);
    asked = at.op == chunk.ops.size();
  }
}

void StagedPost::pass_on(StagedPart& part, uint32_t num_out_of_reach) {
  asked = true;
  for (ReadOp from : chunk.ops) {
    const std::span<const Segment> segments = segments_of(chunk, from);
    from.first_segment = static_cast<uint32_t>(part.segments.size());
    part.ops.push_back(from);
    for (const Segment& to : segments) {
      part.segments.push_back({to.local, to.bytes, to.region - num_out_of_reach + kFirstInReach});
    }
  }
}

Result<bool> is_out_of_reach(const Chunk& chunk, const StagingRules& rules) {
  if (chunk.ops.empty()) return Status::Config("a read has no operations");
  if (chunk.ops.front().num_segments == 0) return wrong_segments(chunk.ops.front(), 0);
  const bool out_of_reach = rules.out_of_reach(chunk.segments[chunk.ops.front().first_segment].region);
  const auto alike = [&](const Segment& to) { return out_of_reach == rules.out_of_reach(to.region); };
  for (const ReadOp& op : chunk.ops) {
    if (Status status = check_segments(op, chunk.segments, alike, kMixed); !status.ok()) return status;
  }
  return out_of_reach;
}

}  // namespace kvlink

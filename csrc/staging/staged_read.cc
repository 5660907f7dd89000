// SPDX-License-Identifier: Apache-2.0
#include "staging/staged_read.h"

#include <algorithm>
#include <span>

namespace kvlink {
namespace {

constexpr uint32_t kFirstInReach = 1;  // as the inner endpoint numbers it: 0 are the slots

std::span<const Segment> segments_of(const Chunk& chunk, const ReadOp& op) {
  return {chunk.segments + op.first_segment, op.num_segments};
}

/// How much of a gap lies between the part's last range and `offset`; UINT32_MAX: it is another range.
uint32_t gap_before(const LandingPart& part, uint32_t region, uint64_t offset, uint32_t most) {
  if (part.ops.empty() || part.ops.back().region != region) return UINT32_MAX;
  const uint64_t end = part.ops.back().offset + part.ops.back().bytes;
  return offset >= end && offset - end <= most ? static_cast<uint32_t>(offset - end) : UINT32_MAX;
}

bool goes_on(const LandingPart& part, const std::byte* device, const std::byte* slot) {
  if (part.pieces.empty()) return false;
  const CopyPiece& last = part.pieces.back();
  return last.device + last.bytes == device && last.slot + last.bytes == slot;
}

}  // namespace

void LandingPart::clear() {
  ops.clear();
  segments.clear();
  pieces.clear();
}

void LandingPost::fill(LandingPart& part, const Segment& slot, const PartLimits& limits) {
  uint32_t used = 0;
  while (!asked) {
    const ReadOp& from = chunk.ops[op];
    const Segment& to = segments_of(chunk, from)[segment];
    if (to.bytes == 0) {
      advance(0);
      continue;
    }
    const uint64_t offset = from.offset + in_op;
    std::byte* const device = to.local + in_segment;
    const uint32_t gap = gap_before(part, from.region, offset, limits.gap_bytes);
    const bool same_range = gap != UINT32_MAX;
    const uint32_t along = same_range ? gap : 0;
    if (used + along >= slot.bytes || (!same_range && part.ops.size() == limits.ops)) return;
    const uint32_t bytes = std::min(to.bytes - in_segment, slot.bytes - used - along);
    std::byte* const at = slot.local + used + along;
    const bool same_piece = goes_on(part, device, at);
    if (!same_piece && part.pieces.size() == limits.pieces) return;

    if (same_range) {
      part.ops.back().bytes += along + bytes;
      part.segments.back().bytes += along + bytes;
    } else {
      const auto first_segment = static_cast<uint32_t>(part.segments.size());
      part.ops.push_back({offset, bytes, from.region, first_segment, 1});
      part.segments.push_back({at, bytes, slot.region});
    }
    if (same_piece) {
      part.pieces.back().bytes += bytes;
    } else {
      part.pieces.push_back({device, at, bytes});
    }
    used += along + bytes;
    advance(bytes);
  }
}

void LandingPost::advance(uint32_t bytes) {
  const std::span<const Segment> segments = segments_of(chunk, chunk.ops[op]);
  in_op += bytes;
  in_segment += bytes;
  while (segment < segments.size() && in_segment == segments[segment].bytes) {  // empty ones, too
    in_segment = 0;
    ++segment;
  }
  if (segment < segments.size()) return;
  in_op = segment = 0;
  asked = ++op == chunk.ops.size();
}

void LandingPost::pass_on(LandingPart& part, uint32_t num_out_of_reach) {
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

Result<bool> lands_out_of_reach(const Chunk& chunk, uint32_t num_out_of_reach) {
  if (chunk.ops.empty()) return Status::Config("a read asks for nothing");
  if (chunk.ops.front().num_segments == 0) return Status::Config("a read goes nowhere");
  const bool out_of_reach = chunk.segments[chunk.ops.front().first_segment].region < num_out_of_reach;
  for (const ReadOp& op : chunk.ops) {
    uint64_t bytes = 0;
    for (const Segment& to : segments_of(chunk, op)) {
      bytes += to.bytes;
      if (out_of_reach != (to.region < num_out_of_reach)) {
        return Status::Config("a read goes to a device and elsewhere");
      }
    }
    if (bytes != op.bytes || bytes == 0) {
      return Status::Config("the segments of a read do not add up to its bytes");
    }
  }
  return out_of_reach;
}

}  // namespace kvlink

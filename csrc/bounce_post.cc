// SPDX-License-Identifier: Apache-2.0
#include "bounce_post.h"

#include <algorithm>
#include <span>

namespace kvlink {
namespace {

constexpr uint32_t kSlotRegion = 0, kFirstBehindIt = 1;  // as the inner endpoint numbers them

std::span<const Segment> segments_of(const Chunk& chunk, const ReadOp& op) {
  return {chunk.segments + op.first_segment, op.num_segments};
}

}  // namespace

void BouncePart::clear() {
  ops.clear();
  segments.clear();
  pieces.clear();
}

void BouncePost::fill(BouncePart& part, std::byte* slot, uint32_t slot_bytes, uint32_t max_ops) {
  uint32_t used = 0;
  while (!asked && used < slot_bytes && part.ops.size() < max_ops) {
    const ReadOp& from = chunk.ops[op];
    const uint32_t bytes = std::min(from.bytes - in_op, slot_bytes - used);
    const auto first_segment = static_cast<uint32_t>(part.segments.size());
    part.ops.push_back({from.offset + in_op, bytes, from.region, first_segment, 1});
    part.segments.push_back({slot + used, bytes, kSlotRegion});
    add_pieces(part, slot + used, bytes);
    used += bytes;
    in_op += bytes;
    if (in_op < from.bytes) return;
    in_op = segment = 0;
    asked = ++op == chunk.ops.size();
  }
}

/// Where the next `bytes` of the operation belong. What follows on at both ends is one copy.
void BouncePost::add_pieces(BouncePart& part, std::byte* host, uint32_t bytes) {
  const std::span<const Segment> segments = segments_of(chunk, chunk.ops[op]);
  while (bytes > 0) {
    const Segment& to = segments[segment];
    const uint32_t piece = std::min(to.bytes - in_segment, bytes);
    std::byte* const device = to.local + in_segment;
    CopyPiece* const last = part.pieces.empty() ? nullptr : &part.pieces.back();
    if (last && last->device + last->bytes == device) {  // at the host's end they always do
      last->bytes += piece;
    } else if (piece > 0) {
      part.pieces.push_back({device, host, piece});
    }
    host += piece;
    bytes -= piece;
    in_segment += piece;
    if (in_segment < to.bytes) continue;
    in_segment = 0;
    ++segment;
  }
}

void BouncePost::pass_on(BouncePart& part, uint32_t num_regions) {
  asked = true;
  for (ReadOp from : chunk.ops) {
    const std::span<const Segment> segments = segments_of(chunk, from);
    from.first_segment = static_cast<uint32_t>(part.segments.size());
    part.ops.push_back(from);
    for (const Segment& to : segments) {
      part.segments.push_back({to.local, to.bytes, to.region - num_regions + kFirstBehindIt});
    }
  }
}

Status check_bounce(const Chunk& chunk, bool staged, uint32_t num_regions) {
  for (const ReadOp& op : chunk.ops) {
    uint64_t bytes = 0;
    for (const Segment& to : segments_of(chunk, op)) {
      bytes += to.bytes;
      if (staged != (to.region < num_regions)) return Status::Config("a read goes to a device and elsewhere");
    }
    if (bytes != op.bytes || bytes == 0) {
      return Status::Config("the segments of a read do not add up to its bytes");
    }
  }
  return {};
}

}  // namespace kvlink

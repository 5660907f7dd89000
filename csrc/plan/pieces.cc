// SPDX-License-Identifier: Apache-2.0
#include "plan/pieces.h"

#include <algorithm>

namespace kvlink {
namespace {

bool goes_on(const ReadOp& op, const ReadPiece& piece) {
  return op.region == piece.remote_region && op.offset + op.bytes == piece.remote &&
         op.bytes < Planner::kMaxOpBytes;
}

bool goes_on(const Segment& last, const ReadPiece& piece) {
  return last.region == piece.local_region && last.local + last.bytes == piece.local;
}

/// Adds the first part of the piece, and returns its bytes.
uint32_t add_part(const ReadPiece& piece, Plan& plan) {
  const bool new_op = plan.ops.empty() || !goes_on(plan.ops.back(), piece);
  const bool same_segment = !new_op && goes_on(plan.segments.back(), piece);
  if (new_op || (!same_segment && plan.ops.back().num_segments == Planner::kMaxOpSegments)) {
    plan.ops.push_back(
        {piece.remote, 0, piece.remote_region, static_cast<uint32_t>(plan.segments.size()), 0});
  }
  ReadOp& op = plan.ops.back();
  const auto bytes = static_cast<uint32_t>(std::min<uint64_t>(piece.bytes, Planner::kMaxOpBytes - op.bytes));
  if (same_segment) {
    plan.segments.back().bytes += bytes;
  } else {
    plan.segments.push_back({piece.local, bytes, piece.local_region});
    ++op.num_segments;
  }
  op.bytes += bytes;
  return bytes;
}

}  // namespace

std::shared_ptr<const Plan> plan_pieces(std::span<const ReadPiece> pieces) {
  auto plan = std::make_shared<Plan>();
  plan->ops.reserve(pieces.size());
  plan->segments.reserve(pieces.size());
  for (ReadPiece piece : pieces) {
    plan->bytes += piece.bytes;
    while (piece.bytes > 0) {
      const uint32_t bytes = add_part(piece, *plan);
      piece.remote += bytes;
      piece.local += bytes;
      piece.bytes -= bytes;
    }
  }
  return plan;
}

}  // namespace kvlink

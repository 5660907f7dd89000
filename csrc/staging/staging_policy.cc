// SPDX-License-Identifier: Apache-2.0
#include "staging/staging_policy.h"

#include <algorithm>

namespace kvlink {
namespace {

constexpr double kGib = 1 << 30;

double moving_us(const WayCost& cost, const ReadShape& shape) {
  return static_cast<double>(shape.bytes) / (cost.gib_per_s * kGib) * 1e6;
}

double predict_us(const WayCost& cost, const ReadShape& shape) {
  return cost.start_us + std::max({moving_us(cost, shape), static_cast<double>(shape.ops) * cost.op_ns / 1e3,
                                   static_cast<double>(shape.pieces) * cost.piece_ns / 1e3});
}

}  // namespace

ReadShape staged_shape(std::span<const ReadOp> ops, uint64_t num_pieces, uint32_t gap_bytes) {
  ReadShape shape{.pieces = num_pieces};
  const ReadOp* last = nullptr;
  for (const ReadOp& op : ops) {
    const uint64_t end = last ? last->offset + last->bytes : 0;
    const bool goes_on =
        last && op.region == last->region && op.offset >= end && op.offset - end <= gap_bytes;
    shape.ops += !goes_on;
    shape.bytes += op.bytes + (goes_on ? op.offset - end : 0);
    last = &op;
  }
  return shape;
}

StagingPolicy::Choice StagingPolicy::choose(std::span<const ReadOp> ops, uint64_t num_pieces,
                                            uint64_t num_bytes) const {
  const ReadShape shape{ops.size(), num_pieces, num_bytes};
  Choice choice;
  const double direct_us = predict_us(costs_.direct, shape);
  const bool bound_by_bytes = direct_us <= costs_.direct.start_us + moving_us(costs_.direct, shape);
  const bool looks = costs_.always || !bound_by_bytes;
  const double staged_us =
      predict_us(costs_.staged, looks ? staged_shape(ops, num_pieces, gap_bytes_) : shape);
  {
    std::lock_guard lock(mutex_);
    choice.predicted = {direct_us * seen_[0].scale, staged_us * seen_[1].scale};
  }
  choice.staged = costs_.always || (looks && choice.predicted.staged_us < choice.predicted.direct_us);
  choice.unscaled_us = choice.staged ? staged_us : direct_us;
  return choice;
}

void StagingPolicy::learn(const Choice& choice, double took_us) {
  std::lock_guard lock(mutex_);
  if (choice.unscaled_us > 0) seen_[choice.staged].add(took_us / choice.unscaled_us);
  Seen& other = seen_[!choice.staged];
  if (++other.unused == kForgotten) other = {};
}

void StagingPolicy::Seen::add(double ratio) {
  unused = 0;
  if (ratios.size() < kSamples) {
    ratios.push_back(ratio);
  } else {
    ratios[next] = ratio;
    next = (next + 1) % kSamples;
  }
  if (ratios.size() < kEnough) return;
  std::vector<double> sorted = ratios;
  const auto middle = sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  scale = *middle;
}

}  // namespace kvlink

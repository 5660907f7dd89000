// SPDX-License-Identifier: Apache-2.0
#include "engine/cost_model.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvlink {
namespace {

uint32_t key_of(uint64_t ops, uint64_t bytes) {
  return static_cast<uint32_t>(std::bit_width(bytes) << 8 | std::bit_width(ops));
}

}  // namespace

const CostModel::Shape* CostModel::find(uint32_t key) const {
  const auto found = std::ranges::find(shapes_, key, &Shape::key);
  return found == shapes_.end() ? nullptr : &*found;
}

double CostModel::predict_us(uint64_t ops, uint64_t bytes) const {
  const double prior = prior_.predict_us(ops, bytes);
  if (const Shape* const known = find(key_of(ops, bytes))) return prior * known->ratio;
  if (shapes_.empty()) return prior;
  return shapes_.size() == 1 ? prior * shapes_.front().ratio : along_line_us(ops, bytes);
}

/// Least squares of relative errors over the typical pull of each shape. The cost of operations stays the
/// prior's, since most shapes have operations of one size, which says nothing about it.
double CostModel::along_line_us(uint64_t ops, uint64_t bytes) const {
  double weights = 0, by_x = 0, by_xx = 0, by_y = 0, by_xy = 0;
  for (const Shape& shape : shapes_) {
    const double took = shape.ratio * prior_.predict_us(shape.ops, shape.bytes);
    const double x = static_cast<double>(shape.bytes);
    const double y = took - static_cast<double>(shape.ops) * prior_.op_ns / 1e3;
    const double weight = 1 / (took * took);
    weights += weight;
    by_x += weight * x;
    by_xx += weight * x * x;
    by_y += weight * y;
    by_xy += weight * x * y;
  }
  const double spread = weights * by_xx - by_x * by_x;
  const double slope = (weights * by_xy - by_x * by_y) / spread;
  const double offset = (by_y - slope * by_x) / weights;
  if (std::isfinite(slope) && slope >= 0 && offset >= 0) {
    return offset + slope * static_cast<double>(bytes) + static_cast<double>(ops) * prior_.op_ns / 1e3;
  }
  const auto distance = [bytes](const Shape& shape) {
    return std::abs(static_cast<int>(std::bit_width(shape.bytes)) - static_cast<int>(std::bit_width(bytes)));
  };
  return prior_.predict_us(ops, bytes) * std::ranges::min(shapes_, {}, distance).ratio;
}

void CostModel::learn(uint64_t ops, uint64_t bytes, double took_us) {
  const uint32_t key = key_of(ops, bytes);
  const auto found = std::ranges::find(shapes_, key, &Shape::key);
  if (found == shapes_.end()) {
    if (shapes_.size() == kShapes) shapes_.pop_back();
    shapes_.insert(shapes_.begin(), Shape{.key = key});
  } else {
    std::rotate(shapes_.begin(), found, found + 1);
  }
  Shape& shape = shapes_.front();
  shape.bytes = bytes;
  shape.ops = ops;
  shape.ratios[shape.num_seen++ % kSamples] = took_us / prior_.predict_us(ops, bytes);
  std::array<double, kSamples> seen = shape.ratios;
  const size_t num_seen = std::min<size_t>(shape.num_seen, kSamples);
  const auto middle = seen.begin() + static_cast<ptrdiff_t>((num_seen - 1) / 2);
  std::nth_element(seen.begin(), middle, seen.begin() + static_cast<ptrdiff_t>(num_seen));
  shape.ratio = *middle;
}

}  // namespace kvlink

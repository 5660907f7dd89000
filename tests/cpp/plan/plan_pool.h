// SPDX-License-Identifier: Apache-2.0
// Layouts with memory behind them, named and random ones, for the planner's tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "plan/planner.h"

namespace kvlink::plan_tests {

using Bytes = std::vector<std::byte>;
using Ids = std::vector<uint32_t>;

/// A layout and the memory it needs: regions of equal size.
struct Placement {
  Layout layout;
  size_t num_regions;
  uint64_t region_bytes;
};

/// With its memory: the regions lie back to back, so that reads and segments are tempted to cross them.
struct Pool : Placement {
  Pool(Placement placement)
      : Placement(std::move(placement)), memory(num_regions * region_bytes) {}  // NOLINT

  Bytes memory;

  std::byte* region(uint32_t index) { return memory.data() + index * region_bytes; }
  std::byte* row(const Plane& plane, uint32_t block, uint32_t token, uint32_t head) {
    return region(plane.region) + plane.offset + block * layout.block_stride + token * layout.token_stride +
           (head - layout.first_head) * layout.head_stride;
  }
  std::vector<MemoryRange> ranges() {
    std::vector<MemoryRange> ranges;
    for (uint32_t i = 0; i < num_regions; ++i) ranges.push_back({region(i), region_bytes});
    return ranges;
  }
  std::vector<uint64_t> sizes() const { return std::vector<uint64_t>(num_regions, region_bytes); }
};

inline Result<std::shared_ptr<const Planner>> make(Pool& reader, const Pool& owner, Range heads = {}) {
  Ids identity(owner.num_regions);
  std::iota(identity.begin(), identity.end(), 0);
  return Planner::make(reader.layout, owner.layout, reader.ranges(), owner.sizes(), identity, heads);
}

inline std::shared_ptr<const Planner> must_make(Pool& reader, const Pool& owner, Range heads = {}) {
  auto made = make(reader, owner, heads);
  EXPECT_TRUE(made.ok()) << made.status().what();
  return *made;
}

struct Shape {
  uint32_t num_blocks = 8, block_tokens = 4, first_head = 0, num_heads = 2, row_bytes = 8, num_layers = 3,
           planes_per_layer = 2;
};

enum Axis : uint8_t { kLayer, kKv, kBlock, kToken, kHead };

/// Nests the axes, outermost first; layers and K/V may have regions of their own instead.
template <typename Padding>
Placement place(const Shape& shape, const std::vector<Axis>& order, bool split_layers, bool split_kv,
                Padding padding) {
  const uint32_t counts[] = {shape.num_layers, shape.planes_per_layer, shape.num_blocks, shape.block_tokens,
                             shape.num_heads};
  uint64_t strides[5] = {}, extent = shape.row_bytes;
  for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
    if ((*axis == kLayer && split_layers) || (*axis == kKv && split_kv)) continue;
    strides[*axis] = extent + padding();
    extent = strides[*axis] * counts[*axis];
  }
  Layout layout{shape.num_blocks, shape.block_tokens, shape.first_head,
                shape.num_heads,  shape.row_bytes,    strides[kBlock],
                strides[kToken],  strides[kHead],     {}};
  const uint64_t lead = padding();
  for (uint32_t layer = 0; layer < shape.num_layers; ++layer) {
    for (uint32_t kv = 0; kv < shape.planes_per_layer; ++kv) {
      const uint32_t region =
          (split_layers ? layer : 0) * (split_kv ? shape.planes_per_layer : 1) + (split_kv ? kv : 0);
      layout.planes.push_back({region, layer, lead + layer * strides[kLayer] + kv * strides[kKv]});
    }
  }
  return {layout, layout.planes.back().region + size_t{1}, lead + extent};
}

inline Placement packed(const Shape& shape, const std::vector<Axis>& order, bool split_layers = false,
                        bool split_kv = false) {
  return place(shape, order, split_layers, split_kv, [] { return 0; });
}

inline const std::vector<Axis> kNhd = {kLayer, kKv, kBlock, kToken, kHead};
inline const std::vector<Axis> kHnd = {kLayer, kKv, kBlock, kHead, kToken};
inline const std::vector<Axis> kCrossLayer = {kBlock, kLayer, kKv, kHead, kToken};
inline const std::vector<Axis> kPairs = {kLayer, kBlock, kKv, kToken, kHead};
inline const std::vector<Axis> kSideBySide = {kLayer, kBlock, kHead, kToken, kKv};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint32_t between(uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(engine_);
  }
  bool coin() { return between(0, 1) == 1; }
  Ids distinct(uint32_t count, uint32_t below) {
    Ids ids(below);
    std::iota(ids.begin(), ids.end(), 0);
    if (coin()) std::shuffle(ids.begin(), ids.end(), engine_);
    ids.resize(count);
    return ids;
  }
  Pool pool(const Shape& shape) {
    std::vector<Axis> order = kNhd;
    std::shuffle(order.begin(), order.end(), engine_);
    const bool padded = coin();
    Pool pool = place(shape, order, coin(), coin(), [&] { return padded && coin() ? between(0, 9) : 0; });
    if (coin()) shuffle_planes(pool.layout.planes);
    for (std::byte& byte : pool.memory) byte = static_cast<std::byte>(engine_());
    return pool;
  }

 private:
  void shuffle_planes(std::vector<Plane>& planes) {
    for (uint32_t i = 0; i < planes.size(); ++i) {
      Plane& other = planes[between(0, i)];
      std::swap(planes[i].region, other.region);
      std::swap(planes[i].offset, other.offset);
    }
  }

  std::mt19937_64 engine_;
};

}  // namespace kvlink::plan_tests

// SPDX-License-Identifier: Apache-2.0
#include "plan/layout_check.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace kvlink {
namespace {

struct Dimension {
  const char* name;
  uint32_t count;
  uint64_t stride;
};

/// Orders dimensions by stride, widest first. Dimensions of one element do not matter and go last.
std::array<Dimension, 3> dimensions(const Layout& layout) {
  std::array<Dimension, 3> dims{{{"block_stride", layout.num_blocks, layout.block_stride},
                                 {"token_stride", layout.block_tokens, layout.token_stride},
                                 {"head_stride", layout.num_heads, layout.head_stride}}};
  for (Dimension& dim : dims) {
    if (dim.count == 1) dim.stride = 0;
  }
  std::stable_sort(dims.begin(), dims.end(), [](auto& a, auto& b) { return a.stride > b.stride; });
  return dims;
}

Status refuse(std::string_view who, const std::string& what) {
  return Status::Config(std::string(who) + ": " + what);
}

/// Returns the bytes from the first row of a plane to the end of its last.
Result<uint64_t> extent_of(const Layout& layout, std::string_view who) {
  auto dims = dimensions(layout);
  uint64_t extent = layout.row_bytes;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    if (dim->count == 1) continue;
    if (dim->stride < extent) {
      return refuse(who, std::string(dim->name) + " is " + std::to_string(dim->stride) +
                             " but what it steps over has " + std::to_string(extent) + " bytes");
    }
    uint64_t steps;
    if (__builtin_mul_overflow(dim->stride, dim->count - 1, &steps) ||
        __builtin_add_overflow(steps, extent, &extent)) {
      return refuse(who, std::string(dim->name) + " overflows");
    }
  }
  return extent;
}

Status check_counts(const Layout& layout, std::string_view who) {
  const std::pair<const char*, uint64_t> counts[] = {
      {"num_blocks", layout.num_blocks}, {"block_tokens", layout.block_tokens},
      {"num_heads", layout.num_heads},   {"row_bytes", layout.row_bytes},
      {"planes", layout.planes.size()},
  };
  for (auto [name, count] : counts) {
    if (count == 0) return refuse(who, std::string(name) + " must not be 0");
  }
  if (layout.num_heads > UINT32_MAX - layout.first_head)
    return refuse(who, "first_head + num_heads overflows");
  const TokenSplit& tokens = layout.tokens;
  if (tokens.interleave == 0 || tokens.rank >= tokens.size || tokens.size > TokenSplit::kMaxSize)
    return refuse(who, "tokens: rank " + std::to_string(tokens.rank) + " of " + std::to_string(tokens.size) +
                           " ranks, " + std::to_string(tokens.interleave) +
                           " at a time, is no share of them");
  return {};
}

/// Returns whether a row `distance` bytes further on, or any row that the dimensions from `at` on lead to,
/// shares bytes with this one. Each dimension spans less than one step of the wider ones, so only two steps
/// can come close.
bool rows_touch(int64_t distance, const std::array<Dimension, 3>& dims, size_t at, int64_t row_bytes) {
  if (at == dims.size() || dims[at].count == 1) return std::abs(distance) < row_bytes;
  const int64_t stride = static_cast<int64_t>(dims[at].stride);
  const int64_t last = dims[at].count - 1;
  const int64_t below = distance / stride - (distance < 0 ? 1 : 0);
  for (int64_t steps : {std::clamp(below, -last, last), std::clamp(below + 1, -last, last)}) {
    if (rows_touch(distance - steps * stride, dims, at + 1, row_bytes)) return true;
  }
  return false;
}

}  // namespace

Status check_layout(const Layout& layout, std::string_view who, std::span<const uint64_t> region_bytes) {
  if (Status counts = check_counts(layout, who); !counts.ok()) return counts;
  Result<uint64_t> extent = extent_of(layout, who);
  if (!extent.ok()) return extent.status();
  for (size_t i = 0; i < layout.planes.size(); ++i) {
    const Plane& plane = layout.planes[i];
    const std::string name = "planes[" + std::to_string(i) + "]";
    if (plane.layer == UINT32_MAX) return refuse(who, name + ".layer is out of range");
    if (plane.region >= region_bytes.size()) {
      return refuse(who, name + ".region is " + std::to_string(plane.region) + " but there are " +
                             std::to_string(region_bytes.size()) + " regions");
    }
    const uint64_t bytes = region_bytes[plane.region];
    if (bytes > INT64_MAX || plane.offset > bytes || *extent > bytes - plane.offset) {
      return refuse(who, name + " at offset " + std::to_string(plane.offset) + " needs " +
                             std::to_string(*extent) + " bytes, region " + std::to_string(plane.region) +
                             " has " + std::to_string(bytes));
    }
  }
  return {};
}

Status check_planes_apart(const Layout& layout, std::string_view who) {
  const uint64_t extent = *extent_of(layout, who);
  const auto dims = dimensions(layout);
  std::vector<Plane> planes = layout.planes;
  std::sort(planes.begin(), planes.end(),
            [](auto& a, auto& b) { return std::pair(a.region, a.offset) < std::pair(b.region, b.offset); });
  for (size_t i = 0; i < planes.size(); ++i) {
    for (size_t j = i + 1; j < planes.size() && planes[j].region == planes[i].region; ++j) {
      const uint64_t distance = planes[j].offset - planes[i].offset;
      if (distance >= extent) break;
      if (distance == 0 && planes[i].layer != planes[j].layer) continue;
      if (rows_touch(static_cast<int64_t>(distance), dims, 0, layout.row_bytes)) {
        return refuse(who, "planes at offsets " + std::to_string(planes[i].offset) + " and " +
                               std::to_string(planes[j].offset) + " of region " +
                               std::to_string(planes[i].region) + " share bytes");
      }
    }
  }
  return {};
}

Status check_same_cache(const Layout& reader, const Layout& owner) {
  auto differ = [](const std::string& field, uint64_t reader_has, uint64_t owner_has) {
    return Status::LayoutMismatch(field + " differs: reader has " + std::to_string(reader_has) +
                                  ", owner has " + std::to_string(owner_has));
  };
  if (reader.row_bytes != owner.row_bytes) return differ("row_bytes", reader.row_bytes, owner.row_bytes);
  if (reader.planes.size() != owner.planes.size()) {
    return differ("number of planes", reader.planes.size(), owner.planes.size());
  }
  for (size_t i = 0; i < reader.planes.size(); ++i) {
    if (reader.planes[i].layer != owner.planes[i].layer) {
      return differ("planes[" + std::to_string(i) + "].layer", reader.planes[i].layer, owner.planes[i].layer);
    }
  }
  return {};
}

}  // namespace kvlink

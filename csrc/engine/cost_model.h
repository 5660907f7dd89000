// SPDX-License-Identifier: Apache-2.0
// Predicts the time of a pull over one path: start + operations + bytes, corrected by the pulls that ended.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvlink {

/// The time of a pull = start_us + ops * op_ns / 1000 + bytes / rate.
struct Cost {
  double start_us = 0;
  double op_ns = 0;
  double gib_per_s = 1;

  double predict_us(uint64_t ops, uint64_t bytes) const {
    return start_us + static_cast<double>(ops) * op_ns / 1e3 +
           static_cast<double>(bytes) / (gib_per_s * (1 << 30)) * 1e6;
  }
};

/// Not thread-safe.
class CostModel {
 public:
  explicit CostModel(const Cost& prior) : prior_(prior) {}

  /// Returns microseconds. Pulls of this shape decide, if there were any: the median of what the last ones
  /// took. Otherwise a line through all known shapes does, which has an offset and a slope by bytes.
  double predict_us(uint64_t ops, uint64_t bytes) const;
  /// Adds a pull that succeeded, and that did not wait for others or for its owner.
  void learn(uint64_t ops, uint64_t bytes, double took_us);

 private:
  static constexpr size_t kSamples = 8;  // of a shape
  static constexpr size_t kShapes = 32;

  /// Pulls whose bytes and operations differ by less than a factor of two.
  struct Shape {
    uint32_t key = 0;
    uint32_t num_seen = 0;
    uint64_t bytes = 0, ops = 0;               // of the last one
    std::array<double, kSamples> ratios = {};  // measured by prior
    double ratio = 1;                          // the median of them
  };

  const Shape* find(uint32_t key) const;
  double along_line_us(uint64_t ops, uint64_t bytes) const;

  Cost prior_;
  std::vector<Shape> shapes_;  // the latest first
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Decides whether a pull goes straight into the pool or through the staging buffer, by predicted costs scaled
// with measured ones: T = t0 + max(bytes / B, operations / R, pieces / P).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/sync.h"
#include "transport_api/ops.h"

namespace kvlink {

/// The cost of one way. The terms overlap, so the largest counts.
struct WayCost {
  double start_us = 0;
  double op_ns = 0;     // of a range of the owner
  double piece_ns = 0;  // of a place it goes to
  double gib_per_s = 1;
};

struct StagingCosts {
  WayCost direct, staged;
  bool always = false;  // staged, whatever it costs
};

/// The size of a read. If it is staged, `bytes` includes gaps that are read too.
struct ReadShape {
  uint64_t ops = 0, pieces = 0, bytes = 0;
  bool operator==(const ReadShape&) const = default;
};

/// Returns the shape of a plan whose ranges are joined as StagingRules::gap_bytes allows.
ReadShape staged_shape(std::span<const ReadOp> ops, uint64_t num_pieces, uint32_t gap_bytes);

/// Microseconds.
struct Predictions {
  double direct_us = 0, staged_us = 0;
};

/// One policy per peer. Any thread.
class StagingPolicy {
 public:
  StagingPolicy(const StagingCosts& costs, uint32_t gap_bytes) : costs_(costs), gap_bytes_(gap_bytes) {}

  struct Choice {
    bool staged = false;
    Predictions predicted;
    double unscaled_us = 0;  // what was predicted of the way taken, before it was scaled
  };
  /// If bytes are the limit anyway, the read is direct and the single ranges are not examined. Their
  /// prediction is then an upper bound, that of ranges which cannot be joined.
  Choice choose(std::span<const ReadOp> ops, uint64_t num_pieces, uint64_t num_bytes) const;
  /// Adds a pull that succeeded.
  void learn(const Choice& choice, double took_us);

 private:
  static constexpr size_t kSamples = 32;       // of a way
  static constexpr size_t kEnough = 4;         // fewer say little: the first pull finds everything cold
  static constexpr uint32_t kForgotten = 256;  // pulls the other way, after which one is tried again

  struct Seen {
    std::vector<double> ratios;  // measured by predicted, unscaled
    size_t next = 0;
    double scale = 1;
    uint32_t unused = 0;  // pulls since
    void add(double ratio);
  };

  const StagingCosts costs_;
  const uint32_t gap_bytes_;
  mutable Mutex mutex_;
  std::array<Seen, 2> seen_;  // direct, staged
};

}  // namespace kvlink

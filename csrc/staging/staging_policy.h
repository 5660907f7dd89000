// SPDX-License-Identifier: Apache-2.0
// Whether a pull goes straight into the pool or by way of the staging buffer: what each should cost, scaled
// by what it did cost. Shape of the costs: T = t0 + max(bytes / B, operations / R, pieces / P).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/sync.h"
#include "transport_api/ops.h"

namespace kvlink {

/// Of one way. The terms overlap, so the largest counts.
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

/// What a way is asked to move. Staged, `bytes` has what is read along.
struct ReadShape {
  uint64_t ops = 0, pieces = 0, bytes = 0;
  bool operator==(const ReadShape&) const = default;
};

/// Of a plan whose ranges go on as StagingRules::gap_bytes allows.
ReadShape staged_shape(std::span<const ReadOp> ops, uint64_t num_pieces, uint32_t gap_bytes);

/// Microseconds.
struct Predictions {
  double direct_us = 0, staged_us = 0;
};

/// One for each peer. Any thread.
class StagingPolicy {
 public:
  StagingPolicy(const StagingCosts& costs, uint32_t gap_bytes) : costs_(costs), gap_bytes_(gap_bytes) {}

  struct Choice {
    bool staged = false;
    Predictions predicted;
    double unscaled_us = 0;  // what was predicted of the way taken, before it was scaled
  };
  /// Where the wire or the copy is the limit anyway, it is direct without a look at the single ranges: their
  /// prediction is then that of ranges which do not go on, the most that it can be.
  Choice choose(std::span<const ReadOp> ops, uint64_t num_pieces, uint64_t num_bytes) const;
  /// A pull ended well.
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

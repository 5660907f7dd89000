// SPDX-License-Identifier: Apache-2.0
// Counts, logarithmic histograms and a cost model of the transfers over one path, updated once per transfer.
#pragma once

#include <array>
#include <cstdint>

#include "base/status.h"
#include "base/sync.h"
#include "engine/cost_model.h"
#include "engine/rail_rates.h"

namespace kvlink {

struct TransferStats;

/// Counts durations by powers of two: bucket b has those of at most 2^(kFirst + b) ns, the last all longer
/// ones. kvlink/runtime/durations.py has the same bounds.
struct Durations {
  static constexpr uint32_t kFirst = 9;
  static constexpr uint32_t kBuckets = 27;  // 512 ns, 1 us, … 17 s, longer
  std::array<uint64_t, kBuckets> buckets{};
  int64_t sum_ns = 0;

  void add(int64_t ns);
};

struct PathCounts {
  static constexpr size_t kCodes = static_cast<size_t>(Code::kStaleBlocks) + 1;
  static constexpr size_t kStaleReasons = static_cast<size_t>(StaleReason::kRestarted) + 1;
  uint64_t valid = 0, bytes = 0, num_ops = 0, num_segments = 0;  // bytes and on: of valid transfers
  uint64_t unsettled = 0;        // valid, but the owner could not be told by this path
  uint64_t redone = 0;           // steps that a lane returned and another one, or the same, did again
  uint64_t rails_set_aside = 0;  // times that a rail was far slower than its equals
  std::array<uint64_t, kCodes> failed{};
  /// The stale ones of `failed`, by StaleReason: of leases that pin their blocks, and of soft ones.
  std::array<std::array<uint64_t, kStaleReasons>, 2> stale{};
  Durations plan, read, validate, settle, total;  // of valid transfers; `settle` of those that settled
};

/// Any thread. Outlives the connections that add to it.
class PathStats {
 public:
  explicit PathStats(const Cost& prior = {}) : model_(prior) {}

  void add(const TransferStats& stats, const Status& result, bool unsettled);
  PathCounts counts() const;
  /// Returns the microseconds that a pull should take which waits neither for others nor for its owner.
  double predict_us(uint64_t ops, uint64_t bytes) const;
  RailRates& rails() { return rails_; }

 private:
  RailRates rails_;
  mutable Mutex mutex_;
  PathCounts counts_;
  CostModel model_;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "engine/path_stats.h"

#include <algorithm>
#include <bit>

#include "engine/transfer.h"

namespace kvlink {

void Durations::add(int64_t ns) {
  const auto above = static_cast<uint64_t>(std::max<int64_t>(ns, 1) - 1);
  const auto width = static_cast<uint32_t>(std::bit_width(above));
  ++buckets[std::clamp(width, kFirst, kFirst + kBuckets - 1) - kFirst];
  sum_ns += ns;
}

void PathStats::add(const TransferStats& stats, const Status& result, bool unsettled) {
  std::lock_guard lock(mutex_);
  counts_.redone += stats.redone;
  if (!result.ok()) {
    ++counts_.failed[static_cast<size_t>(result.code())];
    if (result.code() == Code::kStaleBlocks) ++counts_.stale[stats.soft][static_cast<size_t>(result.stale())];
    return;
  }
  ++counts_.valid;
  counts_.bytes += stats.bytes;
  counts_.num_ops += stats.num_ops;
  counts_.num_segments += stats.num_segments;
  counts_.unsettled += unsettled;
  counts_.plan.add(stats.plan_ns);
  counts_.read.add(stats.read_ns);
  counts_.validate.add(stats.validate_ns);
  if (stats.settled) counts_.settle.add(stats.settle_ns);
  counts_.total.add(stats.total_ns);
  if (stats.alone && stats.bytes > 0) {
    model_.learn(stats.num_ops, stats.bytes, static_cast<double>(stats.total_ns) / 1e3);
  }
}

double PathStats::predict_us(uint64_t ops, uint64_t bytes) const {
  std::lock_guard lock(mutex_);
  return model_.predict_us(ops, bytes);
}

PathCounts PathStats::counts() const {
  std::lock_guard lock(mutex_);
  PathCounts counts = counts_;
  counts.rails_set_aside = rails_.num_set_aside();
  return counts;
}

}  // namespace kvlink

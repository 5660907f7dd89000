// SPDX-License-Identifier: Apache-2.0
#include "engine/path_stats.h"

#include <gtest/gtest.h>

#include <numeric>

#include "engine/transfer.h"

namespace kvlink {
namespace {

TEST(Durations, BucketHoldsItsUpperBound) {
  Durations durations;
  for (const int64_t ns : {0, 512, 513, 1024}) durations.add(ns);
  EXPECT_EQ(durations.buckets[0], 2u);
  EXPECT_EQ(durations.buckets[1], 2u);
  EXPECT_EQ(durations.sum_ns, 2049);
}

TEST(Durations, NothingIsTooLong) {
  Durations durations;
  durations.add(int64_t{1} << 34);
  durations.add((int64_t{1} << 34) + 1);
  durations.add(INT64_MAX / 2);
  EXPECT_EQ(durations.buckets[Durations::kBuckets - 2], 1u);
  EXPECT_EQ(durations.buckets[Durations::kBuckets - 1], 2u);
}

TEST(PathStats, FailuresAreCountedByCodeAndAddNoBytes) {
  PathStats path_stats;
  path_stats.add({.bytes = 7, .redone = 2, .total_ns = 5, .soft = true},
                 Status::Stale(StaleReason::kEvicted, {}), false);
  path_stats.add(
      {.bytes = 9, .num_ops = 3, .num_segments = 4, .settle_ns = 6, .total_ns = 8, .settled = true}, Status(),
      false);
  path_stats.add({.bytes = 1, .total_ns = 8}, Status(), true);
  const PathCounts counts = path_stats.counts();
  EXPECT_EQ(counts.failed[static_cast<size_t>(Code::kStaleBlocks)], 1u);
  EXPECT_EQ(counts.stale[true][static_cast<size_t>(StaleReason::kEvicted)], 1u);
  EXPECT_EQ(counts.valid, 2u);
  EXPECT_EQ(counts.bytes, 10u);
  EXPECT_EQ(counts.num_ops, 3u);
  EXPECT_EQ(counts.num_segments, 4u);
  EXPECT_EQ(counts.unsettled, 1u);
  EXPECT_EQ(counts.redone, 2u);
  const auto count = [](const Durations& of) {
    return std::accumulate(of.buckets.begin(), of.buckets.end(), 0ull);
  };
  EXPECT_EQ(count(counts.settle), 1u);
  EXPECT_EQ(count(counts.total), 2u);
  EXPECT_EQ(counts.total.sum_ns, 16);
}

}  // namespace
}  // namespace kvlink

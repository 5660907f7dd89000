// SPDX-License-Identifier: Apache-2.0
#include "staging/staging_policy.h"

#include <gtest/gtest.h>

namespace kvlink {
namespace {

constexpr double kGib = 1 << 30;
// Direct, an operation takes as long as 4 KiB do.
constexpr StagingCosts kCosts = {.direct = {10, 4096 / (50 * kGib) * 1e9, 1, 50}, .staged = {30, 80, 1, 50}};

/// `count` ranges of `bytes`, each `gap` behind the last.
std::vector<ReadOp> ranges(uint32_t count, uint32_t bytes, uint32_t gap) {
  std::vector<ReadOp> ops;
  for (uint32_t i = 0; i < count; ++i) ops.push_back({uint64_t{i} * (bytes + gap), bytes, 0, i, 1});
  return ops;
}

StagingPolicy::Choice choose(const StagingPolicy& policy, const std::vector<ReadOp>& ops) {
  return policy.choose(ops, ops.size(), ops.size() * uint64_t{ops.front().bytes});
}

TEST(StagingPolicy, StagesWhatWouldShatter) {
  const StagingPolicy policy(kCosts, 4096);
  EXPECT_FALSE(choose(policy, ranges(4096, 16 << 10, 16 << 10)).staged) << "the wire is the limit";
  const auto tiny = choose(policy, ranges(65536, 256, 1792));
  EXPECT_TRUE(tiny.staged);
  EXPECT_LT(tiny.predicted.staged_us, tiny.predicted.direct_us);
  EXPECT_FALSE(choose(policy, ranges(16, 256, 1792)).staged) << "too few to make up for the start";
  EXPECT_FALSE(choose(policy, ranges(65536, 256, 8192)).staged) << "gaps too wide to be read along";
}

TEST(StagingPolicy, CountsWhatIsReadAlong) {
  EXPECT_EQ(staged_shape(ranges(10, 100, 50), 10, 50), (ReadShape{1, 10, 10 * 150 - 50}));
  EXPECT_EQ(staged_shape(ranges(10, 100, 51), 10, 50), (ReadShape{10, 10, 1000}));
  std::vector<ReadOp> apart = ranges(2, 100, 0);
  apart[1].region = 1;
  EXPECT_EQ(staged_shape(apart, 2, 50).ops, 2u);
  EXPECT_EQ(staged_shape({}, 0, 50), ReadShape{});
}

TEST(StagingPolicy, TakesTheWayThatIsAskedFor) {
  StagingCosts costs = kCosts;
  costs.always = true;
  EXPECT_TRUE(choose(StagingPolicy(costs, 0), ranges(1, 1 << 20, 0)).staged);
}

TEST(StagingPolicy, LearnsWhatTheWaysTake) {
  StagingPolicy policy(kCosts, 4096);
  const auto tiny = ranges(65536, 256, 1792);
  const auto first = choose(policy, tiny);
  ASSERT_TRUE(first.staged);
  policy.learn(first, 100 * first.predicted.staged_us);  // found everything cold
  EXPECT_TRUE(choose(policy, tiny).staged) << "one pull says little";
  for (int pull = 0; pull < 40; ++pull) policy.learn(first, 3 * first.predicted.direct_us);
  const auto then = choose(policy, tiny);
  EXPECT_FALSE(then.staged) << "it takes three times as long as the other way should";
  EXPECT_NEAR(then.predicted.staged_us, 3 * first.predicted.direct_us, 1);
  EXPECT_EQ(then.predicted.direct_us, first.predicted.direct_us);
}

TEST(StagingPolicy, TriesAgainWhatItHasNotTakenForLong) {
  StagingPolicy policy(kCosts, 4096);
  const auto tiny = ranges(65536, 256, 1792);
  const auto first = choose(policy, tiny);
  for (int pull = 0; pull < 8; ++pull) policy.learn(first, 3 * first.predicted.direct_us);
  const auto direct = choose(policy, tiny);
  ASSERT_FALSE(direct.staged);
  int pulls = 0;
  for (; pulls < 1000 && !choose(policy, tiny).staged; ++pulls) {
    policy.learn(direct, direct.predicted.direct_us);
  }
  EXPECT_EQ(pulls, 256);
}

}  // namespace
}  // namespace kvlink

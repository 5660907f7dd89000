// SPDX-License-Identifier: Apache-2.0
// Follows an owner that writes attention token by token, and a state at the end.
#include "engine/stream_planner.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace kvlink {
namespace {

class StreamPlannerTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kRow = 64, kBlocks = 16;
  std::vector<std::byte> pool = std::vector<std::byte>(2 * 4 * kRow * kBlocks);
  std::array<uint32_t, 3> blocks{1, 4, 6};
  std::array<uint32_t, 1> state{3}, state_there{8};
  Plan plan;

  /// Four rows a block in region 0, or states of one row in region 1.
  std::shared_ptr<const Planner> planner_of(uint32_t block_tokens, uint32_t region) {
    const Layout layout{kBlocks, block_tokens, 0, 1, kRow, 4 * kRow, kRow, kRow, {{region, 0, 0}}};
    const uint64_t half = pool.size() / 2;
    auto made = Planner::make(layout, layout, {{pool.data(), half, -1, 0}, {pool.data() + half, half, -1, 1}},
                              {half, half}, {0, 1}, {});
    EXPECT_TRUE(made.ok()) << made.status().what();
    return *made;
  }

  PullRequest request_of(StreamUnit unit, std::span<const GroupRead> more) {
    PullRequest request;
    request.planner = planner_of(4, 0);
    request.owner_blocks = request.reader_blocks = blocks;
    request.tokens = {0, 10};
    request.more = more;
    request.stream = unit;
    request.num_tokens = 10;
    return request;
  }

  std::array<GroupRead, 1> states() {
    return {GroupRead{planner_of(1, 1), state_there, state, {0, 1}, {}, true}};
  }

  uint64_t bytes_at(StreamPlanner& planner, uint64_t ready) {
    EXPECT_TRUE(planner.any_beyond(ready));
    EXPECT_TRUE(planner.plan(ready, false, plan).ok());
    return plan.bytes;
  }
};

TEST_F(StreamPlannerTest, FollowsTokensAndReadsTheStateAtTheEnd) {
  StreamPlanner planner;
  const auto more = states();
  ASSERT_TRUE(planner.start(request_of(StreamUnit::kTokens, more)).ok());
  EXPECT_FALSE(planner.any_beyond(0));
  EXPECT_EQ(bytes_at(planner, 3), 3 * kRow);
  EXPECT_FALSE(planner.any_beyond(3));
  EXPECT_EQ(bytes_at(planner, 9), 6 * kRow);
  EXPECT_FALSE(planner.all_planned());
  EXPECT_EQ(bytes_at(planner, 99), 1 * kRow + 1 * kRow) << "the last token and the state";
  EXPECT_TRUE(planner.all_planned());
}

TEST_F(StreamPlannerTest, AStateIsReadThoughNoTokenIs) {
  StreamPlanner planner;
  const auto more = states();
  PullRequest request = request_of(StreamUnit::kTokens, more);
  request.tokens = {10, 10};
  ASSERT_TRUE(planner.start(request).ok());
  EXPECT_EQ(bytes_at(planner, 9), 0u);
  EXPECT_EQ(bytes_at(planner, 10), kRow);
}

TEST_F(StreamPlannerTest, SeveralGroupsAreFollowedByTokensOnly) {
  const auto more = states();
  for (StreamUnit unit : {StreamUnit::kBlocks, StreamUnit::kLayers}) {
    StreamPlanner planner;
    EXPECT_EQ(planner.start(request_of(unit, more)).code(), Code::kConfig);
  }
}

TEST_F(StreamPlannerTest, ChecksEveryGroupBeforeTheFirstByte) {
  StreamPlanner planner;
  state[0] = kBlocks;
  const auto more = states();
  EXPECT_EQ(planner.start(request_of(StreamUnit::kTokens, more)).code(), Code::kConfig);
}

TEST_F(StreamPlannerTest, PlansABatchAtATime) {
  StreamPlanner planner;
  PullRequest request = request_of(StreamUnit::kBlocks, {});
  request.batch_units = 2;
  ASSERT_TRUE(planner.start(request).ok());
  EXPECT_EQ(bytes_at(planner, 3), 8 * kRow);
  EXPECT_EQ(planner.planned_units(), 2u);
  EXPECT_FALSE(planner.all_planned());
  EXPECT_EQ(bytes_at(planner, 3), 2 * kRow);
  EXPECT_TRUE(planner.all_planned());
}

TEST_F(StreamPlannerTest, FollowsBlocksOfOneGroup) {
  StreamPlanner planner;
  ASSERT_TRUE(planner.start(request_of(StreamUnit::kBlocks, {})).ok());
  EXPECT_EQ(bytes_at(planner, 2), 8 * kRow);
  EXPECT_EQ(bytes_at(planner, 3), 2 * kRow);
  EXPECT_TRUE(planner.all_planned());
}

}  // namespace
}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Plans of single pieces: what is read at once, and where it lands.
#include "plan/pieces.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace kvlink {
namespace {

constexpr uint64_t kBytes = 4 << 20;

/// Executes a plan as an endpoint does.
void read(const Plan& plan, const std::vector<std::vector<std::byte>>& owner) {
  for (const ReadOp& op : plan.ops) {
    uint64_t at = op.offset;
    for (uint32_t index = 0; index < op.num_segments; ++index) {
      const Segment& segment = plan.segments[op.first_segment + index];
      std::memcpy(segment.local, &owner[op.region][at], segment.bytes);
      at += segment.bytes;
    }
    ASSERT_EQ(at, op.offset + op.bytes);
  }
}

TEST(Pieces, NeighboursAreReadAtOnce) {
  std::vector<std::byte> into(kBytes);
  std::byte* const at = into.data();
  const ReadPiece pieces[] = {
      {0, at, 64, 0, 5}, {64, at + 64, 64, 0, 5}, {128, at + 512, 64, 0, 5}, {0, at + 1024, 64, 1, 5}};
  const auto plan = plan_pieces(pieces);
  ASSERT_EQ(plan->ops.size(), 2U);
  EXPECT_EQ(plan->ops[0].bytes, 192U);
  EXPECT_EQ(plan->ops[0].num_segments, 2U);
  ASSERT_EQ(plan->segments.size(), 3U);
  EXPECT_EQ(plan->segments[0].bytes, 128U);
  EXPECT_EQ(plan->segments[2].region, 5U);
  EXPECT_EQ(plan->bytes, 256U);
}

TEST(Pieces, LargePiecesAreCut) {
  std::vector<std::byte> into(kBytes);
  const ReadPiece pieces[] = {{8, into.data(), Planner::kMaxOpBytes + 7, 0, 0}, {0, nullptr, 0, 0, 0}};
  const auto plan = plan_pieces(pieces);
  ASSERT_EQ(plan->ops.size(), 2U);
  EXPECT_EQ(plan->ops[0].bytes, Planner::kMaxOpBytes);
  EXPECT_EQ(plan->ops[1].bytes, 7U);
  EXPECT_EQ(plan->ops[1].offset, 8U + Planner::kMaxOpBytes);
}

TEST(Pieces, NoReadScattersTooFar) {
  std::vector<std::byte> into(kBytes);
  std::vector<ReadPiece> pieces;
  for (uint32_t index = 0; index <= Planner::kMaxOpSegments; ++index)
    pieces.push_back({uint64_t{index} * 8, into.data() + uint64_t{index} * 16, 8, 0, 0});
  const auto plan = plan_pieces(pieces);
  ASSERT_EQ(plan->ops.size(), 2U);
  EXPECT_EQ(plan->ops[0].num_segments, Planner::kMaxOpSegments);
}

TEST(Pieces, EachByteComesToItsPlace) {
  std::mt19937 random(3);
  std::vector<std::vector<std::byte>> owner(3, std::vector<std::byte>(kBytes));
  for (auto& region : owner) {
    for (std::byte& each : region) each = static_cast<std::byte>(random());
  }
  for (uint32_t round = 0; round < 50; ++round) {
    std::vector<std::byte> into(kBytes), wanted(kBytes);
    std::vector<ReadPiece> pieces;
    uint64_t from = 0, to = 0;
    while (pieces.size() < 400) {
      const uint64_t bytes = random() % 50 == 0 ? random() % (kBytes / 2) : random() % 3000;
      if (random() % 2) from = random() % kBytes;
      if (random() % 3 == 0) to += random() % 100;
      if (from + bytes > kBytes || to + bytes > kBytes) break;
      const uint32_t region = random() % 3;
      pieces.push_back({from, into.data() + to, bytes, region, 0});
      if (bytes > 0) std::memcpy(&wanted[to], &owner[region][from], bytes);
      from += bytes, to += bytes;
    }
    read(*plan_pieces(pieces), owner);
    ASSERT_TRUE(into == wanted) << round;
  }
}

}  // namespace
}  // namespace kvlink

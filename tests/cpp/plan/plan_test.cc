// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "cpp/plan/plan_pool.h"
#include "plan/planner.h"

namespace kvlink::plan_tests {
namespace {

/// The planner's promise, said slowly: row by row.
void copy_rows(Pool& reader, Pool& owner, const Ids& reader_blocks, const Ids& owner_blocks, Range tokens,
               Range layers, Range heads) {
  for (size_t p = 0; p < owner.layout.planes.size(); ++p) {
    const uint32_t layer = owner.layout.planes[p].layer;
    if (layer < layers.begin || layer >= layers.end) continue;
    for (uint32_t token = tokens.begin; token < tokens.end; ++token) {
      for (uint32_t head = heads.begin; head < heads.end; ++head) {
        const uint32_t ours = reader.layout.block_tokens, theirs = owner.layout.block_tokens;
        std::memcpy(reader.row(reader.layout.planes[p], reader_blocks[token / ours], token % ours, head),
                    owner.row(owner.layout.planes[p], owner_blocks[token / theirs], token % theirs, head),
                    owner.layout.row_bytes);
      }
    }
  }
}

/// The reads of a plan, moved as one of its repeats says.
void apply(const Plan& plan, const Repeat& repeat, bool moved, Pool& owner, Pool& reader) {
  uint64_t next_segment = 0;
  for (const ReadOp& op : plan.ops) {
    const uint32_t region = moved ? repeat.region : op.region;
    const uint64_t offset = op.offset + repeat.offset;
    ASSERT_TRUE(plan.repeats.empty() || op.region == plan.ops.front().region);
    ASSERT_LE(op.bytes, Planner::kMaxOpBytes);
    ASSERT_LE(op.num_segments, Planner::kMaxOpSegments);
    ASSERT_EQ(op.first_segment, next_segment);
    ASSERT_LT(region, owner.num_regions);
    ASSERT_LE(offset + op.bytes, owner.region_bytes);
    const std::byte* from = owner.region(region) + offset;
    uint32_t filled = 0;
    for (uint32_t i = 0; i < op.num_segments; ++i) {
      const Segment& segment = plan.segments.at(op.first_segment + i);
      const uint32_t local_region = moved ? repeat.local_region : segment.region;
      std::byte* const local = segment.local + repeat.local;
      ASSERT_TRUE(plan.repeats.empty() || segment.region == plan.segments.front().region);
      ASSERT_LT(local_region, reader.num_regions);
      ASSERT_GE(local, reader.region(local_region));
      ASSERT_LE(local + segment.bytes, reader.region(local_region + 1));
      std::memcpy(local, from + filled, segment.bytes);
      filled += segment.bytes;
    }
    ASSERT_EQ(filled, op.bytes);
    next_segment += op.num_segments;
  }
  ASSERT_EQ(next_segment, plan.segments.size());
}

/// Executes a plan as a transport would, and checks what transports rely on.
void apply(const Plan& plan, Pool& owner, Pool& reader) {
  ASSERT_NO_FATAL_FAILURE(apply(plan, {}, false, owner, reader));
  for (const Repeat& repeat : plan.repeats) {
    ASSERT_NO_FATAL_FAILURE(apply(plan, repeat, true, owner, reader));
  }
  uint64_t once = 0;
  for (const ReadOp& op : plan.ops) once += op.bytes;
  ASSERT_EQ(once * (1 + plan.repeats.size()), plan.bytes);
}

TEST(Plan, EqualsTheSlowReferenceOnRandomLayouts) {
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    Shape theirs{random.between(1, 9),  random.between(1, 6), random.between(0, 2), random.between(1, 4),
                 random.between(1, 24), random.between(1, 4), random.between(1, 2)};
    Shape ours = theirs;
    ours.num_blocks = random.between(1, 9);
    if (random.coin()) ours.block_tokens = random.between(1, 6);
    ours.first_head = random.between(0, theirs.first_head + theirs.num_heads - 1);
    ours.num_heads = random.between(std::max(1, int(theirs.first_head) - int(ours.first_head) + 1), 8);
    Pool owner = random.pool(theirs), reader = random.pool(ours);
    const uint32_t capacity =
        std::min(ours.num_blocks * ours.block_tokens, theirs.num_blocks * theirs.block_tokens);
    const uint32_t last = random.between(1, capacity), first = random.coin() ? 0 : random.between(0, last);
    const uint32_t end_layer = random.between(1, ours.num_layers);
    const PlanScope scope{{first, last},
                          random.coin() ? Range{} : Range{random.between(0, end_layer), end_layer},
                          random.coin()};
    const Range asked =
        random.coin() ? Range{} : Range{std::max(ours.first_head, theirs.first_head), UINT32_MAX};
    const Range heads{std::max(ours.first_head, theirs.first_head),
                      std::min(ours.first_head + ours.num_heads, theirs.first_head + theirs.num_heads)};
    auto count = [&](uint32_t block_tokens) { return (last + block_tokens - 1) / block_tokens; };
    const Ids owner_blocks = random.distinct(count(theirs.block_tokens), theirs.num_blocks);
    const Ids reader_blocks = random.distinct(count(ours.block_tokens), ours.num_blocks);

    auto planner = must_make(reader, owner, asked);
    Plan plan;
    plan.ops.resize(random.between(0, 40));  // a plan is reused with whatever it held
    plan.segments.resize(random.between(0, 40));
    plan.repeats.resize(random.between(0, 3));
    const Status planned = planner->plan(owner_blocks, reader_blocks, scope, plan);
    ASSERT_TRUE(planned.ok()) << planned.what();
    ASSERT_EQ(plan.bytes, planner->bytes(last - first, scope.layers));
    Pool expected = reader;
    copy_rows(expected, owner, reader_blocks, owner_blocks, scope.tokens, scope.layers, heads);
    ASSERT_NO_FATAL_FAILURE(apply(plan, owner, reader));
    ASSERT_EQ(reader.memory, expected.memory);
  }
}

struct Size {
  size_t ops, segments;
  bool operator==(const Size&) const = default;
  friend void PrintTo(const Size& size, std::ostream* out) {
    *out << size.ops << " ops, " << size.segments << " segments";
  }
};

TEST(Plan, FoldsPlanesThatLieAlike) {
  const auto repeats_of = [](Pool reader, Pool owner, Range layers = {}) {
    Plan plan;
    const Status planned = must_make(reader, owner)->plan(Ids{5, 1}, Ids{2, 6}, {{}, layers, true}, plan);
    EXPECT_TRUE(planned.ok()) << planned.what();
    return plan.repeats.size();
  };
  const Placement pool = packed({}, kNhd), crossed = packed({}, kCrossLayer);
  EXPECT_EQ(repeats_of(pool, pool), 5u) << "three layers of K and V";
  EXPECT_EQ(repeats_of(packed({}, kHnd), pool), 5u) << "whatever their rows look like";
  EXPECT_EQ(repeats_of(packed({}, kNhd, true), packed({}, kNhd, true, true)), 5u)
      << "in regions of their own";
  EXPECT_EQ(repeats_of(pool, pool, {1, 2}), 1u);
  EXPECT_EQ(repeats_of(crossed, crossed), 0u) << "there they are one read";
  EXPECT_EQ(repeats_of(packed({}, kPairs), packed({}, kPairs)), 2u) << "pairs of K and V";
  Placement moved = pool;
  std::swap(moved.layout.planes[1].offset, moved.layout.planes[2].offset);
  EXPECT_EQ(repeats_of(moved, pool), 5u) << "each by its own distance";
}

/// Plans whole blocks of every head, checks the bytes, and returns what the plan looks like.
Size size_of(Pool reader, Pool owner, const Ids& reader_blocks, const Ids& owner_blocks, Range tokens = {}) {
  std::mt19937 random(1);
  for (std::byte& byte : owner.memory) byte = static_cast<std::byte>(random());
  Plan plan;
  const Status planned = must_make(reader, owner)->plan(owner_blocks, reader_blocks, {tokens, {}}, plan);
  EXPECT_TRUE(planned.ok()) << planned.what();
  Pool expected = reader;
  if (tokens.end == UINT32_MAX) tokens.end = owner_blocks.size() * owner.layout.block_tokens;
  copy_rows(expected, owner, reader_blocks, owner_blocks, tokens, {},
            {reader.layout.first_head, reader.layout.first_head + reader.layout.num_heads});
  apply(plan, owner, reader);
  EXPECT_EQ(reader.memory, expected.memory);
  return {plan.ops.size(), plan.segments.size()};
}

TEST(Plan, OneReadForARunThatIsContiguousAtBothEnds) {
  const Placement pool = packed({}, kNhd);
  EXPECT_EQ(size_of(pool, pool, {4, 5, 6}, {1, 2, 3}), (Size{6, 6}));
}

TEST(Plan, ScattersARunThatIsContiguousAtTheOwner) {
  const Placement pool = packed({}, kNhd);
  EXPECT_EQ(size_of(pool, pool, {6, 0, 3}, {1, 2, 3}), (Size{6, 18}));
  EXPECT_EQ(size_of(pool, pool, {1, 2, 3}, {6, 0, 3}), (Size{18, 18}));
}

TEST(Plan, JoinsPartialBlocksAndUnequalBlockSizes) {
  const Placement small = packed({.block_tokens = 2}, kNhd), large = packed({.block_tokens = 4}, kNhd);
  EXPECT_EQ(size_of(small, large, {0, 1, 2}, {4, 5}, {0, 5}), (Size{6, 6}));
  EXPECT_EQ(size_of(small, large, {0, 1, 2, 3}, {5, 3}, {1, 7}), (Size{12, 12}));
  EXPECT_EQ(size_of(large, small, {5, 3}, {0, 1, 2, 3}, {1, 7}), (Size{6, 12}));
}

TEST(Plan, ReadsEachCrossLayerBlockOnce) {
  const Placement crossed = packed({}, kCrossLayer), apart = packed({}, kHnd, true);
  EXPECT_EQ(size_of(apart, crossed, {5, 1}, {2, 7}), (Size{2, 12}));
  EXPECT_EQ(size_of(crossed, crossed, {5, 1}, {2, 7}), (Size{2, 2}));
  EXPECT_EQ(size_of(crossed, crossed, {5, 6}, {2, 3}), (Size{1, 1}));
  EXPECT_EQ(size_of(crossed, apart, {5, 6}, {2, 3}), (Size{6, 12}));
}

TEST(Plan, NeverJoinsAcrossRegions) {
  const Shape one{.num_blocks = 1};
  EXPECT_EQ(size_of(packed(one, kHnd, true, true), packed(one, kCrossLayer), {0}, {0}), (Size{1, 6}));
  Placement pairs = packed({.num_blocks = 2}, kPairs, true), swapped = pairs;
  std::swap(swapped.layout.planes[2].offset, swapped.layout.planes[3].offset);
  std::swap(swapped.layout.planes[4].offset, swapped.layout.planes[5].offset);
  EXPECT_EQ(size_of(swapped, pairs, {0, 1}, {1, 0}), (Size{6, 10}));
}

TEST(Plan, StampsOnlyPlanesThatLieAlike) {
  Placement pairs = packed({.num_blocks = 2}, kPairs), swapped = pairs;
  std::swap(swapped.layout.planes[2].offset, swapped.layout.planes[3].offset);
  EXPECT_EQ(size_of(pairs, pairs, {0, 1}, {0, 1}), (Size{3, 3}));
  EXPECT_EQ(size_of(swapped, pairs, {0, 1}, {0, 1}), (Size{3, 6}));
}

TEST(Plan, ReadsKeysBesideValuesOnce) {
  const Placement beside = packed({}, kSideBySide), apart = packed({}, kHnd, true);
  EXPECT_EQ(size_of(beside, beside, {5, 1}, {2, 7}), (Size{6, 6}));
  EXPECT_EQ(size_of(apart, beside, {5}, {2}), (Size{3, 3 * 2 * 4 * 2}));
  EXPECT_EQ(size_of(beside, apart, {5}, {2}), (Size{6, 3 * 2 * 4 * 2}));
}

TEST(Plan, TransposesHeadsAndTokensWithoutMoreReads) {
  const Placement nhd = packed({}, kNhd), hnd = packed({}, kHnd);
  EXPECT_EQ(size_of(hnd, nhd, {5}, {2}), (Size{6, 6 * 4 * 2}));
  EXPECT_EQ(size_of(nhd, hnd, {5}, {2}), (Size{6, 6 * 4 * 2}));
}

TEST(Plan, SplitsHeadsByTokenInNhdAndByBlockInHnd) {
  const Shape half{.first_head = 1, .num_heads = 1};
  EXPECT_EQ(size_of(packed(half, kNhd), packed({}, kNhd), {5}, {2}), (Size{6 * 4, 6 * 4}));
  EXPECT_EQ(size_of(packed(half, kHnd), packed({}, kHnd), {5}, {2}), (Size{6, 6}));
}

TEST(Plan, BoundsAnOpByBytesAndSegments) {
  const Shape large{.num_blocks = 300, .block_tokens = 16, .num_layers = 1, .planes_per_layer = 1};
  Shape wide = large;
  wide.row_bytes = 1024;  // 32 KiB a block, 32 of them an op
  Ids ascending(300), descending(300);
  std::iota(ascending.begin(), ascending.end(), 0);
  std::iota(descending.rbegin(), descending.rend(), 0);
  EXPECT_EQ(size_of(packed(wide, kNhd), packed(wide, kNhd), ascending, ascending), (Size{10, 10}));
  EXPECT_EQ(size_of(packed(large, kNhd), packed(large, kNhd), descending, ascending), (Size{2, 300}));
  Shape giant{.num_blocks = 1, .block_tokens = 1, .num_heads = 1, .row_bytes = 3'000'000, .num_layers = 1};
  EXPECT_EQ(size_of(packed(giant, kNhd), packed(giant, kNhd), {0}, {0}), (Size{6, 6}));
}

TEST(Plan, NamesTheRegionsOfBothEnds) {
  Pool owner = packed({}, kNhd, true, true), reader = packed({}, kNhd, true);
  const Ids remote = {10, 11, 12, 13, 14, 15};
  auto planner = Planner::make(reader.layout, owner.layout, reader.ranges(), owner.sizes(), remote, {});
  ASSERT_TRUE(planner.ok());
  Plan plan;
  ASSERT_TRUE((*planner)->plan(Ids{3}, Ids{4}, {}, plan).ok());
  ASSERT_EQ(plan.ops.size(), 6u);
  for (uint32_t i = 0; i < 6; ++i) {
    EXPECT_EQ(plan.ops[i].region, 10 + i);
    EXPECT_EQ(plan.segments[i].region, i / 2);
  }
}

TEST(Plan, AnEmptyRangePlansNothing) {
  Pool pool = packed({}, kNhd);
  auto planner = must_make(pool, pool);
  Plan plan;
  ASSERT_TRUE(planner->plan(Ids{1}, Ids{1}, {{2, 2}, {}}, plan).ok());
  EXPECT_TRUE(plan.ops.empty() && plan.segments.empty() && plan.bytes == 0);
  ASSERT_TRUE(planner->plan(Ids{1}, Ids{1}, {{}, {1, 1}}, plan).ok());
  EXPECT_TRUE(plan.ops.empty() && plan.bytes == 0);
}

}  // namespace
}  // namespace kvlink::plan_tests

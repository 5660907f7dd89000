// SPDX-License-Identifier: Apache-2.0
// Plans, and the planner that keeps them.

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
  Placement behind = packed({}, kPairs);
  for (Plane& plane : behind.layout.planes) plane.offset += 64;
  behind.region_bytes += 64;
  EXPECT_EQ(repeats_of(behind, behind), 2u) << "also behind something else";
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
  EXPECT_EQ(size_of(pairs, swapped, {0, 1}, {0, 1}), (Size{3, 6})) << "at either end";
}

TEST(Plan, StampsNothingIntoTwoRegions) {
  const Shape shape{.num_blocks = 2, .num_layers = 2};
  const Placement owner = packed(shape, kPairs);
  Placement reader = packed(shape, kNhd);
  const uint64_t plane = reader.layout.planes[1].offset;
  // The second layer's V is as far from its K as the first's, and lies in another region.
  reader.layout.planes = {{0, 0, 0}, {0, 0, plane}, {0, 1, 2 * plane}, {1, 1, 0}};
  reader.num_regions = 2;
  reader.region_bytes = 3 * plane;
  EXPECT_EQ(size_of(reader, owner, {0, 1}, {0, 1}), (Size{2, 8}));
}

TEST(Plan, ReadsRowsOfPlanesThatAlternateOnce) {
  const std::vector<Axis> by_token{kBlock, kToken, kLayer, kKv, kHead};
  const std::vector<Axis> by_head{kBlock, kToken, kHead, kLayer, kKv};
  const Placement apart = packed({.block_tokens = 2}, kNhd), tokens = packed({.block_tokens = 2}, by_token);
  EXPECT_EQ(size_of(apart, tokens, {5, 1}, {2, 7}), (Size{2, 2 * 2 * 6}));
  const Placement single = packed({.block_tokens = 1}, kNhd), heads = packed({.block_tokens = 1}, by_head);
  EXPECT_EQ(size_of(single, heads, {5, 1}, {2, 7}), (Size{2, 2 * 2 * 6}));
  EXPECT_EQ(size_of(heads, heads, {5, 1}, {2, 7}), (Size{2, 2}));
}

TEST(Plan, ReadsKeysBesideValuesOnce) {
  const Placement two = packed({.num_layers = 2}, kSideBySide);
  EXPECT_EQ(size_of(two, two, {5, 1}, {2, 7}), (Size{4, 4}));
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
  ASSERT_TRUE(planner->plan(Ids{1}, Ids{1}, {{9, 9}, {}}, plan).ok()) << "also beyond the lists";
  EXPECT_TRUE(plan.ops.empty() && plan.bytes == 0);
}

void expect_refused(const Status& status, Code code, const std::string& part) {
  EXPECT_EQ(status.code(), code) << status.what();
  EXPECT_NE(status.what().find(part), std::string::npos) << status.what();
}

TEST(Plan, RefusesListsThatDoNotFit) {
  Pool pool = packed({.num_blocks = 100}, kNhd);
  auto planner = must_make(pool, pool);
  auto refused = [&](const Ids& theirs, const Ids& ours, const PlanScope& scope, const std::string& part) {
    Plan plan;
    plan.bytes = 1;
    plan.ops.resize(1);
    expect_refused(planner->plan(theirs, ours, scope, plan), Code::kConfig, part);
    EXPECT_TRUE(plan.ops.empty() && plan.bytes == 0);
  };
  refused({1, 100}, {1, 2}, {}, "owner_blocks names block 100 but there are 100");
  refused({1, 2}, {UINT32_MAX, 2}, {}, "into names block 4294967295");
  refused({1}, {1, 2}, {{0, 5}, {}}, "owner_blocks has 1 blocks of 4 tokens: 5 tokens do not fit");
  refused({1, 2}, {1}, {{0, 5}, {}}, "into has 1 blocks");
  refused({1, 2}, {3, 3}, {}, "into names a block twice");
  refused({100, 1, 100}, {100, 1, 2}, {{4, 12}, {}},
          "owner_blocks names block 100 but there are 100: see index 2");
  refused({1, 2, 4}, {100, 3, 3}, {{4, 12}, {}}, "into names a block twice: 3, again at index 2");
  refused({1, 2}, {3, 4}, {{5, 4}, {}}, "tokens");
  refused({1, 2}, {3, 4}, {{9, UINT32_MAX}, {}}, "tokens");
  refused({1, 2}, {3, 4}, {{}, {2, 1}}, "layers");
  refused({1, 2}, {3, 4}, {{}, {0, 4}}, "layers: the range ends at 4 but there are 3");
  Ids many(100);
  std::iota(many.begin(), many.end(), 0);
  many.back() = 63;
  refused(many, many, {}, "into names a block twice: 63, again at index 99");
  Plan plan;
  EXPECT_TRUE(planner->plan(many, Ids{0, 1, 2, 2}, {{0, 12}, {}}, plan).ok())
      << "the repeated block is not touched";
  EXPECT_TRUE(planner->plan(Ids{5, 5}, Ids{0, 1}, {}, plan).ok()) << "an owner's block may be read twice";
}

TEST(Plan, RefusesMoreSegmentsThanOnePlanMayHave) {
  const Shape shape{
      .num_blocks = 300, .block_tokens = 64, .num_heads = 128, .row_bytes = 1, .num_layers = 80};
  const Placement owner = packed(shape, kNhd), reader = packed(shape, kHnd);
  std::byte address{};  // stands for memory that nobody touches
  auto planner = Planner::make(reader.layout, owner.layout, {{&address, reader.region_bytes}},
                               {owner.region_bytes}, {0}, {});
  ASSERT_TRUE(planner.ok()) << planner.status().what();
  Ids ids(300);
  std::iota(ids.begin(), ids.end(), 0);
  expect_refused((*planner)->check(ids, ids, {}), Code::kConfig, "are too many for one plan");
  EXPECT_TRUE((*planner)->check(ids, ids, {{0, 64}, {}}).ok());
  EXPECT_TRUE((*planner)->check(ids, ids, {{0, 128}, {}}).ok());
  // Where two ranks hold every other token, each token is a span of its own.
  Layout split = owner.layout;
  split.tokens = {.rank = 0, .size = 2, .interleave = 1};
  planner =
      Planner::make(reader.layout, split, {{&address, reader.region_bytes}}, {owner.region_bytes}, {0}, {});
  ASSERT_TRUE(planner.ok()) << planner.status().what();
  EXPECT_TRUE((*planner)->check(ids, ids, {{0, 64}, {}}).ok());
  expect_refused((*planner)->check(ids, ids, {{0, 400}, {}}), Code::kConfig, "are too many for one plan");
}

TEST(Planner, RefusesLayoutsThatLeaveTheirRegions) {
  const Placement good = packed({}, kNhd);
  auto refused = [&](auto&& spoil, const std::string& part) {
    Pool reader = good, owner = good;
    spoil(owner.layout);
    expect_refused(make(reader, owner).status(), Code::kConfig, "owner layout: " + part);
    owner = good;
    spoil(reader.layout);
    expect_refused(make(reader, owner).status(), Code::kConfig, "reader layout: " + part);
  };
  refused([](Layout& l) { l.num_blocks = 0; }, "num_blocks must not be 0");
  refused([](Layout& l) { l.block_tokens = 0; }, "block_tokens must not be 0");
  refused([](Layout& l) { l.num_heads = 0; }, "num_heads must not be 0");
  refused([](Layout& l) { l.row_bytes = 0; }, "row_bytes must not be 0");
  refused([](Layout& l) { l.planes.clear(); }, "planes must not be 0");
  refused([](Layout& l) { l.first_head = UINT32_MAX; }, "first_head + num_heads overflows");
  refused([](Layout& l) { l.head_stride = 7; }, "head_stride is 7 but what it steps over has 8 bytes");
  refused([](Layout& l) { l.token_stride = 9; }, "token_stride is 9 but");
  refused([](Layout& l) { l.block_stride = 63; }, "block_stride is 63 but");
  refused([](Layout& l) { l.block_stride = UINT64_MAX / 4; }, "block_stride overflows");
  refused([](Layout& l) { l.num_blocks = UINT32_MAX; }, "planes[0] at offset 0 needs");
  refused([](Layout& l) { l.planes[3].region = 1; }, "planes[3].region is 1 but there are 1 regions");
  refused([](Layout& l) { l.planes[5].offset += 1; }, "planes[5] at offset");
  refused([](Layout& l) { l.planes[5].offset = UINT64_MAX; }, "planes[5] at offset");
  refused([](Layout& l) { l.planes[5].layer = UINT32_MAX; }, "planes[5].layer");
  refused([](Layout& l) { l.tokens = {2, 2, 1}; }, "tokens: rank 2 of 2 ranks");
  refused([](Layout& l) { l.tokens = {0, 0, 1}; }, "tokens: rank 0 of 0 ranks");
  refused([](Layout& l) { l.tokens = {0, 2, 0}; }, "tokens: rank 0 of 2 ranks, 0 at a time");
  refused([](Layout& l) { l.tokens = {0, 1025, 1}; }, "tokens: rank 0 of 1025 ranks");
}

TEST(Planner, PlansTheTokensThatBothEndsHold) {
  Pool owner = packed({}, kNhd), reader = packed({}, kNhd);
  owner.layout.tokens = {1, 2, 4};  // tokens 4 to 7, 12 to 15, …
  auto planner = must_make(reader, owner);
  EXPECT_EQ(planner->tokens_in(1), 12u) << "the first token that the owner's second block holds";
  Plan plan;
  ASSERT_TRUE(planner->plan(Ids{3, 5}, Ids{0, 1, 2, 4}, {{}, {0, 1}}, plan).ok());
  ASSERT_EQ(plan.ops.size(), 4u) << "two blocks, K and V";
  EXPECT_EQ(plan.bytes, 2 * 2 * 4 * 2 * 8u) << "blocks, planes, tokens, heads, bytes of a row";
  for (const Segment& segment : plan.segments) EXPECT_EQ(segment.bytes, 64u);
  EXPECT_EQ(plan.ops[0].offset % 512, 3 * 64u);
  ASSERT_TRUE(planner->plan(Ids{3}, Ids{0}, {{0, 4}, {}}, plan).ok());
  EXPECT_TRUE(plan.ops.empty()) << "the owner has none of the first four tokens";
  EXPECT_EQ(plan.bytes, 0u);
}

bool share_bytes(Pool pool) {
  std::vector<bool> taken(pool.memory.size());
  for (const Plane& plane : pool.layout.planes) {
    for (uint32_t row = 0; row < pool.layout.num_blocks * pool.layout.block_tokens * pool.layout.num_heads;
         ++row) {
      const uint32_t head = row % pool.layout.num_heads, slot = row / pool.layout.num_heads;
      const std::byte* at =
          pool.row(plane, slot / pool.layout.block_tokens, slot % pool.layout.block_tokens, head);
      for (uint32_t i = 0; i < pool.layout.row_bytes; ++i) {
        if (taken[at + i - pool.memory.data()]) return true;
        taken[at + i - pool.memory.data()] = true;
      }
    }
  }
  return false;
}

TEST(Planner, RefusesExactlyTheReadersWhosePlanesShareBytes) {
  int num_shared = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const Shape shape{random.between(1, 4), random.between(1, 4), 0,
                      random.between(1, 3), random.between(1, 4), random.between(1, 2),
                      random.between(1, 2)};
    Pool owner = random.pool(shape), reader = owner;
    Plane& moved = reader.layout.planes.back();
    moved.offset = random.between(0, moved.offset);
    const bool upon_another_layer =
        std::any_of(reader.layout.planes.begin(), reader.layout.planes.end(), [&](const Plane& other) {
          return other.offset == moved.offset && other.region == moved.region && other.layer != moved.layer;
        });
    const bool shared = !upon_another_layer && share_bytes(reader);
    if (shared) expect_refused(make(reader, owner).status(), Code::kConfig, "share bytes");
    if (!shared) must_make(reader, owner);
    num_shared += shared;
  }
  EXPECT_GT(num_shared, 500) << "the test must see both answers often";
  EXPECT_LT(num_shared, 3500);
}

TEST(Planner, LayersUponEachOtherArePulledOneAtATime) {
  Pool owner = packed({.num_layers = 2}, kNhd), reader = owner;
  for (Plane& plane : reader.layout.planes) {
    if (plane.layer == 1)
      plane.offset = reader.layout.planes[&plane - reader.layout.planes.data() - 2].offset;
  }
  const auto planner = must_make(reader, owner);
  const std::vector<uint32_t> blocks{0};
  Plan plan;
  expect_refused(planner->plan(blocks, blocks, {}, plan), Code::kConfig, "layers 0 and 1 share memory");
  for (uint32_t layer : {0, 1}) {
    PlanScope scope;
    scope.layers = {layer, layer + 1};
    EXPECT_TRUE(planner->plan(blocks, blocks, scope, plan).ok());
    EXPECT_GT(plan.bytes, 0u);
  }
}

TEST(Planner, NamesTheFieldInWhichTheEndsDiffer) {
  Pool pool = packed({}, kNhd), narrow = packed({.row_bytes = 4}, kNhd),
       shallow = packed({.num_layers = 2}, kNhd);
  Pool elsewhere = packed({.first_head = 2}, kNhd), renumbered = pool;
  renumbered.layout.planes[2].layer = 2;
  expect_refused(make(pool, narrow).status(), Code::kLayoutMismatch,
                 "row_bytes differs: reader has 8, owner has 4");
  expect_refused(make(pool, shallow).status(), Code::kLayoutMismatch,
                 "number of planes differs: reader has 6, owner has 4");
  expect_refused(make(pool, renumbered).status(), Code::kLayoutMismatch,
                 "planes[2].layer differs: reader has 1, owner has 2");
  expect_refused(make(pool, elsewhere).status(), Code::kLayoutMismatch,
                 "heads: reader holds [0, 2), owner holds [2, 4)");
  expect_refused(make(pool, pool, {2, 3}).status(), Code::kLayoutMismatch, "asked for [2, 3)");
}

TEST(Planner, CountsBytesWithoutOverflow) {
  Pool pool = packed({}, kNhd);
  auto planner = must_make(pool, pool);
  EXPECT_EQ(planner->num_layers(), 3u);
  EXPECT_EQ(planner->bytes(5, {}), 5u * 2 * 8 * 6);
  EXPECT_EQ(planner->bytes(5, {1, 2}), 5u * 2 * 8 * 2);
  EXPECT_EQ(planner->bytes(UINT64_MAX, {}), UINT64_MAX);
}

}  // namespace
}  // namespace kvlink::plan_tests

// SPDX-License-Identifier: Apache-2.0
// What the planner refuses.
#include "plan/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "cpp/plan/plan_pool.h"

namespace kvlink::plan_tests {
namespace {

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
  refused(many, many, {}, "into names a block twice");
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

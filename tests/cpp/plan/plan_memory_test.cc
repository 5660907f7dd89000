// SPDX-License-Identifier: Apache-2.0
// What a plan allocates: its lists once, about as long as they need to be, and nothing when it is made again.
#include <gtest/gtest.h>

#include "cpp/plan/allocations.h"
#include "cpp/plan/plan_pool.h"

namespace kvlink::plan_tests {
namespace {

struct Request {
  const char* name;
  Placement reader, owner;
  PlanScope scope = {};
};
std::ostream& operator<<(std::ostream& out, const Request& request) { return out << request.name; }

const Shape kShape{.num_blocks = 64, .num_layers = 4};

Placement shared_tokens(Placement of) {
  of.layout.tokens = {.rank = 0, .size = 2, .interleave = 2};
  return of;
}

/// A stride of one head says nothing.
Placement one_head() {
  Placement made = packed({.num_blocks = 64, .num_heads = 1, .num_layers = 4}, kNhd);
  made.layout.head_stride = 4;
  return made;
}

struct PlanMemoryTest : ::testing::TestWithParam<Request> {};
INSTANTIATE_TEST_SUITE_P(
    Requests, PlanMemoryTest,
    ::testing::Values(Request{"alike", packed(kShape, kNhd), packed(kShape, kNhd)},
                      Request{"folded", packed(kShape, kNhd), packed(kShape, kNhd), {{}, {}, true}},
                      Request{"transposed", packed(kShape, kHnd), packed(kShape, kNhd)},
                      Request{"layers", packed(kShape, kHnd), packed(kShape, kNhd), {{}, {1, 3}}},
                      Request{"beside", packed(kShape, kSideBySide), packed(kShape, kSideBySide)},
                      Request{"one_head", one_head(), one_head()},
                      Request{"crossed", packed(kShape, kNhd), packed(kShape, kCrossLayer)},
                      Request{"shared_tokens", packed(kShape, kHnd), shared_tokens(packed(kShape, kNhd))}),
    [](const auto& info) { return info.param.name; });

TEST_P(PlanMemoryTest, IsReservedAtOnceAndUsedAgain) {
  Pool reader = GetParam().reader, owner = GetParam().owner;
  const auto planner = must_make(reader, owner);
  Ids from(64), to(64);
  for (uint32_t index = 0; index < 64; ++index) from[index] = index * 27 % 64, to[index] = index * 37 % 64;
  Plan small, plan;
  const PlanScope one_block{{0, 4}, GetParam().scope.layers, GetParam().scope.fold};
  const auto allocations = [&](const PlanScope& scope, Plan& into) {
    const size_t before = num_allocations();
    EXPECT_TRUE(planner->plan(from, to, scope, into).ok());
    return num_allocations() - before;
  };
  const size_t of_few = allocations(one_block, small), of_many = allocations(GetParam().scope, plan);
  EXPECT_LE(of_many, of_few + 2) << "its lists do not grow piece by piece";
  EXPECT_LE(plan.ops.capacity(), 5 * plan.segments.size());
  EXPECT_LE(plan.segments.capacity(), 5 * plan.segments.size());
  const auto* const ops = plan.ops.data();
  const auto* const segments = plan.segments.data();
  EXPECT_LE(allocations(GetParam().scope, plan), of_few);
  EXPECT_TRUE(plan.ops.data() == ops && plan.segments.data() == segments);
}

}  // namespace
}  // namespace kvlink::plan_tests

// SPDX-License-Identifier: Apache-2.0
// Every state that two leases, their readers and their blocks can reach around the real LeaseTable.
#include "cpp/lease/lease_model.h"

#include "cpp/lease/explorer.h"

namespace kvlink::lease_model {
namespace {

using lease_tests::first_violation;

struct LeaseModel : ::testing::TestWithParam<Rules> {};

TEST_P(LeaseModel, HoldsInEveryReachableState) { lease_tests::expect_holds<World>(GetParam(), 10'000); }

INSTANTIATE_TEST_SUITE_P(Paths, LeaseModel,
                         ::testing::Values(Rules{.path = Path::kGuard}, Rules{.path = Path::kFence},
                                           Rules{.path = Path::kPlain},
                                           Rules{.path = Path::kPlain, .seats_of_first = 2}));

// Each rule of the owner is needed: without it a late byte reaches a reader that was promised none.

TEST(LeaseModelRules, BlocksGoBackOnlyBehindTheSlicesThatWereCompared) {
  const Rules rules{.path = Path::kGuard, .enforces_guards = false};
  EXPECT_EQ(first_violation<World>(rules).substr(0, 3), "(c)");
}

TEST(LeaseModelRules, StoresThatArriveAfterTheSlotsReuseHideItsReader) {
  const Rules rules{.path = Path::kFence, .stores_arrive = false};
  EXPECT_EQ(first_violation<World>(rules).substr(0, 3), "(c)");
}

}  // namespace
}  // namespace kvlink::lease_model

// SPDX-License-Identifier: Apache-2.0
// Every state that two soft leases and one that pins blocks can reach around the real LeaseTable, with two
// readers at one seat, a scheduler that gives their blocks new content, and slots that are granted again.
#include "cpp/lease/soft_lease_model.h"

#include "cpp/lease/explorer.h"

namespace kvlink::soft_lease_model {
namespace {

struct SoftLeaseModel : ::testing::TestWithParam<Rules> {};

TEST_P(SoftLeaseModel, HoldsInEveryReachableState) { lease_tests::expect_holds<World>(GetParam(), 10'000); }

INSTANTIATE_TEST_SUITE_P(Tables, SoftLeaseModel,
                         ::testing::Values(Rules{.num_slots = 1}, Rules{.num_slots = 2},
                                           Rules{.num_slots = 1, .guards = false},
                                           Rules{.num_slots = 2, .guards = false},
                                           Rules{.num_slots = 1, .disturbs = true},
                                           Rules{.num_slots = 2, .guards = false, .disturbs = true}));

// Each rule of the code around the table is needed.

std::string way(const Rules& rules) { return lease_tests::first_violation<World>(rules); }

TEST(SoftLeaseModelRules, BlocksAreRevokedBeforeTheyAreWritten) {
  EXPECT_EQ(way({.guards = false, .revokes_first = false}),
            "(a) the nonce stands, and the read came after the overwrite: offer old, overwrite 0, start A, "
            "send A, send A, look A,");
}

TEST(SoftLeaseModelRules, WritesAreOrderedBehindTheTombstone) {
  EXPECT_EQ(
      way({.guards = false, .writes_after_tombstone = false}),
      "(a) the nonce stands, and the read came after the overwrite: offer old, stores arrive, revoke 0, "
      "overwrite 0, start A, send A, send A, look A,");
}

TEST(SoftLeaseModelRules, ReadersLookAtTheSlotAfterTheirData) {
  EXPECT_EQ(
      way({.guards = false, .looks_last = false}),
      "(a) the nonce stands, and the read came after the overwrite: offer old, start A, send A, look A, "
      "revoke 0, overwrite 0, send A,");
}

TEST(SoftLeaseModelRules, ARevokeWaitsForSlicesThatWereCompared) {
  EXPECT_EQ(
      way({.enforced = Enforced::kNone}),
      "(c) a byte of new content was sent: offer old, start A, compare A, revoke 0, overwrite 0, send A,");
}

TEST(SoftLeaseModelRules, ARevokeWaitsForSlicesOfLeasesThatEndedBefore) {
  EXPECT_EQ(way({.num_slots = 1, .enforced = Enforced::kOwnOnly}),
            "(c) a byte of new content was sent: offer old, start A, compare A, offer hard, revoke 0, "
            "overwrite 0, send A,");
}

}  // namespace
}  // namespace kvlink::soft_lease_model

// SPDX-License-Identifier: Apache-2.0
#include "base/invitations.h"

#include <gtest/gtest.h>

#include <vector>

namespace kvlink {
namespace {

constexpr Invitations::Limits kLimits{
    .secret_bytes = 24, .most_of_one = 64, .most = 256, .lifetime_ns = 1'000'000};

TEST(Invitations, AdmitOnceWhoShowsTheSecret) {
  Invitations invitations(kLimits);
  const Invitation issued = invitations.issue(0, 5, 0);
  EXPECT_EQ(issued.secret.size(), kLimits.secret_bytes);
  for (size_t index = 0; index < issued.secret.size(); ++index) {
    Invitation guessed = issued;
    guessed.secret[index] ^= 1;
    EXPECT_FALSE(invitations.redeem(guessed, 0));
  }
  EXPECT_FALSE(invitations.redeem({issued.id, ""}, 0));
  EXPECT_EQ(invitations.redeem(issued, 0), 5U);
  EXPECT_FALSE(invitations.redeem(issued, 0));
}

TEST(Invitations, ExpireAndAreWithdrawn) {
  Invitations invitations(kLimits);
  EXPECT_FALSE(invitations.redeem(invitations.issue(0, 1, 0), kLimits.lifetime_ns));
  const Invitation issued = invitations.issue(0, 1, 0);
  EXPECT_TRUE(invitations.withdraw(1));
  EXPECT_FALSE(invitations.withdraw(1));
  EXPECT_FALSE(invitations.redeem(issued, 0));
}

TEST(Invitations, AFloodLeavesThoseOfOthersAlone) {
  Invitations invitations(kLimits);
  const Invitation before = invitations.issue(7, 1, 0);
  const Invitation flooders = invitations.issue(8, 2, 0);
  for (size_t count = 0; count < 2 * kLimits.most; ++count) invitations.issue(8, 2, 0);
  const Invitation after = invitations.issue(9, 3, 0);
  EXPECT_EQ(invitations.redeem(before, 1), 1U);
  EXPECT_EQ(invitations.redeem(after, 1), 3U);
  EXPECT_FALSE(invitations.redeem(flooders, 1)) << "the oldest of the flood lapsed";
}

TEST(Invitations, AFloodByManyLeavesThoseOfOthersAlone) {
  Invitations invitations(kLimits);
  const Invitation before = invitations.issue(1, 1, 0);
  for (uint64_t count = 0; count < 2 * kLimits.most; ++count) invitations.issue(100 + count % 50, 2, 0);
  EXPECT_EQ(invitations.redeem(before, 1), 1U);
}

TEST(Invitations, OneThatFloodsGetsInAllTheSame) {
  Invitations invitations(kLimits);
  for (size_t count = 0; count < 2 * kLimits.most; ++count) invitations.issue(8, 2, 0);
  const Invitation last = invitations.issue(8, 3, 0);
  for (size_t count = 1; count < kLimits.most_of_one; ++count) invitations.issue(8, 4, 0);
  EXPECT_EQ(invitations.redeem(last, 1), 3U);
}

TEST(Invitations, WhenAllPlacesAreTakenTheCallerThatHasMostGivesOneUp) {
  Invitations invitations({.secret_bytes = 24, .most_of_one = 3, .most = 4, .lifetime_ns = 10});
  std::vector<Invitation> of_first;
  for (int count = 0; count < 3; ++count) of_first.push_back(invitations.issue(1, 1, 0));
  std::vector<Invitation> others{invitations.issue(2, 1, 0)};
  others.push_back(invitations.issue(3, 1, 0));
  others.push_back(invitations.issue(2, 1, 0));
  for (const Invitation& other : others) EXPECT_TRUE(invitations.redeem(other, 0));
  EXPECT_FALSE(invitations.redeem(of_first[0], 0));
  EXPECT_FALSE(invitations.redeem(of_first[1], 0));
  EXPECT_TRUE(invitations.redeem(of_first[2], 0));
}

TEST(Invitations, WhatIsRedeemedMakesRoom) {
  Invitations invitations({.secret_bytes = 24, .most_of_one = 2, .most = 3, .lifetime_ns = 10});
  const Invitation first = invitations.issue(1, 1, 0), second = invitations.issue(1, 2, 0);
  EXPECT_EQ(invitations.redeem(first, 0), 1U);
  const Invitation third = invitations.issue(1, 3, 0);
  const Invitation fourth = invitations.issue(1, 4, 0);
  EXPECT_FALSE(invitations.redeem(second, 0));
  EXPECT_EQ(invitations.redeem(third, 0), 3U);
  invitations.clear();
  EXPECT_FALSE(invitations.redeem(fourth, 0));
}

TEST(Invitations, TheOldestLapsesAfterALaterOneWasRedeemed) {
  Invitations invitations({.secret_bytes = 24, .most_of_one = 2, .most = 3, .lifetime_ns = 10});
  const Invitation first = invitations.issue(1, 1, 0), second = invitations.issue(1, 2, 0);
  EXPECT_EQ(invitations.redeem(second, 0), 2U);
  const Invitation third = invitations.issue(1, 3, 0);
  invitations.issue(1, 4, 0);
  EXPECT_FALSE(invitations.redeem(first, 0));
  EXPECT_EQ(invitations.redeem(third, 0), 3U);
}

TEST(Invitations, WithoutALifetimeTheyStay) {
  Invitations invitations({.secret_bytes = 24, .most_of_one = 1, .most = 1, .lifetime_ns = INT64_MAX});
  EXPECT_TRUE(invitations.redeem(invitations.issue(0, 1, 1000), INT64_MAX - 1));
}

}  // namespace
}  // namespace kvlink

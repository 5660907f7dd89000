// SPDX-License-Identifier: Apache-2.0
#include "base/caller_quota.h"

#include <gtest/gtest.h>

namespace kvlink {
namespace {

using Dropped = std::optional<uint64_t>;

TEST(CallerQuota, AFloodDropsItsOwnOldest) {
  CallerQuota quota(2, 100);
  EXPECT_EQ(quota.add(1, 10), Dropped());
  EXPECT_EQ(quota.add(2, 20), Dropped());
  EXPECT_EQ(quota.add(1, 11), Dropped());
  EXPECT_EQ(quota.add(1, 12), Dropped(10));
  EXPECT_EQ(quota.add(1, 13), Dropped(11));
  EXPECT_EQ(quota.size(), 3U);
}

TEST(CallerQuota, WhenAllPlacesAreTakenTheCallerThatHasMostGivesOneUp) {
  CallerQuota quota(3, 4);
  for (const uint64_t entry : {10, 11, 12}) quota.add(1, entry);
  quota.add(2, 20);
  EXPECT_EQ(quota.add(3, 30), Dropped(10));
  EXPECT_EQ(quota.add(2, 21), Dropped(11));
  EXPECT_EQ(quota.size(), 4U);
}

TEST(CallerQuota, WhatIsRemovedMakesRoom) {
  CallerQuota quota(2, 3);
  for (const uint64_t entry : {10, 11}) quota.add(1, entry);
  quota.remove(1, 10);
  quota.remove(1, 10);
  quota.remove(7, 11);
  EXPECT_EQ(quota.size(), 1U);
  EXPECT_EQ(quota.add(1, 12), Dropped());
  EXPECT_EQ(quota.add(1, 13), Dropped(11));
  quota.clear();
  EXPECT_EQ(quota.size(), 0U);
  EXPECT_EQ(quota.add(1, 14), Dropped());
}

}  // namespace
}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "lease/lease_table.h"

namespace kvlink {
namespace {

std::vector<uint32_t> passed(SeatDeadlines& deadlines, int64_t now_ns) {
  std::vector<uint32_t> slots;
  deadlines.take_passed(now_ns, [&](uint32_t slot) {
    slots.push_back(slot);
    deadlines.remove(slot);
  });
  return slots;
}

TEST(SeatDeadlines, FindsTheSameAsALookAtEachOfThem) {
  constexpr uint32_t kSlots = 1000;  // the last group is not full
  SeatDeadlines deadlines(kSlots);
  std::vector<int64_t> known(kSlots, INT64_MAX);
  std::mt19937 random(1);
  for (int64_t now_ns = 0; now_ns < 3000; ++now_ns) {
    for (int change = 0; change < 3; ++change) {
      const uint32_t slot = random() % kSlots;
      if (random() % 4 == 0) {
        deadlines.remove(slot);
        known[slot] = INT64_MAX;
      } else {  // sooner or later than before
        deadlines.set(slot, known[slot] = now_ns + random() % 500);
      }
    }
    std::vector<uint32_t> wanted;
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      ASSERT_EQ(deadlines.has(slot), known[slot] != INT64_MAX);
      if (now_ns < known[slot]) continue;
      wanted.push_back(slot);
      known[slot] = INT64_MAX;
    }
    ASSERT_EQ(passed(deadlines, now_ns), wanted) << now_ns;
  }
}

TEST(SeatDeadlines, OneThatHasPassedMayRemoveOthers) {
  SeatDeadlines deadlines(1000);
  for (const uint32_t slot : {3, 5, 700}) deadlines.set(slot, 10);
  std::vector<uint32_t> slots;
  deadlines.take_passed(10, [&](uint32_t slot) {
    slots.push_back(slot);
    for (const uint32_t other : {3, 5, 700}) deadlines.remove(other);
  });
  EXPECT_EQ(slots, std::vector<uint32_t>{3});
  EXPECT_TRUE(passed(deadlines, 20).empty());
}

}  // namespace
}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/liveness.h"

#include <gtest/gtest.h>

namespace kvlink::verbs {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kStart = 5'000'000'000;

/// Looks whenever it is time to, until it has been too long.
int64_t time_until_too_long(Liveness& liveness, int64_t now) {
  const int64_t start = now;
  while (!liveness.too_long(now)) now = liveness.next_check_ns();
  return now - start;
}

TEST(VerbsSilence, EndsToTheNanosecondForWhoLooksInTime) {
  Liveness liveness;
  EXPECT_EQ(liveness.next_check_ns(), INT64_MAX);
  EXPECT_EQ(time_until_too_long(liveness, kStart), kSilenceNs);
  Liveness odd(250 * kMs);
  EXPECT_EQ(time_until_too_long(odd, kStart), 250 * kMs);
}

TEST(VerbsSilence, BeginsAgainWithEverySignOfLife) {
  Liveness liveness;
  for (int64_t now = kStart; now < kStart + 20 * kSilenceNs; now += kTickNs) {
    if ((now - kStart) % (kSilenceNs - kTickNs) == 0) liveness.heard();
    ASSERT_FALSE(liveness.too_long(now)) << (now - kStart) / kMs;
  }
  liveness.heard();
  EXPECT_EQ(liveness.next_check_ns(), INT64_MAX);
  EXPECT_EQ(time_until_too_long(liveness, kStart), kSilenceNs);
}

TEST(VerbsSilence, OnesOwnAbsenceIsNotTheOthersSilence) {
  Liveness liveness;
  EXPECT_FALSE(liveness.too_long(kStart));
  EXPECT_FALSE(liveness.too_long(kStart + 60'000 * kMs));  // stopped for a minute
  EXPECT_EQ(time_until_too_long(liveness, kStart + 60'000 * kMs), kSilenceNs - 2 * kTickNs);
}

TEST(VerbsSilence, WhoStandsByAsksOnceATick) {
  Liveness liveness;
  int num_asked = 0;
  for (int64_t now = kStart; now < kStart + 1000 * kMs; now += kMs) {
    if (!liveness.idle_too_long(now)) {
      EXPECT_LE(liveness.next_check_ns(), now + kTickNs);
      continue;
    }
    ++num_asked;
    EXPECT_FALSE(liveness.too_long(now));
    liveness.heard();
  }
  EXPECT_EQ(num_asked, 9);
}

}  // namespace
}  // namespace kvlink::verbs

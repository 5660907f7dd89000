// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/liveness.h"

#include <gtest/gtest.h>

namespace kvlink::verbs {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kStart = 5'000'000'000;

/// Looks whenever it is time to, until it has been too long.
int64_t time_until_too_long(Silence& silence, int64_t now) {
  const int64_t start = now;
  while (!silence.too_long(now)) now = silence.look_at_ns();
  return now - start;
}

TEST(VerbsSilence, EndsToTheNanosecondForWhoLooksInTime) {
  Silence silence;
  EXPECT_EQ(silence.look_at_ns(), INT64_MAX);
  EXPECT_EQ(time_until_too_long(silence, kStart), kSilenceNs);
  Silence odd(250 * kMs);
  EXPECT_EQ(time_until_too_long(odd, kStart), 250 * kMs);
}

TEST(VerbsSilence, BeginsAnewWithEverySignOfLife) {
  Silence silence;
  for (int64_t now = kStart; now < kStart + 20 * kSilenceNs; now += kTickNs) {
    if ((now - kStart) % (kSilenceNs - kTickNs) == 0) silence.heard();
    ASSERT_FALSE(silence.too_long(now)) << (now - kStart) / kMs;
  }
  silence.heard();
  EXPECT_EQ(silence.look_at_ns(), INT64_MAX);
  EXPECT_EQ(time_until_too_long(silence, kStart), kSilenceNs);
}

TEST(VerbsSilence, OnesOwnAbsenceIsNotTheOthersSilence) {
  Silence silence;
  EXPECT_FALSE(silence.too_long(kStart));
  EXPECT_FALSE(silence.too_long(kStart + 60'000 * kMs));  // stopped for a minute
  EXPECT_EQ(time_until_too_long(silence, kStart + 60'000 * kMs), kSilenceNs - 2 * kTickNs);
}

TEST(VerbsSilence, WhoStandsByAsksOnceATick) {
  Silence silence;
  int num_asked = 0;
  for (int64_t now = kStart; now < kStart + 1000 * kMs; now += kMs) {
    if (!silence.idle_too_long(now)) {
      EXPECT_LE(silence.look_at_ns(), now + kTickNs);
      continue;
    }
    ++num_asked;
    EXPECT_FALSE(silence.too_long(now));
    silence.heard();
  }
  EXPECT_EQ(num_asked, 9);
}

}  // namespace
}  // namespace kvlink::verbs

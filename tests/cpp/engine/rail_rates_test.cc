// SPDX-License-Identifier: Apache-2.0
// Rails that are far slower than their equals: a model of rails whose rates the test sets, and whose lanes
// take chunks as those of a connection do.
#include "engine/rail_rates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cpp/engine/transfers_by_hand.h"

namespace kvlink {
namespace {

constexpr int64_t kOneSecond = 1'000'000'000;
constexpr uint64_t kChunk = 512 << 10;
constexpr uint64_t kSlow = 1, kAll = 0;  // masks of rails: the first, and none

/// Two rails or more with four chunks under way each. Rates are in bytes a nanosecond.
struct RailRatesTest : ::testing::Test {
  RailRates rates;
  std::vector<Rail> rails;
  std::vector<double> bytes_per_ns;
  int64_t now = 100 * kOneSecond;

  void make(std::vector<double> rail_rates, std::vector<uint64_t> chunks = {}) {
    bytes_per_ns = std::move(rail_rates);
    rails.clear();
    for (size_t i = 0; i < bytes_per_ns.size(); ++i) {
      const std::string name = "nic" + std::to_string(i) + ":1->nic" + std::to_string(i) + ":1";
      rails.push_back({name, 1ull << i, i < chunks.size() ? chunks[i] : kChunk});
    }
  }

  /// Each rail takes the next chunk when one of its own has landed. Returns what each has read.
  std::vector<RailWork> read(uint64_t bytes, const RailChoice& choice) const {
    std::vector<RailWork> work(rails.size());
    std::vector<double> free_at(rails.size(), 0);
    while (bytes > 0) {
      size_t next = rails.size();
      for (size_t i = 0; i < rails.size(); ++i) {
        const bool limited = (choice.trial >> i & 1) != 0 && work[i].bytes >= rails[i].enough_bytes();
        if ((choice.aside >> i & 1) != 0 || limited) continue;
        if (next == rails.size() || free_at[i] < free_at[next]) next = i;
      }
      const uint64_t chunk = std::min(bytes, rails[next].chunk_bytes);
      bytes -= chunk;
      work[next].bytes += chunk;
      free_at[next] += static_cast<double>(chunk) / bytes_per_ns[next];
      work[next].ns = static_cast<int64_t>(free_at[next]) + 5'000;  // and a round trip
    }
    return work;
  }

  /// Returns the rails that the pull did not use as any other.
  RailChoice pull(uint64_t bytes = 256 << 20) {
    const RailChoice choice = rates.choose(rails, true, now);
    const std::vector<RailWork> work = read(bytes, choice);
    const auto longest = std::ranges::max_element(work, {}, &RailWork::ns);
    now += longest->ns;
    rates.add(rails, work, choice, now);
    return choice;
  }
  uint64_t aside() { return rates.choose(rails, false, now).aside; }
  void set_slow_rail_aside() {
    for (uint32_t number = 0; number < RailRates::kPulls; ++number) pull();
    ASSERT_EQ(aside(), kSlow);
  }
  void try_slow_rail_at(double speed) {
    bytes_per_ns[0] = speed;
    now += 10 * kOneSecond;
    ASSERT_EQ(pull().trial, kSlow);
  }
};

TEST_F(RailRatesTest, LanesOfOnePairOfPortsAreOneRail) {
  std::vector<Rail> found;
  const auto add = [&](uint32_t lane, const char* path) {
    add_lane(found, lane, {.path = path, .window = {.chunk_bytes = 7}});
  };
  add(0, "a:1->b:1 75%");
  add(2, "c:1->d:1 25%");
  add(3, "a:1->b:1 75% in packets of 1024 bytes");
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].name, "a:1->b:1");
  EXPECT_EQ(found[0].lanes, 0b1001u);
  EXPECT_EQ(found[0].enough_bytes(), 14u);
}

TEST_F(RailRatesTest, ARailTenTimesSlowerIsSetAsideAfterThreePullsInARow) {
  make({4, 50, 50, 50});
  for (uint32_t number = 0; number + 1 < RailRates::kPulls; ++number) {
    pull();
    EXPECT_EQ(aside(), kAll) << "one pull may have met a packet that got lost";
  }
  pull();
  EXPECT_EQ(aside(), kSlow);
  EXPECT_TRUE(rates.is_aside(rails[0].name + " 25%"));
  EXPECT_FALSE(rates.is_aside(rails[1].name));
  EXPECT_EQ(rates.num_set_aside(), 1u);
}

TEST_F(RailRatesTest, WhatIsNotFarSlowerIsUsed) {
  make({6, 50, 50, 50});
  for (int number = 0; number < 100; ++number) pull();
  EXPECT_EQ(aside(), kAll);
  make({2, 50}, {kChunk / 32, kChunk});  // a port of a tenth of the rate has a share like that
  for (int number = 0; number < 100; ++number) pull();
  EXPECT_EQ(aside(), kAll);
  EXPECT_EQ(rates.num_set_aside(), 0u);
}

TEST_F(RailRatesTest, OneStallOrAPullOfFewBytesProvesNothing) {
  make({50, 50});
  for (int number = 0; number < 100; ++number) {
    bytes_per_ns[0] = number % 3 != 0 ? 1 : 50;
    pull();
  }
  EXPECT_EQ(aside(), kAll);
  bytes_per_ns[0] = 1;
  for (int number = 0; number < 100; ++number) pull(2 * kChunk);
  EXPECT_EQ(aside(), kAll);
  for (int number = 0; number < 3; ++number)
    rates.add(rails, std::vector<RailWork>{{2 * kChunk, kOneSecond}, {}}, {}, now);
  EXPECT_EQ(aside(), kAll) << "there is nothing to compare it with";
}

TEST_F(RailRatesTest, ThoseThatAreAllSlowAreEqual) {
  make({5, 5, 5, 5});
  for (int number = 0; number < 20; ++number) pull();
  EXPECT_EQ(aside(), kAll);
  make({4, 4, 50, 50});
  for (int number = 0; number < 20; ++number) pull();
  EXPECT_EQ(aside(), 0b11u) << "half of them";
}

TEST_F(RailRatesTest, OneIsLeftHowFewThereMayBe) {
  make({4, 50});
  set_slow_rail_aside();
  rails.resize(1);  // a connection on which the other has no lane
  EXPECT_EQ(aside(), kAll);
}

TEST_F(RailRatesTest, ARailThatIsSetAsideIsTriedByOnePullLessAndLess) {
  make({4, 50});
  set_slow_rail_aside();
  std::vector<int64_t> pauses;
  for (int64_t last = now; pauses.size() < 8;) {
    const RailChoice choice = pull();
    EXPECT_EQ(choice.aside ^ choice.trial, kSlow);
    if (choice.trial != 0) {
      pauses.push_back((now - last) / kOneSecond);
      last = now;
    }
    now += kOneSecond / 10;
  }
  EXPECT_EQ(pauses, (std::vector<int64_t>{10, 20, 40, 80, 160, 300, 300, 300}));
  EXPECT_EQ(rates.num_set_aside(), 1u) << "it was never used in between";
}

TEST_F(RailRatesTest, ATrialReadsLittleAndAPullThatMeasuresNothingMakesNone) {
  make({4, 50});
  set_slow_rail_aside();
  now += 10 * kOneSecond;
  EXPECT_EQ(rates.choose(rails, false, now).trial, 0u);
  const RailChoice choice = rates.choose(rails, true, now);
  EXPECT_EQ(choice.trial, kSlow);
  EXPECT_EQ(read(256 << 20, choice)[0].bytes, 2 * kChunk);
  EXPECT_EQ(rates.choose(rails, true, now).trial, 0u) << "another one does meanwhile";
  EXPECT_EQ(rates.choose(rails, true, now + 20 * kOneSecond).trial, kSlow) << "which told nothing";
}

TEST_F(RailRatesTest, ARailThatHasRecoveredIsUsedAgainAtItsFirstTrial) {
  make({4, 50});
  set_slow_rail_aside();
  try_slow_rail_at(20);
  EXPECT_EQ(aside(), kAll);
  bytes_per_ns[0] = 10;  // less than a third, and more than a tenth
  for (int number = 0; number < 20; ++number) pull();
  EXPECT_EQ(aside(), kAll);
}

TEST_F(RailRatesTest, ARailThatCameBackIsSetAsideAfterThreePullsAgain) {
  make({4, 50});
  set_slow_rail_aside();
  try_slow_rail_at(50);
  bytes_per_ns[0] = 4;
  for (uint32_t number = 0; number < RailRates::kPulls; ++number) {
    EXPECT_EQ(aside(), kAll) << number;
    pull();
  }
  EXPECT_EQ(aside(), kSlow);
}

TEST_F(RailRatesTest, ARailBetweenBothLimitsStaysWhereItIs) {
  make({4, 50});
  set_slow_rail_aside();
  try_slow_rail_at(10);
  EXPECT_EQ(aside(), kSlow);
}

/// The worst rail is fast when it is tried, and slow when it is used.
TEST_F(RailRatesTest, ARailThatPassesItsTrialsAndFailsItsWorkIsTriedLessAndLess) {
  make({4, 50});
  int64_t slow_pulls = 0;
  for (const int64_t end = now + 3600 * kOneSecond; now < end; now += kOneSecond) {
    const bool used = rates.choose(rails, false, now).aside == 0;
    slow_pulls += used;
    bytes_per_ns[0] = used ? 4 : 50;
    pull();
  }
  EXPECT_EQ(rates.num_set_aside(), 16u);
  EXPECT_LE(slow_pulls, 16 * (RailRates::kPulls + 1));
}

TEST_F(RailRatesTest, WhatHasWorkedForAsLongAsItsPauseIsForgiven) {
  make({4, 50});
  const auto recover = [&] {
    bytes_per_ns[0] = 50;
    while (aside() != 0) {
      now += kOneSecond;
      pull();
    }
    bytes_per_ns[0] = 4;
  };
  set_slow_rail_aside();
  recover();
  set_slow_rail_aside();
  now += 19 * kOneSecond;
  EXPECT_EQ(pull().trial, 0u) << "it was set aside again at once";
  recover();
  now += 60 * kOneSecond;
  set_slow_rail_aside();
  now += 10 * kOneSecond;
  EXPECT_EQ(pull().trial, kSlow);
}

TEST_F(RailRatesTest, PullsThatBeganBeforeItWasSetAsideAreNoTrials) {
  make({4, 50});
  set_slow_rail_aside();
  for (int number = 0; number < 10; ++number) rates.add(rails, read(256 << 20, {}), {}, now);
  now += 10 * kOneSecond;
  EXPECT_EQ(pull().trial, kSlow);
}

TEST_F(RailRatesTest, ANewConnectionKnowsTheRailByItsName) {
  make({4, 50});
  set_slow_rail_aside();
  std::ranges::reverse(rails);
  EXPECT_EQ(aside(), 0b10u);
  for (int number = 0; number < 1000; ++number) {  // names that an owner makes up
    std::vector<Rail> strange = rails;
    strange[0].name += std::to_string(number);
    rates.add(strange, std::vector<RailWork>{{2 * kChunk, kOneSecond}, {2 * kChunk, 1000}}, {}, now);
  }
  EXPECT_EQ(aside(), kAll) << "the oldest make room";
}

using by_hand::TransferTest;

struct MeasuredTransferTest : TransferTest {
  std::shared_ptr<const std::vector<Rail>> rails =
      std::make_shared<const std::vector<Rail>>(std::vector<Rail>{
          {"a:1->b:1", 0b01, by_hand::kBlockBytes / 2}, {"c:1->d:1", 0b10, by_hand::kBlockBytes / 2}});

  std::unique_ptr<Transfer> measured(const RailChoice& choice) {
    auto transfer = start();
    transfer->attach();
    transfer->measure(rails, choice);
    return transfer;
  }
};

TEST_F(MeasuredTransferTest, ARailOnTrialTakesEnoughAndNoMoreWhileOthersAreLeft) {
  auto transfer = measured({.trial = 0b01});
  EXPECT_EQ(transfer->next(by_hand::kOneOp, false, 0, 1).kind, by_hand::Kind::kReads);
  EXPECT_EQ(transfer->next(by_hand::kOneOp, false, 0, 2).kind, by_hand::Kind::kNone);
  const std::array others{transfer->next(by_hand::kOneOp, false, 1, 3),
                          transfer->next(by_hand::kOneOp, false, 1, 3)};
  for (const Step& other : others) {
    ASSERT_EQ(other.kind, by_hand::Kind::kReads);
    EXPECT_EQ(other.lane, 1u);
    transfer->dropped(other, 4);
  }
  EXPECT_EQ(transfer->next(by_hand::kOneOp, false, 0, 5).kind, by_hand::Kind::kNone);
  transfer->detach_broken(Status::Unreachable("lane 1 broke"), 6);
  for (size_t left = others.size(); left > 0; --left) {
    const Step again = transfer->next(by_hand::kOneOp, false, 0, 7);
    EXPECT_EQ(again.kind, by_hand::Kind::kReads);
    EXPECT_EQ(again.lane, 0u);
  }
}

TEST_F(MeasuredTransferTest, ATrialIsAsManyReadsAsBringEnough) {
  rails = std::make_shared<const std::vector<Rail>>(
      std::vector<Rail>{{"a:1->b:1", 0b01, by_hand::kBlockBytes}, {"c:1->d:1", 0b10, by_hand::kBlockBytes}});
  auto transfer = measured({.trial = 0b01});
  for (int read = 0; read < 2; ++read) {
    EXPECT_EQ(transfer->next(by_hand::kOneOp, false, 0, 1).kind, by_hand::Kind::kReads) << read;
  }
  EXPECT_EQ(transfer->next(by_hand::kOneOp, false, 0, 2).kind, by_hand::Kind::kNone);
}

TEST_F(MeasuredTransferTest, ARailIsAsFastAsItsBytesFromTheFirstReadToTheEndOfTheLast) {
  path_stats = std::make_shared<PathStats>();
  const auto pull = [&](int64_t slow_ns) {  // the other rail takes 200 ns for twice the bytes
    auto transfer = measured({});
    const Step slow = transfer->next(by_hand::kOneOp, false, 0, 1'000);
    for (const int64_t at : {2'000, 2'150}) {
      transfer->ended(transfer->next(by_hand::kOneOp, false, 1, at), {}, at + 50);
    }
    transfer->ended(slow, {}, 1'000 + slow_ns);
    slot_says(by_hand::kNonce);
    transfer->ended(transfer->next(by_hand::kOneOp, false, 0, 3'000), {}, 3'100);
    transfer->ended(transfer->next(by_hand::kOneOp, false, 0, 3'100), {}, 3'200);
    ASSERT_EQ(transfer->state(), TransferState::kSettled);
  };
  for (uint32_t number = 0; number < RailRates::kPulls; ++number) pull(990);
  EXPECT_EQ(path_stats->counts().rails_set_aside, 0u);
  for (uint32_t number = 0; number < RailRates::kPulls; ++number) pull(1'010);
  EXPECT_EQ(path_stats->counts().rails_set_aside, 1u);
  EXPECT_TRUE(path_stats->rails().is_aside((*rails)[0].name));
}

}  // namespace
}  // namespace kvlink

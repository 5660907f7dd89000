// SPDX-License-Identifier: Apache-2.0
// Whoever holds a lane sees what others wait for. It wakes the driver when it lets go, and a driver that met
// a held lane knows that it knows nothing.
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "cpp/engine/lane_peers.h"
#include "engine/progress_thread.h"

namespace kvlink {
namespace {

using namespace lane_tests;

/// Calls that hold a lane for a moment and are not the driver's.
struct Holder {
  const char* name;
  std::function<void(Lane&, LaneTest&)> call;
};
std::ostream& operator<<(std::ostream& out, const Holder& holder) { return out << holder.name; }

struct HeldLaneTest : LaneTest, ::testing::WithParamInterface<Holder> {
  void hold() { GetParam().call(*lanes[0], *this); }
};

void time_read(Lane& lane, LaneTest& test) {
  ReadOp op{0, 8, kLeases, 0, 1};
  Segment segment{reinterpret_cast<std::byte*>(test.words.get()), 8, 1};
  ASSERT_TRUE(lane.time_read({std::span(&op, 1), &segment}).ok());
}

/// Those that check a lane even if it is idle.
const Holder kLooking[] = {{"settle", [](Lane& lane, LaneTest&) { lane.settle({kSlot, 1}); }},
                           {"check_idle", [](Lane& lane, LaneTest&) { lane.check_idle(true); }},
                           {"try_check_idle", [](Lane& lane, LaneTest&) { lane.check_idle(false); }},
                           {"time_read", time_read}};
const Holder kHelp{"help", [](Lane& lane, LaneTest& test) { lane.drive_for(*test.transfer, INT64_MAX); }};
const auto name_of = [](const auto& info) { return info.param.name; };

struct LookedAtLaneTest : HeldLaneTest {};
INSTANTIATE_TEST_SUITE_P(Looking, HeldLaneTest, ::testing::ValuesIn(kLooking), name_of);
INSTANTIATE_TEST_SUITE_P(Helping, HeldLaneTest, ::testing::Values(kHelp), name_of);
INSTANTIATE_TEST_SUITE_P(Looking, LookedAtLaneTest, ::testing::ValuesIn(kLooking), name_of);

TEST_P(HeldLaneTest, WakesTheDriverOfAPullThatIsUnderWay) {
  start({window(16 << 10), window(48 << 10)});
  for (const auto& lane : lanes) lane->drive();  // no lane can end the pull without the other
  const int before = driver->wakes;
  hold();
  ASSERT_FALSE(transfer->done());
  EXPECT_GT(driver->wakes, before);
  drive();
  expect_valid();
}

TEST_P(HeldLaneTest, LetsAnIdleDriverSleep) {
  start({window(16 << 10), window(48 << 10)}, false);
  hold();
  if (lanes[0]->has_unflushed_writes()) lanes[0]->drive();
  EXPECT_EQ(driver->wakes, 0);
}

TEST_P(LookedAtLaneTest, WakesTheDriverOfAPullThatCameMeanwhile) {
  start({window(16 << 10), window(48 << 10)}, false);
  bool looked = false;
  Lane::Driven driven;
  endpoint(0).on_poll_ = [&] {
    if (std::exchange(looked, true)) return;
    lanes[0]->submit(transfer);
    std::thread([&] { driven = lanes[0]->drive(); }).join();
    driver->wakes = 0;  // that was the driver, which found nothing to do
  };
  hold();
  EXPECT_TRUE(driven.held);
  EXPECT_GT(driver->wakes, 0);
}

TEST_F(LaneTest, ADriverThatMeetsAHeldLaneSleepsForATickAtMost) {
  start({window(16 << 10), window(48 << 10)});
  Lane::Rest rest = Lane::Rest::kLong;
  EXPECT_EQ(lanes[0]->arm(), Lane::Rest::kLong);
  endpoint(0).on_poll_ = [&] { std::thread([&] { rest = lanes[0]->arm(); }).join(); };
  lanes[0]->settle({kSlot, 1});
  EXPECT_EQ(rest, Lane::Rest::kShort);
}

TEST_F(LaneTest, AnInlinePullThatIsNotOverWakesTheDriver) {
  start({window(16 << 10), window(48 << 10)}, false);
  ASSERT_TRUE(lanes[0]->run_inline(transfer, 0));
  EXPECT_EQ(driver->wakes, 1);
}

TEST_F(LaneTest, ABareReadLeavesNothingUnderWay) {
  start({window(16 << 10), window(48 << 10)}, false);
  time_read(*lanes[0], *this);
  broken[0] = true;
  lanes[0]->check_idle(true);
  EXPECT_TRUE(lanes[0]->broken()) << "nobody checks an idle lane with posts";
}

TEST_F(LaneTest, ASettleThatIsUnderWayIsLookedFor) {
  start({window(16 << 10), window(48 << 10)}, false);
  ASSERT_TRUE(lanes[0]->settle({kSlot, 1}));
  EXPECT_TRUE(lanes[0]->has_unflushed_writes());
  EXPECT_EQ(driver->doze_wakes, 1);
  lanes[0]->drive();
  EXPECT_FALSE(lanes[0]->has_unflushed_writes());
}

/// It may copy for another pull meanwhile.
TEST_F(LaneTest, ASettleDoesNotWaitForWhoHoldsTheLane) {
  start({window(16 << 10), window(48 << 10)}, false);
  bool queued = false;
  endpoint(0).on_poll_ = [&] {
    if (std::exchange(queued, true)) return;
    std::thread([&] { EXPECT_TRUE(lanes[0]->settle({kSlot, 7})); }).join();
    EXPECT_GT(driver->wakes, 0);
    EXPECT_TRUE(endpoint(0).words_.empty());
    driver->doze_wakes = 0;
  };
  lanes[0]->check_idle(true);
  EXPECT_TRUE(lanes[0]->has_unflushed_writes());
  EXPECT_EQ(driver->doze_wakes, 1) << "who held it says that work is left";
  lanes[0]->drive();
  lanes[0]->drive();
  EXPECT_EQ(endpoint(0).words_, (std::vector{std::array<uint64_t, 2>{settled_offset(kSlot), 7}}));
  EXPECT_FALSE(lanes[0]->has_unflushed_writes());
  EXPECT_TRUE(lanes[0]->take_lost().empty());
}

TEST_F(LaneTest, AQueuedSettleThatDiesWithItsLaneIsReturnedOnce) {
  start({window(16 << 10), window(48 << 10)}, false);
  int lost = 0;
  lanes[0]->on_lost([&] { ++lost; });
  bool queued = false;
  endpoint(0).on_poll_ = [&] {
    if (std::exchange(queued, true)) return;
    std::thread([&] {
      EXPECT_TRUE(lanes[0]->settle({kSlot, 7}) && lanes[0]->settle({kSlot + 1, 8}));
    }).join();
    broken[0] = true;
  };
  lanes[0]->check_idle(true);
  EXPECT_EQ(lost, 1);
  const std::vector<LaneWord> words = lanes[0]->take_lost();
  ASSERT_EQ(words.size(), 2u);
  EXPECT_EQ(words[0].slot, kSlot);
  EXPECT_EQ(words[1].value, 8u);
  EXPECT_TRUE(lanes[0]->take_lost().empty());
  EXPECT_FALSE(lanes[0]->settle({kSlot, 9}));
  EXPECT_TRUE(endpoint(0).words_.empty());
}

TEST_F(LaneTest, ASleepingThreadLetsGoOfALaneThatIsRemoved) {
  start({window(16 << 10), window(48 << 10)}, false);
  const std::shared_ptr<ProgressThread> progress = *ProgressThread::make();
  std::shared_ptr<Lane> lane = std::move(lanes[0]);
  progress->add(lane);
  // It sleeps once its own copy, the third, stays.
  for (int seen = 0; seen < 2000; std::this_thread::yield()) seen = lane.use_count() == 3 ? seen + 1 : 0;
  progress->remove(lane);
  const std::weak_ptr<Lane> left = std::exchange(lane, nullptr);
  while (!left.expired()) std::this_thread::yield();
  progress->stop();
}

TEST_F(LaneTest, AThreadSleepsWithoutAskingIdleLanesForASign) {
  start({window(16 << 10), window(48 << 10)}, false);
  const std::shared_ptr<ProgressThread> progress = *ProgressThread::make();
  const std::shared_ptr<Lane> lane = std::move(lanes[0]);
  progress->add(lane);
  for (int seen = 0; seen < 2000; std::this_thread::yield()) seen = lane.use_count() == 3 ? seen + 1 : 0;
  progress->stop();
  EXPECT_EQ(static_cast<FakeEndpoint&>(lane->endpoint()).num_arms_, 0u);
}

TEST_F(LaneTest, WhyALaneBrokeIsToldWithoutHoldingIt) {
  start({window(16 << 10), window(48 << 10)});
  std::string why = "not told";
  endpoint(0).on_poll_ = [&] { why = lanes[0]->why_broken().what(); };
  lanes[0]->settle({kSlot, 1});
  EXPECT_EQ(why, "");
  lanes[0]->close("closed");
  EXPECT_EQ(lanes[0]->why_broken().what(), "closed");
}

/// The other lane has nothing under way: nobody but the broken one can tell it that there is work.
TEST_F(LaneTest, ALaneThatBreaksWakesTheDriversOfTheOthers) {
  start({kWhole, kWhole});
  lanes[0]->drive();
  lanes[1]->drive();
  ASSERT_EQ(endpoint(1).num_posts(), 0u);
  broken[0] = true;
  driver_wakes = 0;
  lanes[0]->drive();
  EXPECT_GT(driver_wakes, 0);
  drive();
  expect_valid();
}

TEST_F(LaneTest, ALaneWhoseReadFailsWakesTheDriversOfTheOthers) {
  start({window(16 << 10), window(48 << 10)});
  for (const auto& lane : lanes) lane->drive();
  ASSERT_GT(endpoint(1).num_posts(), 0u);
  endpoint(0).refusal_ = Status::AccessDenied("the key was revoked");
  driver_wakes = 0;
  while (!transfer->stopping()) lanes[0]->drive();
  EXPECT_EQ(driver_wakes, 1);
}

}  // namespace
}  // namespace kvlink

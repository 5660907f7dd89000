// SPDX-License-Identifier: Apache-2.0
// Lanes that share one pull: each moves bytes by its window, and a broken one loses nothing.
#include "engine/lane.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "cpp/engine/lane_peers.h"
#include "engine/connection.h"

namespace kvlink {
namespace {

using namespace lane_tests;
using namespace std::chrono_literals;

TEST_F(LaneTest, LanesShareAPullByTheirWindows) {
  start({window(16 << 10), window(48 << 10)});
  drive();
  expect_valid();
  EXPECT_EQ(endpoint(0).num_unguarded_ + endpoint(1).num_unguarded_, 0u);
  EXPECT_EQ(landed[0] + landed[1], owner_blocks.size() * kBlockBytes);
  EXPECT_NEAR(double(landed[1]) / double(landed[0]), 3.0, 0.2);
}

TEST_F(LaneTest, AnEndpointThatBreaksItsContractCostsItsLaneAndNotTheProcess) {
  start({kWhole, kWhole});
  endpoint(0).stray_ = {{999, {}}};
  drive();
  EXPECT_TRUE(lanes[0]->broken());
  EXPECT_NE(lanes[0]->why_broken().what().find("collect() needs"), std::string::npos);
  EXPECT_FALSE(lanes[1]->broken());
  expect_valid();
}

TEST_F(LaneTest, EachLaneAnnouncesThePullBeforeItsFirstReadAndWithdrawsItAtTheEnd) {
  readers = std::make_shared<AnnouncedReaders>(42);
  start({window(16 << 10), window(48 << 10)});
  drive();
  expect_valid();
  const std::array<uint64_t, 2> announced{reader_offset(kSlot), readers->announcement(kNonce)};
  const std::array<uint64_t, 2> withdrawn{reader_offset(kSlot), readers->withdrawal(kNonce)};
  for (size_t lane = 0; lane < 2; ++lane) {
    EXPECT_EQ(endpoint(lane).words_, std::vector{announced});
    EXPECT_EQ(endpoint(lane).num_posts_before_word_, 0u);
    lanes[lane]->drive();
    EXPECT_EQ(endpoint(lane).words_, (std::vector{announced, withdrawn}));
  }
}

TEST_F(LaneTest, APullThatCannotBeAnnouncedReadsNothing) {
  readers = std::make_shared<AnnouncedReaders>(42);
  start({kWhole, kWhole});
  endpoint(0).write_refusal_ = endpoint(1).write_refusal_ = Status::AccessDenied("the key was revoked");
  drive();
  EXPECT_EQ(transfer->status().code(), Code::kAccessDenied);
  EXPECT_EQ(landed[0] + landed[1], 0u);
}

TEST_F(LaneTest, AReaderAtASharedSeatStoresNoWord) {
  readers = std::make_shared<AnnouncedReaders>(42);
  settle_nonce = kSharedSeat;
  start({window(16 << 10), window(48 << 10)});
  drive();
  expect_valid();
  for (const auto& lane : lanes) lane->drive();
  EXPECT_TRUE(endpoint(0).words_.empty() && endpoint(1).words_.empty());
}

TEST_F(LaneTest, APullThatSettledOrHasSiblingsIsNotWithdrawn) {
  for (const bool settles : {false, true}) {
    readers = std::make_shared<AnnouncedReaders>(42);
    settle_nonce = settles ? kNonce + 1 : 0;
    lanes.clear();
    start({window(16 << 10), window(48 << 10)});
    if (!settles) readers->begin(kNonce);
    drive();
    for (const auto& lane : lanes) lane->drive();
    size_t num_words = 0;
    for (size_t lane = 0; lane < 2; ++lane) num_words += endpoint(lane).words_.size();
    EXPECT_EQ(num_words, settles ? 3u : 2u) << "announcements, and a settle";
    EXPECT_EQ(readers->end(kNonce, [] { return false; }), settles) << "the sibling reads on";
  }
}

TEST_F(LaneTest, ACancelledPullIsWithdrawnOnceItsReadsHaveEnded) {
  readers = std::make_shared<AnnouncedReaders>(42);
  start({window(16 << 10), kWhole});
  lanes[0]->drive();
  transfer->cancel();
  lanes[0]->drive();  // its reads are under way, and cannot be called back
  EXPECT_EQ(endpoint(0).words_.size(), 1u);
  for (int round = 0; round < 8; ++round) lanes[0]->drive();
  EXPECT_TRUE(transfer->done());
  ASSERT_EQ(endpoint(0).words_.size(), 2u);
  EXPECT_EQ(endpoint(0).words_[1][1], readers->withdrawal(kNonce));
}

TEST_F(LaneTest, PartsThatAreLargerThanAChunkAreWeighedToo) {
  Window narrow = window(4 << 10), wide = window(12 << 10);
  narrow.depth = wide.depth = 64;
  narrow.chunk_bytes = wide.chunk_bytes = 1;  // every block exceeds it
  start({narrow, wide});
  drive();
  expect_valid();
  EXPECT_NEAR(double(landed[1]) / double(landed[0]), 3.0, 0.2);
}

TEST_F(LaneTest, AStoppedLaneHoldsBackItsWindowAlone) {
  start({window(16 << 10), window(48 << 10)});
  lanes[0]->drive();
  for (int round = 0; round < 10'000; ++round) lanes[1]->drive();
  EXPECT_EQ(landed[1], owner_blocks.size() * kBlockBytes - (16 << 10));
  drive();
  expect_valid();
}

TEST_F(LaneTest, WhoWaitsMovesTheBytesWithoutADriver) {
  start({window(16 << 10), window(48 << 10)});
  EXPECT_FALSE(transfer->wait(0));
  EXPECT_EQ(landed[0], 0u);
  EXPECT_TRUE(transfer->wait(-1));
  expect_valid();
  EXPECT_EQ(landed[1], 0u);
}

TEST_F(LaneTest, WhoWaitsDoesNotSpinForWhatAnotherLaneHas) {
  start({window(16 << 10), window(48 << 10)});
  lanes[1]->drive();
  EXPECT_TRUE(lanes[0]->drive_for(*transfer, INT64_MAX));
  EXPECT_FALSE(transfer->done());
  EXPECT_GT(landed[0], 0u);
  EXPECT_FALSE(lanes[0]->drive_for(*transfer, 0)) << "the time was over";
  drive();
  expect_valid();
}

/// The last pull under its lease withdraws the announcement.
TEST_F(LaneTest, APullThatEndsWithItsLaneCountsNoMore) {
  readers = std::make_shared<AnnouncedReaders>(42);
  start({kWhole, kWhole}, false);
  lanes[0]->submit(transfer);
  lanes[0]->drive();
  readers->begin(kNonce);  // another pull, of another lane
  broken[0] = true;
  lanes[0]->drive();
  EXPECT_EQ(transfer->status().code(), Code::kPeerUnreachable);
  EXPECT_TRUE(readers->end(kNonce, [] { return true; }));
}

/// A connection of one lane to the owner of the fixture.
struct ConnectionTest : LaneTest {
  static constexpr uint64_t kEpoch = 42;
  std::shared_ptr<ProgressThread> thread = *ProgressThread::make();
  std::shared_ptr<HostMemory> memory = *HostMemory::allocate(4096, false);
  FakeEndpoint* fake = nullptr;
  std::shared_ptr<Connection> connection;

  void SetUp() override {
    owner.leases[0] = LeaseTableHeader::kMagic;
    owner.leases[1] = kEpoch;
    auto endpoint = std::make_unique<FakeEndpoint>(owner, Traits{.window = kWhole}, landed[0], broken[0]);
    fake = endpoint.get();
    std::vector<LaneEnd> ends;
    ends.push_back({std::move(endpoint)});
    connection =
        std::make_shared<Connection>(std::move(ends), nullptr, 0, std::make_shared<ScratchPool>(memory, 1),
                                     std::vector{thread}, std::make_shared<PathStats>());
  }
  void TearDown() override {
    connection->close();
    thread->stop();
  }
  void establish() {
    const auto regions =
        connection->establish(0, {"reply"}, {"pool"}, {"slots", "words"}, kEpoch, INT64_MAX / 4);
    ASSERT_TRUE(regions.ok()) << regions.status().what();
  }
  std::shared_ptr<Transfer> pull(const LeaseSeat& seat) {
    const Layout layout{kNumBlocks, 1, 0, 1, kBlockBytes, kBlockBytes, kBlockBytes, kBlockBytes, {{0, 0, 0}}};
    PullRequest request;
    request.planner =
        *Planner::make(layout, layout, {{mine.data(), mine.size()}}, {mine.size()}, {kPool}, {});
    owner_blocks = reader_blocks = {1, 2};
    request.owner_blocks = owner_blocks;
    request.reader_blocks = reader_blocks;
    request.tokens = {0, 2};
    request.seat = seat;
    request.deadline_ns = INT64_MAX;
    return connection->pull(request);
  }
};

TEST_F(ConnectionTest, IsNotLookedAfterBeforeItIsEstablished) {
  bool polled = false;
  fake->on_poll_ = [&] { polled = true; };
  connection->look_after();
  EXPECT_FALSE(polled);
}

TEST_F(ConnectionTest, ThatBrokeWhileItWasIdleCarriesNoPull) {
  establish();
  broken[0] = true;
  EXPECT_EQ(pull({kSlot, kNonce, 0}), nullptr);
  EXPECT_TRUE(connection->broken());
}

TEST_F(ConnectionTest, RefusesATicketBeforeItAsksForThePool) {
  establish();
  int asked = 0;
  connection->check_pulls([&asked] {
    ++asked;
    return Status::Config("the pool has moved");
  });
  EXPECT_NE(pull({kSlot, 1, 0})->status().what().find("forged"), std::string::npos);
  EXPECT_EQ(asked, 0);
  EXPECT_EQ(pull({kSlot, kNonce, 0})->status().what(), "the pool has moved");
  EXPECT_EQ(asked, 1);
}

/// The lanes of a path that works are no laggards, however busy this machine is.
TEST_F(ConnectionTest, WaitsForTheOtherLanesOfAPathThatWorks) {
  const char* const paths[] = {"a:1->a:1", "a:1->a:1", "b:1->b:1"};
  const int64_t late_ns = now_ns() + 300'000'000;  // longer than laggards are waited for
  std::vector<LaneEnd> ends;
  for (const char* const path : paths) {
    auto endpoint = std::make_unique<FakeEndpoint>(
        owner, Traits{.path = path, .window = kWhole, .nic_driven = true}, landed[0], broken[0]);
    FakeEndpoint* const late = endpoint.get();
    if (ends.size() > 0) late->late_polls_ = UINT32_MAX - 1;
    if (ends.size() == 1) late->on_poll_ = [=] { late->late_polls_ *= now_ns() < late_ns; };
    ends.push_back({std::move(endpoint)});
  }
  connection->close();
  connection =
      std::make_shared<Connection>(std::move(ends), nullptr, 0, std::make_shared<ScratchPool>(memory, 1),
                                   std::vector{thread}, std::make_shared<PathStats>());
  const std::vector<std::string> replies(3, "reply");
  ASSERT_TRUE(connection->establish(0, replies, {"pool"}, {"slots", "words"}, kEpoch, INT64_MAX / 4).ok());
  EXPECT_EQ(connection->num_missing(), 1u);
}

TEST_F(LaneTest, LanesThatGoAwayEndTheirPulls) {
  start({window(16 << 10), window(48 << 10)});
  lanes[0]->drive();
  lanes.clear();
  EXPECT_EQ(transfer->status().code(), Code::kPeerUnreachable);
}

TEST_F(LaneTest, WhoWaitsForTheNetworkDoesNotSpin) {
  start({kWhole, kWhole});
  endpoint(0).late_polls_ = 1000;
  const std::vector<uint32_t> vain = vain_polls();
  expect_valid();
  EXPECT_LE(*std::max_element(vain.begin(), vain.end()), 2u);
}

TEST_F(LaneTest, WhoWaitsLooksOnWhereADeviceHasTheWork) {
  device_driven = true;
  start({kWhole, kWhole});
  endpoint(0).late_polls_ = 1000;
  const std::vector<uint32_t> vain = vain_polls();
  expect_valid();
  EXPECT_GT(*std::max_element(vain.begin(), vain.end()), 10u);
}

TEST_F(LaneTest, AnInlinePullSleepsOnceItsOwnerIsSlow) {
  start({kWhole, kWhole}, false);
  endpoint(0).late_polls_ = UINT32_MAX - 1;
  ASSERT_TRUE(lanes[0]->run_inline(transfer, 20'000'000));
  EXPECT_FALSE(transfer->done());
  EXPECT_LE(endpoint(0).num_arms_, 1u) << "for all the time that is left";
}

TEST_F(LaneTest, OneRoundOnTheCallersThreadPostsAll) {
  device_driven = true;
  start({kWhole, kWhole}, false);
  endpoint(0).late_polls_ = 1000;
  ASSERT_TRUE(lanes[0]->run_inline(transfer, 0));
  EXPECT_FALSE(transfer->done());
  EXPECT_GT(endpoint(0).num_posts(), 0u);
  EXPECT_LE(endpoint(0).num_vain_, 1u);
  drive();
  expect_valid();
}

TEST_F(LaneTest, ALaneThatStandsByFindsOutThatItIsBrokenBeforeAnythingIsHandedToIt) {
  const uint64_t all = owner.pool.size();
  start({window(16 << 10), {.chunk_bytes = UINT32_MAX, .chunk_ops = UINT32_MAX, .depth = 1, .bytes = all}});
  lanes[1]->drive();
  endpoint(0).next_check_ns_ = 1;
  EXPECT_EQ(lanes[0]->drive().wake_at_ns, 1);
  broken[0] = true;
  lanes[0]->drive();
  EXPECT_TRUE(lanes[0]->broken());
  drive();
  expect_valid();
  EXPECT_EQ(landed[0], 0u);
}

TEST_F(LaneTest, ALaneThatStandsByPollsAtOnceAndThenWhenItsEndpointSaidSo) {
  const uint64_t all = owner.pool.size();
  start({window(16 << 10), {.chunk_bytes = UINT32_MAX, .chunk_ops = UINT32_MAX, .depth = 1, .bytes = all}});
  lanes[1]->drive();
  endpoint(0).next_check_ns_ = INT64_MAX - 1;
  for (int round = 0; round < 3; ++round) EXPECT_EQ(lanes[0]->drive().wake_at_ns, INT64_MAX - 1);
  EXPECT_EQ(endpoint(0).num_checks_, 1u);
}

/// This process has no CPU for a while: what it did not see by then is no silence of the owner's.
struct StalledLaneTest : LaneTest, ::testing::WithParamInterface<std::chrono::milliseconds> {
  void SetUp() override { timeout_ns = std::chrono::nanoseconds(GetParam()).count(); }
};
INSTANTIATE_TEST_SUITE_P(ShortDeadline, StalledLaneTest, ::testing::Values(60ms));
INSTANTIATE_TEST_SUITE_P(LongDeadline, StalledLaneTest, ::testing::Values(150ms));

TEST_P(StalledLaneTest, BlamesNotTheOwner) {
  start({kWhole, kWhole});
  endpoint(0).late_polls_ = GetParam() < 100ms ? 1000 : 0;  // the answer comes never, or while nobody looks
  lanes[0]->drive();
  if (endpoint(0).num_posts() == 0) GTEST_SKIP() << "the deadline was over before anything could be posted";
  std::this_thread::sleep_for(300ms);
  lanes[0]->drive();
  EXPECT_TRUE(transfer->stopping());
  EXPECT_FALSE(lanes[0]->broken()) << lanes[0]->why_broken().what();
}

/// A later pull that times out does not blame the owner for the settle.
TEST_F(LaneTest, ASettleThatNobodyAwaitsAsksTheOwnerForNothing) {
  settle_nonce = kNonce + 1;
  start({kWhole, kWhole}, false);
  lanes[0]->submit(transfer);
  while (!transfer->done()) lanes[0]->drive();
  ASSERT_EQ(transfer->state(), TransferState::kSettled);
  endpoint(0).late_polls_ = 1'000'000;  // its store is never answered
  timeout_ns = std::chrono::nanoseconds(150ms).count();
  start({kWhole, kWhole}, false);
  std::this_thread::sleep_for(200ms);
  lanes[0]->submit(transfer);
  lanes[0]->drive();
  EXPECT_EQ(transfer->status().code(), Code::kTimeout);
  EXPECT_FALSE(lanes[0]->broken()) << lanes[0]->why_broken().what();
}

struct BrokenLaneTest : LaneTest, ::testing::WithParamInterface<size_t> {};
INSTANTIATE_TEST_SUITE_P(Narrow, BrokenLaneTest, ::testing::Values(0));
INSTANTIATE_TEST_SUITE_P(Wide, BrokenLaneTest, ::testing::Values(1));

TEST_P(BrokenLaneTest, HandsItsPartToTheOther) {
  const size_t dying = GetParam();
  start({window(16 << 10), window(48 << 10)});
  drive(8);
  const uint64_t before = landed[dying];
  ASSERT_GT(before, 0u);
  broken[dying] = true;
  drive();
  expect_valid();
  EXPECT_EQ(landed[dying], before);
  EXPECT_EQ(landed[0] + landed[1], owner_blocks.size() * kBlockBytes);
}

}  // namespace
}  // namespace kvlink

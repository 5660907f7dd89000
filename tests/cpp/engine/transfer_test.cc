// SPDX-License-Identifier: Apache-2.0
// The state machine of a pull, driven by hand: no endpoint, no thread, no clock.
#include "engine/transfer.h"

#include <set>
#include <string>
#include <tuple>

#include "cpp/engine/transfers_by_hand.h"

namespace kvlink {
namespace {

using namespace by_hand;

TEST_F(TransferTest, UnorderedLaneValidatesOnlyAfterTheDataHasCompleted) {
  auto transfer = start();
  const Step data = transfer->next({1 << 20, 64, 8}, false, 0, 1);
  ASSERT_EQ(data.kind, Kind::kReads);
  EXPECT_EQ(data.num_ops, 3u);
  EXPECT_EQ(transfer->next(kOneOp, false, 0, 1).kind, Kind::kNone);
  transfer->ended(data, {}, 2);
  const Step slot = transfer->next(kOneOp, false, 0, 3);
  ASSERT_EQ(slot.kind, Kind::kSlot);
  slot_says(kNonce);
  transfer->ended(slot, {}, 4);
  EXPECT_FALSE(transfer->done());
  const Step settle = transfer->next(kOneOp, false, 0, 5);
  ASSERT_EQ(settle.kind, Kind::kSettle);
  transfer->ended(settle, {}, 6);
  EXPECT_EQ(transfer->state(), TransferState::kSettled);
  EXPECT_EQ(transfer->stats().bytes, 3u * kBlockBytes);
}

TEST_F(TransferTest, OrderedLanePostsTheSlotReadBehindTheData) {
  auto transfer = start();
  const Step data = transfer->next({1 << 20, 64, 8}, true, 0, 1);
  const Step slot = transfer->next(kOneOp, true, 0, 1);
  EXPECT_EQ(slot.kind, Kind::kSlot);
  transfer->ended(data, {}, 2);
  slot_says(kNonce);
  transfer->ended(slot, {}, 2);
  EXPECT_EQ(transfer->next(kOneOp, true, 0, 2).kind, Kind::kSettle);
}

TEST_F(TransferTest, ALaneThatBreaksUnderDataAndSlotReadHasBothReadAgain) {
  for (const bool slot_first : {false, true}) {
    auto transfer = start();
    transfer->attach();  // a second lane stands by
    const Step data = transfer->next({1 << 20, 64, 8}, true, 0, 1);
    const Step slot = transfer->next(kOneOp, true, 0, 1);
    ASSERT_EQ(slot.kind, Kind::kSlot);
    transfer->dropped(slot_first ? slot : data, 2);
    transfer->dropped(slot_first ? data : slot, 2);
    transfer->detach(Status::Unreachable("the lane broke"), 2);
    const Step again = transfer->next({1 << 20, 64, 8}, true, 1, 3);
    ASSERT_EQ(again.kind, Kind::kReads);
    EXPECT_EQ(again.num_ops, data.num_ops);
    transfer->ended(again, {}, 4);
    const Step look = transfer->next(kOneOp, true, 1, 5);
    ASSERT_EQ(look.kind, Kind::kSlot);
    slot_says(kNonce);
    transfer->ended(look, {}, 6);
    const Step settle = transfer->next(kOneOp, true, 1, 7);
    EXPECT_EQ(settle.kind, Kind::kSettle);
    EXPECT_EQ(transfer->stats().bytes, 3u * kBlockBytes);
    transfer->ended(settle, {}, 8);
  }
}

TEST_F(TransferTest, APullOfNothingIsNotStaged) {
  TransferDriver driver{[] {}, [](const Transfer&, int64_t) {}};
  driver.policy = std::make_shared<StagingPolicy>(StagingCosts{{}, {}, true}, 0);
  PullRequest request;
  request.planner = planner;
  request.owner_blocks = owner;
  request.reader_blocks = reader;
  request.seat = {1, kNonce, kSettle};
  request.deadline_ns = kFar;
  for (const uint32_t tokens : {0u, 3u}) {
    request.tokens = {0, tokens};
    const TransferStats stats = Transfer(request, 0, std::make_shared<TransferDriver>(driver)).stats();
    EXPECT_EQ(stats.staged, tokens > 0);
    EXPECT_EQ(stats.predicted.direct_us > 0 && stats.predicted.staged_us > 0, tokens > 0);
  }
}

TEST_F(TransferTest, APullOfKnownSizeIsPredictedByItsPath) {
  const auto path = std::make_shared<PathStats>();
  PullRequest request;
  request.planner = planner;
  request.owner_blocks = owner;
  request.reader_blocks = reader;
  request.tokens = {0, 3};
  request.seat = {1, kNonce, kSettle};
  request.deadline_ns = kFar;
  const auto driver =
      std::make_shared<TransferDriver>(TransferDriver{[] {}, [](const Transfer&, int64_t) {}});
  EXPECT_EQ(Transfer(request, 0, driver, path).predicted_us(), path->predict_us(3, 3 * kBlockBytes));
  EXPECT_GT(path->predict_us(3, 3 * kBlockBytes), 0);
}

TEST_F(TransferTest, TwoOrderedLanesPromiseNothingToEachOther) {
  auto transfer = start();
  const Step a = transfer->next(kOneOp, true, 0, 1), b = transfer->next(kOneOp, true, 1, 1),
             c = transfer->next(kOneOp, true, 0, 1);
  ASSERT_EQ(c.kind, Kind::kReads);
  EXPECT_EQ(transfer->next(kOneOp, true, 0, 1).kind, Kind::kNone);
  transfer->ended(a, {}, 2);
  transfer->ended(c, {}, 2);
  EXPECT_EQ(transfer->next(kOneOp, true, 0, 2).kind, Kind::kNone);
  transfer->ended(b, {}, 2);
  EXPECT_EQ(transfer->next(kOneOp, true, 0, 2).kind, Kind::kSlot);
}

TEST_F(TransferTest, ASlotReadThatOvertookTheDataIsTakenAgain) {
  auto transfer = start();
  const Step data = transfer->next({1 << 20, 64, 8}, true, 0, 1);
  const Step slot = transfer->next(kOneOp, true, 0, 1);
  slot_says(kNonce);
  transfer->ended(slot, {}, 2);
  EXPECT_FALSE(transfer->done());
  EXPECT_EQ(transfer->next(kOneOp, true, 0, 2).kind, Kind::kNone);
  transfer->ended(data, {}, 3);
  EXPECT_EQ(transfer->next(kOneOp, true, 0, 3).kind, Kind::kSlot);
}

TEST_F(TransferTest, AnotherNonceIsStaleAndNeverSettles) {
  const std::array<std::pair<uint64_t, StaleReason>, 7> found{{{0, StaleReason::kNeverGranted},
                                                               {1, StaleReason::kSettled},
                                                               {2, StaleReason::kExpired},
                                                               {3, StaleReason::kAborted},
                                                               {4, StaleReason::kEvicted},
                                                               {kNonce + 1, StaleReason::kReused},
                                                               {kSettle, StaleReason::kReused}}};
  std::set<std::string> sentences;
  for (const auto& [nonce, why] : found) {
    auto transfer = start();
    transfer->ended(transfer->next({1 << 20, 64, 8}, false, 0, 1), {}, 2);
    const Step slot = transfer->next(kOneOp, false, 0, 2);
    slot_says(nonce);
    transfer->ended(slot, {}, 3);
    EXPECT_EQ(transfer->status().code(), Code::kStaleBlocks);
    EXPECT_EQ(transfer->status().stale(), why);
    sentences.insert(transfer->status().what());
    EXPECT_EQ(transfer->next(kOneOp, false, 0, 3).kind, Kind::kNone);
  }
  EXPECT_EQ(sentences.size(), 6u);
}

TEST_F(TransferTest, ASharedSeatIsValidatedAndNotSettled) {
  const LeaseSeat shared{1, kNonce, kSharedSeat};
  for (const uint64_t found : {kNonce, uint64_t{4}}) {
    auto transfer = start(StreamUnit::kNone, kFar, shared);
    transfer->ended(transfer->next({1 << 20, 64, 8}, false, 0, 1), {}, 2);
    const Step slot = transfer->next(kOneOp, false, 0, 2);
    ASSERT_EQ(slot.kind, Kind::kSlot);
    slot_says(found);
    transfer->ended(slot, {}, 3);
    EXPECT_TRUE(transfer->done());
    EXPECT_EQ(transfer->next(kOneOp, false, 0, 3).kind, Kind::kNone);
    EXPECT_EQ(transfer->status().ok(), found == kNonce);
    EXPECT_EQ(transfer->status().stale(), found == 4 ? StaleReason::kEvicted : StaleReason::kUnknown);
    EXPECT_FALSE(transfer->stats().settled);
  }
}

TEST_F(TransferTest, ASeatThatNoLeaseCanHaveIsRefusedBeforeTheFirstRead) {
  const std::array<LeaseSeat, 6> made_up{{{0, LeaseTableHeader::kMagic, 0},
                                          {1, 0, 0},
                                          {1, 3, 0},
                                          {1, kSmallestNonce - 1, kSettle},
                                          {1, kNonce, 2},
                                          {1, kNonce, kSmallestNonce - 1}}};
  for (const StreamUnit stream : {StreamUnit::kNone, StreamUnit::kBlocks}) {
    for (const LeaseSeat& seat : made_up) {
      auto transfer = start(stream, kFar, seat);
      EXPECT_EQ(transfer->status().code(), Code::kConfig);
      EXPECT_EQ(transfer->next(kOneOp, false, 0, 1).kind, Kind::kNone);
    }
    EXPECT_FALSE(start(stream, kFar, {1, kSmallestNonce, 0})->done());
    EXPECT_FALSE(start(stream, kFar, {1, kSmallestNonce, kSmallestNonce})->done());
  }
}

TEST_F(TransferTest, WhoOnlyLooksDoesNotDriveTheLanes) {
  auto transfer = start();
  EXPECT_FALSE(transfer->wait(0));
  EXPECT_EQ(drives, 0);
  EXPECT_FALSE(transfer->wait(1));
  EXPECT_EQ(drives, 1);
}

TEST_F(TransferTest, AnErrorWaitsForTheOtherStepsToBeDropped) {
  auto transfer = start();
  const Step a = transfer->next(kOneOp, false, 0, 1), b = transfer->next(kOneOp, false, 0, 1);
  transfer->ended(a, Status::AccessDenied("no"), 2);
  EXPECT_TRUE(transfer->stopping());
  EXPECT_FALSE(transfer->done());
  transfer->dropped(b, 3);
  EXPECT_EQ(transfer->status().code(), Code::kAccessDenied);
}

TEST_F(TransferTest, ADroppedChunkIsTakenByAnotherLane) {
  auto transfer = start();
  transfer->attach();
  const Step lost = transfer->next({1 << 20, 64, 8}, false, 0, 1);
  transfer->dropped(lost, 2);
  transfer->detach(Status::Unreachable("lane 0 broke"), 2);
  EXPECT_FALSE(transfer->done());
  const Step again = transfer->next(kOneOp, false, 1, 3);
  EXPECT_EQ(again.kind, Kind::kReads);
  EXPECT_EQ(again.num_ops, lost.num_ops);
  transfer->dropped(again, 4);
  transfer->detach(Status::Unreachable("lane 1 broke"), 4);
  EXPECT_EQ(transfer->status().code(), Code::kPeerUnreachable);
}

TEST_F(TransferTest, CancelEndsOnlyWhenNothingIsInFlight) {
  auto transfer = start();
  const Step data = transfer->next(kOneOp, false, 0, 1);
  transfer->cancel();
  EXPECT_FALSE(transfer->done());
  transfer->dropped(data, 2);
  EXPECT_EQ(transfer->status().code(), Code::kCancelled);
}

TEST_F(TransferTest, ExpiryBeforeAnythingWasPostedEndsAtOnce) {
  auto transfer = start();
  transfer->expire(5);
  EXPECT_EQ(transfer->status().code(), Code::kTimeout);
}

TEST_F(TransferTest, AnExpiryWakesTheOtherLanesThatHaveReads) {
  for (const bool shared : {false, true}) {
    auto transfer = start();
    if (shared) transfer->attach();
    const Step data = transfer->next(kOneOp, false, 0, 1);
    wakes = 0;
    transfer->expire(5);
    EXPECT_FALSE(transfer->done());
    EXPECT_EQ(wakes, shared);
    transfer->dropped(data, 6);
    EXPECT_EQ(transfer->status().code(), Code::kTimeout);
  }
}

TEST_F(TransferTest, AnExpiryTellsWhoWasLate) {
  for (const uint64_t ready : {0, 2}) {
    auto transfer = start(StreamUnit::kBlocks);
    const Step slot = transfer->next(kOneOp, false, 0, 1);
    slot_says(kNonce, ready);
    transfer->ended(slot, {}, 2);
    if (ready > 0) transfer->ended(transfer->next(kOneOp, false, 0, 3), {}, 4);
    transfer->expire(5);
    const std::string why = transfer->status().what();
    EXPECT_EQ(why.find("before the owner had written anything") == why.npos, ready > 0) << why;
    EXPECT_EQ(why.find("with 64 of 128 bytes landed") == why.npos, ready == 0) << why;
  }
}

TEST_F(TransferTest, AFailedSettleDoesNotUndoValidBytes) {
  auto transfer = start();
  transfer->ended(transfer->next({1 << 20, 64, 8}, false, 0, 1), {}, 2);
  slot_says(kNonce);
  transfer->ended(transfer->next(kOneOp, false, 0, 2), {}, 3);
  transfer->dropped(transfer->next(kOneOp, false, 0, 3), 4);
  EXPECT_EQ(transfer->state(), TransferState::kValid);
}

/// The lane that looked has the blocks to read; the others may be asleep.
TEST_F(TransferTest, BlocksThatBecameReadyWakeTheOtherLanes) {
  auto transfer = start(StreamUnit::kBlocks);
  for (const int wakes_of_one_lane_more : {0, 1}) {
    const Step slot = transfer->next(kOneOp, false, 0, transfer->peek_at_ns());
    ASSERT_EQ(slot.kind, Kind::kSlot);
    slot_says(kNonce, 1 + wakes_of_one_lane_more);
    transfer->ended(slot, {}, 1);
    EXPECT_EQ(wakes, wakes_of_one_lane_more);
    transfer->ended(transfer->next(kOneOp, false, 0, 2), {}, 3);
    transfer->attach();
  }
}

TEST_F(TransferTest, APullThatLooksFirstReadsNothingUnderAnEndedLease) {
  PullRequest request;
  request.looks_first = true;
  for (const bool ended : {true, false}) {
    auto transfer = start(StreamUnit::kNone, kFar, {1, kNonce, kSettle}, request);
    const Step slot = transfer->next(kAllOps, true, 0, 1);
    ASSERT_EQ(slot.kind, Kind::kSlot);
    EXPECT_EQ(transfer->next(kAllOps, true, 1, 1).kind, Kind::kNone);
    slot_says(ended ? static_cast<uint64_t>(LeaseEnd::kAborted) : kNonce);
    transfer->ended(slot, {}, 2);
    EXPECT_EQ(transfer->status().code(), ended ? Code::kStaleBlocks : Code::kOk);
    const Step reads = transfer->next(kAllOps, true, 0, 3);
    EXPECT_EQ(reads.kind, ended ? Kind::kNone : Kind::kReads);
    if (ended) continue;
    transfer->ended(reads, {}, 4);
    transfer->ended(transfer->next(kAllOps, true, 0, 5), {}, 6);
    transfer->ended(transfer->next(kAllOps, true, 0, 7), {}, 8);
    EXPECT_EQ(transfer->state(), TransferState::kSettled);
  }
}

TEST_F(TransferTest, StreamingReadsOnlyWhatIsReadyAndBacksOff) {
  auto transfer = start(StreamUnit::kBlocks);
  Step slot = transfer->next(kOneOp, false, 0, 1);
  ASSERT_EQ(slot.kind, Kind::kSlot);
  slot_says(kNonce, 0);
  transfer->ended(slot, {}, 1);
  EXPECT_EQ(transfer->next(kOneOp, false, 0, 2).kind, Kind::kNone);
  ASSERT_GT(transfer->peek_at_ns(), 2);
  slot = transfer->next(kOneOp, false, 0, transfer->peek_at_ns());
  ASSERT_EQ(slot.kind, Kind::kSlot);
  slot_says(kNonce, 2);
  transfer->ended(slot, {}, 100'000);
  const Step first = transfer->next({1 << 20, 64, 8}, false, 0, 100'000);
  ASSERT_EQ(first.kind, Kind::kReads);
  EXPECT_EQ(transfer->chunk(first, 1).ops.size(), 2u);
  transfer->ended(first, {}, 200'000);
  slot = transfer->next(kOneOp, false, 0, 300'000);
  ASSERT_EQ(slot.kind, Kind::kSlot);
  slot_says(kNonce, 3);
  transfer->ended(slot, {}, 300'000);
  const Step last = transfer->next({1 << 20, 64, 8}, false, 0, 300'000);
  ASSERT_EQ(transfer->chunk(last, 1).ops.size(), 1u);
  EXPECT_EQ(transfer->chunk(last, 1).ops[0].offset, 9u * kBlockBytes);
  transfer->ended(last, {}, 400'000);
  transfer->ended(transfer->next(kOneOp, false, 0, 400'000), {}, 400'001);
  transfer->ended(transfer->next(kOneOp, false, 0, 400'001), {}, 400'002);
  EXPECT_EQ(transfer->state(), TransferState::kSettled);
  EXPECT_EQ(transfer->stats().bytes, 3u * kBlockBytes);
}

TEST_F(TransferTest, AStreamsLastLookFollowsItsDataOnWhicheverLane) {
  for (const uint32_t lane : {0u, 1u}) {
    auto transfer = start(StreamUnit::kBlocks);
    const Step slot = transfer->next(kOneOp, true, lane, 1);
    slot_says(kNonce, 3);
    transfer->ended(slot, {}, 1);
    ASSERT_EQ(transfer->next(kAllOps, true, lane, 2).kind, Kind::kReads);
    EXPECT_EQ(transfer->next(kAllOps, true, lane, 2).kind, Kind::kSlot);
  }
}

// Only such a pull says what a transfer takes.
TEST_F(TransferTest, AStreamIsAloneUnlessItWaitsForItsOwner) {
  for (const uint64_t ready : {3, 2, 0}) {
    auto transfer = start(StreamUnit::kBlocks);
    transfer->mark_alone();
    const Step slot = transfer->next(kOneOp, false, 0, 1);
    slot_says(kNonce, ready);
    transfer->ended(slot, {}, 1);
    EXPECT_EQ(transfer->stats().alone, ready == 3) << ready;
  }
}

/// A pull in batches of one block, whose owner has written all, and what was told of it.
struct RelayTest : TransferTest {
  std::vector<uint64_t> told;
  std::unique_ptr<Transfer> transfer;

  void begin() {
    PullRequest request;
    request.batch_units = 1;
    request.on_proven = [this](uint64_t units) { told.push_back(units); };
    transfer = start(StreamUnit::kBlocks, kFar, {1, kNonce, kSettle}, request);
  }
  Step next(Kind kind) {
    const Step step = transfer->next(kOneOp, true, 0, 1);
    EXPECT_EQ(step.kind, kind);
    return step;
  }
  void look(uint64_t nonce, uint64_t ready) {
    const Step slot = next(Kind::kSlot);
    slot_says(nonce, ready);
    transfer->ended(slot, {}, 1);
  }
};

/// Its blocks are proven all at once, by its end.
TEST_F(RelayTest, APullThatDoesNotStreamProvesNothingOnItsWay) {
  PullRequest request;
  request.on_proven = [this](uint64_t units) { told.push_back(units); };
  transfer = start(StreamUnit::kNone, kFar, {1, kNonce, 0}, request);
  while (!transfer->done()) {
    const Step step = transfer->next(kAllOps, true, 0, 1);
    ASSERT_NE(step.kind, Kind::kNone);
    slot_says(kNonce, 3);
    transfer->ended(step, {}, 1);
  }
  EXPECT_EQ(transfer->state(), TransferState::kValid);
  EXPECT_TRUE(told.empty());
  EXPECT_EQ(transfer->proven_units(), 0u);
}

TEST_F(RelayTest, WhatWasReadBeforeTheNonceWasSeenAgainIsProven) {
  begin();
  look(kNonce, 3);
  for (uint64_t block = 0; block < 2; ++block) {
    const Step data = next(Kind::kReads);
    EXPECT_EQ(data.bytes, kBlockBytes) << "one batch";
    EXPECT_EQ(transfer->next(kOneOp, true, 0, 1).kind, Kind::kNone) << "the look waits for the batch";
    transfer->ended(data, {}, 1);
    EXPECT_EQ(transfer->proven_units(), block) << "it has landed, and may be stale";
    look(kNonce, 3);
    EXPECT_EQ(transfer->proven_units(), block + 1);
  }
  transfer->ended(next(Kind::kReads), {}, 1);
  look(kNonce, 3);
  EXPECT_EQ(told, (std::vector<uint64_t>{0, 1, 2, 3})) << "before it is settled";
  transfer->ended(next(Kind::kSettle), {}, 1);
  EXPECT_EQ(transfer->state(), TransferState::kSettled);
}

TEST_F(RelayTest, AStaleBatchIsNotProven) {
  begin();
  look(kNonce, 3);
  transfer->ended(next(Kind::kReads), {}, 1);
  look(kNonce, 3);
  transfer->ended(next(Kind::kReads), {}, 1);
  look(static_cast<uint64_t>(LeaseEnd::kAborted), 3);
  EXPECT_EQ(transfer->state(), TransferState::kFailed);
  EXPECT_EQ(told.back(), 1u);
  EXPECT_EQ(transfer->proven_units(), 1u) << "what was proven before remains so";
}

TEST_F(RelayTest, ABatchThatALaneDroppedIsReadAgainBeforeItIsAnnounced) {
  begin();
  look(kNonce, 3);
  transfer->dropped(next(Kind::kReads), 1);
  const Step again = next(Kind::kReads);
  EXPECT_EQ(transfer->next(kOneOp, true, 0, 1).kind, Kind::kNone);
  transfer->ended(again, {}, 1);
  EXPECT_EQ(told, (std::vector<uint64_t>{0}));
  look(kNonce, 3);
  EXPECT_EQ(told.back(), 1u);
  transfer->refuse(Status::Cancelled("the test ends"), 1);
}

TEST_F(TransferTest, AStreamWhoseLeaseEndsIsStale) {
  auto transfer = start(StreamUnit::kBlocks);
  const Step slot = transfer->next(kOneOp, false, 0, 1);
  slot_says(kNonce + 1, 3);
  transfer->ended(slot, {}, 2);
  EXPECT_EQ(transfer->status().code(), Code::kStaleBlocks);
}

struct Observer final : TransferObserver {
  void transfer_ended(uint32_t part, TransferState state, Code code) override {
    told.push_back({part, state, code});
  }
  std::vector<std::tuple<uint32_t, TransferState, Code>> told;
};

TEST_F(TransferTest, AnObserverIsToldOnceAndNotOfAnEndBefore) {
  auto transfer = start();
  const auto observer = std::make_shared<Observer>();
  ASSERT_TRUE(transfer->follow(observer, 5));
  transfer->cancel();
  transfer->cancel();
  transfer->refuse(Status::Config("it has ended"), 2);
  EXPECT_EQ(observer->told, (std::vector{std::tuple{5u, TransferState::kFailed, Code::kCancelled}}));
  EXPECT_EQ(observer.use_count(), 1) << "the transfer lets go of it";
  EXPECT_FALSE(transfer->follow(observer, 6));
  EXPECT_EQ(observer->told.size(), 1u);
}

}  // namespace
}  // namespace kvlink

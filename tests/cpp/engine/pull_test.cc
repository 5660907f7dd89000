// SPDX-License-Identifier: Apache-2.0
// The life of a pull, driven by hand: the test is its lanes, its owners and its control thread.
#include "engine/pull.h"

#include <ostream>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "cpp/engine/transfers_by_hand.h"

namespace kvlink {
namespace {

using namespace by_hand;

// So far away that what the tests take is nothing beside it, and in the past.
constexpr int64_t kLate = 3'000'000'000'000'000'000, kPast = 1;
constexpr int64_t kAnswerNs = 50'000'000;  // csrc/engine/pull.cc has it
constexpr LeaseSeat kSeat{1, kNonce, kSettle}, kUnsettledSeat{1, kNonce, 0};

/// How a transfer ends. kValid: its settle is lost.
enum class End : uint8_t { kSettled, kValid, kCut, kStale, kTimeout, kRefused, kConfig, kLayout, kCancelled };

Status status_of(End end) {
  switch (end) {
    case End::kCut:
      return Status::Unreachable("cut");
    case End::kStale:
      return Status::Stale(StaleReason::kExpired, "stale");
    case End::kTimeout:
      return Status::Timeout("late");
    case End::kRefused:
      return Status::AccessDenied("refused");
    case End::kConfig:
      return Status::Config("wrong");
    case End::kLayout:
      return Status::LayoutMismatch("other shapes");
    case End::kCancelled:
      return Status::Cancelled("cancelled");
    default:
      return {};
  }
}

/// One action as text, without its time: "connect 0".
std::string name_of(const PullAction& action) {
  const char* const names[] = {"connect ", "settle ", "give up ", "unused "};
  return names[static_cast<size_t>(action.kind)] + std::to_string(action.number);
}

using Strings = std::vector<std::string>;

struct PullTest : TransferTest {
  std::shared_ptr<CompletionQueue> control = *CompletionQueue::make();
  std::shared_ptr<Pull> pull;
  std::vector<std::shared_ptr<Transfer>> started;  // in order, null: the connection was broken
  std::vector<int64_t> deadlines;                  // of them
  std::vector<PullAction> taken;                   // all actions so far
  int failures = 0;                                // of a relay
  std::vector<PullState> seen_failing;             // what the others saw meanwhile

  /// A transfer keeps the pull that follows it until it ends, as lanes see to.
  void TearDown() override {
    for (const auto& transfer : started) {
      if (transfer) transfer->refuse(Status::Cancelled("the test is over"), 0);
    }
  }

  /// The first attempt has been asked for.
  void wait_for_owners(int64_t deadline = kLate, uint32_t num_sources = 0) {
    RelayContext relaying;
    if (num_sources > 0) relaying = {num_sources, [this] { failed(); }};
    pull = Pull::waiting(deadline, control, relaying);
    pull->begin();
    EXPECT_EQ(asked(), Strings{"connect 0"});
  }
  void failed() {
    ++failures;
    seen_failing.push_back(pull->state());
  }

  /// Takes what the control thread is told to do, if it is told.
  Strings asked() {
    const std::vector<uint64_t> tokens = control->drain();
    Strings names;
    for (const PullAction& action : pull->take_actions()) {
      taken.push_back(action);
      names.push_back(name_of(action));
    }
    EXPECT_EQ(!tokens.empty(), !names.empty()) << "the control thread is told when there is something";
    for (const uint64_t token : tokens) EXPECT_EQ(token, pull->token());
    EXPECT_TRUE(pull->take_actions().empty());
    return names;
  }

  StartReads reads(const LeaseSeat& seat = kSeat, StreamUnit stream = StreamUnit::kNone) {
    return [this, seat, stream](int64_t deadline) {
      deadlines.push_back(deadline);
      return started.emplace_back(start(stream, deadline, seat));
    };
  }
  StartReads broken() {
    return [this](int64_t) { return started.emplace_back(nullptr); };
  }
  bool connect(uint32_t attempt, size_t num_parts = 1, const LeaseSeat& seat = kSeat) {
    return pull->connected(attempt, std::vector<StartReads>(num_parts, reads(seat)));
  }

  void end(Transfer& transfer, End how) {
    const Step read = transfer.next(kAllOps, false, 0, 1);
    ASSERT_EQ(read.kind, Kind::kReads);
    const Status status = status_of(how);
    transfer.ended(read, status, 2);
    if (!status.ok()) return;
    slot_says(kNonce);
    transfer.ended(transfer.next(kOneOp, false, 0, 3), {}, 4);
    if (transfer.done()) return;  // it does not settle
    const Step settle = transfer.next(kOneOp, false, 0, 5);
    ASSERT_EQ(settle.kind, Kind::kSettle);
    how == End::kSettled ? transfer.ended(settle, {}, 6) : transfer.dropped(settle, 6);
  }
  void end_last(End how) { end(*started.back(), how); }

  void expect_nothing_starts() {
    const size_t before = started.size();
    for (uint32_t attempt = 0; attempt < 4; ++attempt) {
      for (size_t parts = 0; parts < 3; ++parts) EXPECT_FALSE(connect(attempt, parts));
      pull->refused(attempt, Status::Unreachable("late"), true);
    }
    EXPECT_EQ(started.size(), before);
    EXPECT_TRUE(pull->done());
    EXPECT_FALSE(pull->is_open());
  }
  void expect_cancelled(const std::string& why) {
    EXPECT_EQ(pull->state(), PullState::kFailed);
    EXPECT_EQ(pull->failure().code(), Code::kCancelled);
    EXPECT_NE(pull->failure().what().find(why), std::string::npos) << pull->failure().what();
  }
};

TEST_F(PullTest, NoPartStartsBeforeTheOwnersAreConnectedAndOneEndIsNotTheEnd) {
  wait_for_owners();
  EXPECT_EQ(pull->state(), PullState::kWaiting);
  EXPECT_EQ(taken.at(0).until_ns, kLate);
  EXPECT_TRUE(pull->wanted().empty());
  EXPECT_TRUE(started.empty());
  ASSERT_TRUE(connect(0, 3));
  EXPECT_EQ(pull->state(), PullState::kReading);
  EXPECT_EQ(pull->num_parts(), 3u);
  EXPECT_EQ(pull->wanted(), (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(deadlines, (std::vector<int64_t>(3, kLate)));
  for (size_t part = 0; part < 3; ++part) {
    EXPECT_EQ(pull->transfer(part), started[part]);
    EXPECT_EQ(pull->state(), PullState::kReading) << part;
    end(*started[part], End::kSettled);
  }
  EXPECT_EQ(pull->state(), PullState::kSettled);
  EXPECT_EQ(pull->transfer(3), nullptr);
  EXPECT_EQ(pull->cut(3), nullptr);
  EXPECT_EQ(asked(), Strings{});
  expect_nothing_starts();
}

/// A pull of two parts, and where their ends lead.
struct TwoEnds {
  const char* name;
  End first, second;
  PullState state;
  Strings asked;
  LeaseSeat seat = kSeat;
  std::vector<uint32_t> again = {};
};
std::ostream& operator<<(std::ostream& out, const TwoEnds& ends) { return out << ends.name; }

struct TwoEndsTest : PullTest, ::testing::WithParamInterface<TwoEnds> {};

TEST_P(TwoEndsTest, DecideWhatThePullIs) {
  const TwoEnds& ends = GetParam();
  for (const bool second_first : {false, true}) {
    started.clear();
    wait_for_owners();
    ASSERT_TRUE(connect(0, 2, ends.seat));
    end(*started[second_first], second_first ? ends.second : ends.first);
    EXPECT_EQ(pull->state(), PullState::kReading) << "a part that failed does not stop the other";
    EXPECT_FALSE(started[!second_first]->stopping());
    end(*started[!second_first], second_first ? ends.first : ends.second);
    EXPECT_EQ(pull->state(), ends.state);
    EXPECT_EQ(asked(), ends.asked);
    EXPECT_TRUE(pull->failure().ok()) << "its transfers say why";
    if (pull->done()) continue;
    EXPECT_EQ(pull->wanted(), ends.again);
    for (const uint32_t part : {0u, 1u}) {
      const bool reads_again = std::count(ends.again.begin(), ends.again.end(), part) > 0;
      EXPECT_EQ(pull->cut(part), reads_again ? started[part] : nullptr);
      EXPECT_EQ(pull->transfer(part), reads_again ? nullptr : started[part]);
    }
    EXPECT_FALSE(connect(0, ends.again.size()));
    EXPECT_FALSE(connect(1, ends.again.size() + 1)) << "a read for each part that is wanted";
    EXPECT_EQ(started.size(), 2u);
    ASSERT_TRUE(connect(1, ends.again.size(), ends.seat));
    for (size_t index = 2; index < started.size(); ++index) end(*started[index], End::kSettled);
    EXPECT_EQ(pull->state(), PullState::kSettled);
    EXPECT_EQ(asked(), Strings{});
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, TwoEndsTest,
    ::testing::Values(
        TwoEnds{"settled", End::kSettled, End::kSettled, PullState::kSettled, {}},
        TwoEnds{"one_untold", End::kSettled, End::kValid, PullState::kValid, {"settle 1"}},
        TwoEnds{"both_untold", End::kValid, End::kValid, PullState::kValid, {"settle 0", "settle 1"}},
        TwoEnds{"none_settles", End::kValid, End::kValid, PullState::kValid, {}, kUnsettledSeat},
        TwoEnds{"stale", End::kSettled, End::kStale, PullState::kFailed, {}},
        TwoEnds{"stale_and_untold", End::kStale, End::kValid, PullState::kFailed, {"settle 1"}},
        TwoEnds{"late", End::kTimeout, End::kSettled, PullState::kFailed, {}},
        TwoEnds{"refused", End::kRefused, End::kSettled, PullState::kFailed, {}},
        TwoEnds{"cut_and_stale", End::kCut, End::kStale, PullState::kFailed, {}},
        TwoEnds{"cut_and_late", End::kTimeout, End::kCut, PullState::kFailed, {}},
        TwoEnds{"one_cut", End::kSettled, End::kCut, PullState::kWaiting, {"connect 1"}, kSeat, {1}},
        TwoEnds{"both_cut", End::kCut, End::kCut, PullState::kWaiting, {"connect 1"}, kSeat, {0, 1}}),
    [](const auto& info) { return info.param.name; });

TEST_F(PullTest, APartThatIsUntoldWhileAnotherIsReadAgainIsToldOnceAtTheEnd) {
  wait_for_owners();
  ASSERT_TRUE(connect(0, 2));
  end(*started[0], End::kValid);
  end(*started[1], End::kCut);
  EXPECT_EQ(asked(), Strings{"connect 1"});
  ASSERT_TRUE(connect(1));
  end(*started[2], End::kSettled);
  EXPECT_EQ(pull->state(), PullState::kValid);
  EXPECT_EQ(asked(), Strings{"settle 0"});
  pull->cancel();
  pull->close();
  pull->tick(INT64_MAX);
  EXPECT_EQ(asked(), Strings{}) << "once";
}

TEST_F(PullTest, APullIsReadAgainOnce) {
  wait_for_owners();
  ASSERT_TRUE(connect(0, 2));
  end(*started[0], End::kSettled);
  end(*started[1], End::kCut);
  EXPECT_EQ(asked(), Strings{"connect 1"});
  EXPECT_EQ(taken.back().until_ns, kLate);
  ASSERT_TRUE(connect(1));
  end(*started[2], End::kCut);
  EXPECT_EQ(pull->state(), PullState::kFailed);
  EXPECT_EQ(pull->cut(1), started[1]);
  EXPECT_EQ(pull->transfer(1), started[2]) << "it says why";
  EXPECT_EQ(asked(), Strings{});
  expect_nothing_starts();
}

TEST_F(PullTest, NothingIsReadAgainAfterTheDeadline) {
  wait_for_owners(kPast);
  ASSERT_TRUE(connect(0));
  end_last(End::kCut);
  EXPECT_EQ(pull->state(), PullState::kFailed);
  EXPECT_EQ(asked(), Strings{});
}

TEST_F(PullTest, AConnectionThatIsBrokenAtTheStartIsOneThatWasCut) {
  wait_for_owners();
  ASSERT_TRUE(pull->connected(0, {broken(), reads()}));
  EXPECT_EQ(pull->state(), PullState::kReading);
  EXPECT_EQ(pull->transfer(0), nullptr);
  end_last(End::kSettled);
  EXPECT_EQ(asked(), Strings{"connect 1"});
  EXPECT_EQ(pull->wanted(), std::vector<uint32_t>{0});
  ASSERT_TRUE(pull->connected(1, {broken()}));
  EXPECT_EQ(pull->state(), PullState::kFailed);
  EXPECT_EQ(pull->transfer(0), nullptr);
  EXPECT_TRUE(pull->failure().ok()) << "it did not end while it waited";
}

TEST_F(PullTest, APartThatEndsBeforeItIsFollowed) {
  wait_for_owners();
  const StartReads at_once = [this](int64_t deadline) {
    auto transfer = reads()(deadline);
    EXPECT_EQ(pull->state(), PullState::kStarting);
    end(*transfer, End::kSettled);
    return transfer;
  };
  ASSERT_TRUE(pull->connected(0, {at_once, at_once}));
  EXPECT_EQ(pull->state(), PullState::kSettled);
  EXPECT_EQ(asked(), Strings{});
}

/// A pull that its caller started, and where it goes.
struct Started {
  const char* name;
  End end;
  LeaseSeat seat;
  PullState state;
  Strings asked;
};
std::ostream& operator<<(std::ostream& out, const Started& one) { return out << one.name; }

struct StartedTest : PullTest, ::testing::WithParamInterface<Started> {};

TEST_P(StartedTest, LivesAsIfItHadWaited) {
  const Started& expected = GetParam();
  for (const bool ends_before : {true, false}) {
    for (const bool told_before : {true, false}) {
      reads(expected.seat)(kLate);
      if (ends_before) end_last(expected.end);
      pull = Pull::started(started.back(), control);
      EXPECT_EQ(pull->state() == PullState::kWaiting ? pull->cut(0) : pull->transfer(0), started.back());
      EXPECT_EQ(pull->num_parts(), 1u);
      if (!ends_before) {
        EXPECT_EQ(pull->state(), PullState::kReading);
        if (told_before) pull->begin();
        EXPECT_EQ(asked(), Strings{});
        end_last(expected.end);
      }
      EXPECT_EQ(pull->state(), expected.state);
      EXPECT_EQ(pull->is_open(), !pull->done() || !expected.asked.empty());
      if (!told_before) {
        control->drain();  // a token that the control thread does not know yet
        pull->begin();
      }
      EXPECT_EQ(asked(), expected.asked);
      if (pull->done()) continue;
      ASSERT_TRUE(connect(1));
      end_last(End::kSettled);
      EXPECT_EQ(pull->state(), PullState::kSettled);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, StartedTest,
    ::testing::Values(Started{"settled", End::kSettled, kSeat, PullState::kSettled, {}},
                      Started{"untold", End::kValid, kSeat, PullState::kValid, {"settle 0"}},
                      Started{"never_settles", End::kValid, kUnsettledSeat, PullState::kValid, {}},
                      Started{"stale", End::kStale, kSeat, PullState::kFailed, {}},
                      Started{"cut", End::kCut, kSeat, PullState::kWaiting, {"connect 1"}}),
    [](const auto& info) { return info.param.name; });

TEST_F(PullTest, WhatTheControlThreadHasTakenBeforeTheBeginningIsNotAskedForAgain) {
  reads()(kLate);
  pull = Pull::started(started.back(), control);
  end_last(End::kCut);
  EXPECT_EQ(asked(), Strings{"connect 1"});
  pull->begin();
  EXPECT_EQ(asked(), Strings{});
}

TEST_F(PullTest, WithoutAControlThreadThereIsOneAttempt) {
  for (const End how : {End::kCut, End::kValid}) {
    reads()(kLate);
    pull = Pull::started(started.back(), nullptr);
    end_last(how);
    EXPECT_EQ(pull->state(), how == End::kCut ? PullState::kFailed : PullState::kValid);
    EXPECT_FALSE(pull->is_open());
  }
}

TEST_F(PullTest, AnEmptyPullHasEnded) {
  pull = Pull::empty();
  EXPECT_EQ(pull->state(), PullState::kValid);
  EXPECT_TRUE(pull->wait(-1));
  pull->cancel();
  EXPECT_EQ(pull->state(), PullState::kValid);
  EXPECT_EQ(pull->num_parts(), 0u);
  EXPECT_FALSE(pull->is_open());
  EXPECT_FALSE(pull->notify(control, 1));
}

TEST_F(PullTest, AnswersToAnotherAttemptOrASecondTimeAreDropped) {
  wait_for_owners();
  EXPECT_FALSE(connect(1));
  EXPECT_FALSE(pull->connected(0, {}));
  pull->refused(1, Status::Unreachable("of an attempt that was not made"), false);
  EXPECT_EQ(pull->state(), PullState::kWaiting);
  ASSERT_TRUE(connect(0));
  EXPECT_FALSE(connect(0));
  pull->refused(0, Status::Unreachable("after it was connected"), false);
  EXPECT_EQ(pull->state(), PullState::kReading);
  end_last(End::kCut);
  EXPECT_FALSE(connect(0));
  pull->refused(0, Status::Unreachable("the answer to an earlier attempt"), false);
  EXPECT_EQ(pull->state(), PullState::kWaiting);
  EXPECT_EQ(asked(), Strings{"connect 1"});
  ASSERT_TRUE(connect(1));
  EXPECT_EQ(started.size(), 2u);
}

/// An owner that cannot be reached: how often another one may, and what is asked.
TEST_F(PullTest, ARefusalEndsThePullUnlessAnotherSourceMayWork) {
  struct Row {
    uint32_t num_sources;
    std::vector<bool> another;
    int64_t deadline;
    Strings asked;
  };
  const Row rows[] = {{0, {false}, kLate, {}},
                      {0, {true, true}, kLate, {"connect 1"}},
                      {1, {true}, kLate, {}},
                      {3, {true, true, true}, kLate, {"connect 1", "connect 2"}},
                      {3, {true, false}, kLate, {"connect 1"}},
                      {3, {true}, kPast, {}}};
  for (const Row& row : rows) {
    failures = 0;
    wait_for_owners(row.deadline, row.num_sources);
    Strings all;
    for (uint32_t attempt = 0; attempt < row.another.size(); ++attempt) {
      EXPECT_EQ(pull->state(), PullState::kWaiting);
      pull->refused(attempt, Status::Unreachable("no " + std::to_string(attempt)), row.another[attempt]);
      for (const std::string& one : asked()) all.push_back(one);
    }
    EXPECT_EQ(all, row.asked);
    EXPECT_EQ(pull->state(), PullState::kFailed);
    EXPECT_EQ(pull->failure().what(), "no " + std::to_string(row.another.size() - 1));
    EXPECT_EQ(failures, row.num_sources > 0);
    expect_nothing_starts();
  }
}

TEST_F(PullTest, WhatWasCutAndWhyItCouldNotBeReadAgainAreBothKnown) {
  wait_for_owners();
  ASSERT_TRUE(connect(0));
  end_last(End::kCut);
  EXPECT_EQ(asked(), Strings{"connect 1"});
  pull->refused(1, Status::Stale(StaleReason::kRestarted, "restarted"), false);
  EXPECT_EQ(pull->state(), PullState::kFailed);
  EXPECT_EQ(pull->failure().code(), Code::kStaleBlocks);
  EXPECT_EQ(pull->transfer(0), nullptr);
  EXPECT_EQ(pull->cut(0)->status().code(), Code::kPeerUnreachable);
}

TEST_F(PullTest, TheSourcesOfARelayShareItsTime) {
  wait_for_owners(kLate, 3);
  const auto near = [](int64_t time, int64_t expected) {
    return time > expected - kLate / 1000 && time < expected + kLate / 1000;
  };
  EXPECT_TRUE(near(taken.at(0).until_ns, kLate / 3));
  pull->refused(0, Status::Unreachable("no"), true);
  EXPECT_EQ(asked(), Strings{"connect 1"});
  EXPECT_TRUE(near(taken.at(1).until_ns, kLate / 2));
  ASSERT_TRUE(connect(1));
  EXPECT_EQ(deadlines.back(), taken.at(1).until_ns);
  end_last(End::kTimeout);
  EXPECT_EQ(asked(), Strings{"connect 2"});
  EXPECT_EQ(taken.at(2).until_ns, kLate);
  ASSERT_TRUE(connect(2));
  EXPECT_EQ(deadlines.back(), kLate);
  end_last(End::kTimeout);
  EXPECT_EQ(pull->state(), PullState::kFailed);
}

/// Which failure of a source lets a relay go on with the next one.
TEST_F(PullTest, ARelayGoesOnWithTheNextSource) {
  const std::pair<End, bool> rows[] = {{End::kCut, true},       {End::kStale, true},   {End::kTimeout, true},
                                       {End::kRefused, true},   {End::kConfig, false}, {End::kLayout, false},
                                       {End::kCancelled, false}};
  for (const auto& [how, goes_on] : rows) {
    failures = 0;
    seen_failing.clear();
    wait_for_owners(kLate, 2);
    ASSERT_TRUE(connect(0));
    end_last(how);
    EXPECT_EQ(pull->state(), goes_on ? PullState::kWaiting : PullState::kFailed) << static_cast<int>(how);
    EXPECT_EQ(asked(), goes_on ? Strings{"connect 1"} : Strings{});
    EXPECT_EQ(failures, !goes_on);
    if (!goes_on) continue;
    ASSERT_TRUE(connect(1));
    end_last(how);
    EXPECT_EQ(pull->state(), PullState::kFailed) << "that was the last one";
    EXPECT_EQ(seen_failing, std::vector{PullState::kReading}) << "its lease ends before anybody sees it";
  }
}

TEST_F(PullTest, ARelaySaysWhichSourcesItDidNotNeed) {
  struct Row {
    uint32_t num_sources, num_cut;
    End end;
    Strings asked;
  };
  const Row rows[] = {{3, 0, End::kSettled, {"unused 1"}},
                      {3, 1, End::kSettled, {"unused 2"}},
                      {3, 2, End::kSettled, {}},
                      {2, 0, End::kValid, {"settle 0", "unused 1"}},
                      {2, 0, End::kConfig, {}},
                      {1, 0, End::kSettled, {}}};
  for (const Row& row : rows) {
    failures = 0;
    wait_for_owners(kLate, row.num_sources);
    for (uint32_t attempt = 0; attempt < row.num_cut; ++attempt) {
      ASSERT_TRUE(connect(attempt));
      end_last(End::kCut);
      EXPECT_EQ(asked(), Strings{"connect " + std::to_string(attempt + 1)});
    }
    ASSERT_TRUE(connect(row.num_cut));
    end_last(row.end);
    EXPECT_EQ(asked(), row.asked);
    pull->cancel();  // its offer goes on
    pull->close();
    EXPECT_EQ(asked(), Strings{});
    EXPECT_EQ(failures, row.end == End::kConfig);
  }
}

/// The ends of a relay that no transfer brings. Its lease ends first, by each of them.
TEST_F(PullTest, ARelayThatIsStoppedEndsItsLease) {
  const std::pair<const char*, std::function<void()>> stops[] = {
      {"cancel", [this] { pull->cancel(); }},
      {"request_cancel", [this] { pull->request_cancel(); }},
      {"close", [this] { pull->close(); }},
      {"tick", [this] { pull->tick(kLate + kAnswerNs); }}};
  for (const auto& [name, stop] : stops) {
    failures = 0;
    seen_failing.clear();
    wait_for_owners(kLate, 2);
    stop();
    EXPECT_EQ(pull->state(), PullState::kFailed) << name;
    EXPECT_EQ(seen_failing, std::vector{PullState::kWaiting}) << name;
    EXPECT_EQ(asked(), Strings{"give up 0"});
  }
}

TEST_F(PullTest, ACancelledRelayEndsItsLeaseBeforeItsReadsHaveEnded) {
  wait_for_owners(kLate, 2);
  ASSERT_TRUE(connect(0));
  const Step read = started[0]->next(kAllOps, false, 0, 1);
  pull->request_cancel();
  EXPECT_EQ(failures, 1);
  EXPECT_FALSE(pull->done());
  started[0]->dropped(read, 2);
  EXPECT_EQ(pull->state(), PullState::kFailed);
  EXPECT_EQ(asked(), Strings{});
  expect_nothing_starts();
}

TEST_F(PullTest, ProvenTokensNeverDecrease) {
  wait_for_owners(kLate, 2);
  for (const uint64_t proven : {7, 3, 9, 9, 0}) pull->prove(proven);
  EXPECT_EQ(pull->proven_tokens(), 9u);
}

TEST_F(PullTest, CancelledWhileItWaits) {
  for (const bool waits_again : {false, true}) {
    wait_for_owners();
    if (waits_again) {
      ASSERT_TRUE(connect(0));
      end_last(End::kCut);
      EXPECT_EQ(asked(), Strings{"connect 1"});
    }
    pull->cancel();
    expect_cancelled("before it was connected");
    EXPECT_EQ(asked(), Strings{waits_again ? "give up 1" : "give up 0"});
    pull->cancel();
    EXPECT_EQ(asked(), Strings{});
    expect_nothing_starts();
  }
}

TEST_F(PullTest, CancelledBeforeTheControlThreadKnowsIt) {
  pull = Pull::waiting(kLate, control);
  pull->cancel();
  control->drain();
  EXPECT_TRUE(pull->is_open());
  pull->begin();
  EXPECT_EQ(asked(), Strings{"give up 0"});
  expect_nothing_starts();
}

/// While the first of three parts starts, a stop comes: after it, or during its start.
TEST_F(PullTest, CancelledWhileItStarts) {
  for (const bool is_relay : {false, true}) {
    for (const bool closed_too : {false, true}) {
      started.clear();
      failures = 0;
      wait_for_owners(kLate, is_relay ? 2 : 0);
      const StartReads cancels = [&](int64_t deadline) {
        pull->request_cancel();
        if (closed_too) pull->close();  // which takes nothing back
        EXPECT_EQ(failures, is_relay);
        return reads()(deadline);
      };
      ASSERT_TRUE(pull->connected(0, {cancels, reads(), reads()}));
      ASSERT_EQ(started.size(), 1u) << "nothing starts afterwards";
      EXPECT_EQ(started[0]->status().code(), Code::kCancelled);
      expect_cancelled("before all of it had started");
      EXPECT_EQ(asked(), Strings{});
      expect_nothing_starts();
    }
  }
}

TEST_F(PullTest, CancelledWhileItsOnlyPartStarts) {
  wait_for_owners();
  ASSERT_TRUE(pull->connected(0, {[&](int64_t deadline) {
                                pull->request_cancel();
                                return reads()(deadline);
                              }}));
  EXPECT_EQ(pull->state(), PullState::kFailed);
  EXPECT_TRUE(pull->failure().ok()) << "its transfer says why";
  EXPECT_EQ(pull->transfer(0)->status().code(), Code::kCancelled);
}

TEST_F(PullTest, AStartThatFailsSaysWhyAlsoIfItIsCancelledMeanwhile) {
  for (const bool cancels : {false, true}) {
    wait_for_owners();
    ASSERT_TRUE(pull->connected(0, {[&](int64_t deadline) {
                                  if (cancels) pull->request_cancel();
                                  return reads({0, kNonce, kSettle})(deadline);  // no lease has this slot
                                }}));
    EXPECT_EQ(pull->state(), PullState::kFailed);
    EXPECT_EQ(pull->transfer(0)->status().code(), Code::kConfig);
    EXPECT_EQ(asked(), Strings{});
  }
}

TEST_F(PullTest, CancelWaitsForAStartThatIsUnderWay) {
  wait_for_owners();
  std::thread cancelling;
  bool returned = false;
  ASSERT_TRUE(pull->connected(0, {[&](int64_t deadline) {
                                    auto transfer = reads()(deadline);
                                    const Step read = transfer->next(kAllOps, false, 0, 1);
                                    cancelling = std::thread([&] {
                                      pull->cancel();
                                      returned = true;
                                    });
                                    transfer->ended(read, {}, 2);
                                    return transfer;
                                  },
                                  [&](int64_t deadline) {
                                    pull->request_cancel();
                                    return reads()(deadline);
                                  }}));
  cancelling.join();
  EXPECT_TRUE(returned);
  EXPECT_EQ(pull->state(), PullState::kFailed);
  for (const auto& transfer : started) EXPECT_TRUE(transfer->done());
}

TEST_F(PullTest, CancelReturnsWhenNoByteLandsAnyMore) {
  wait_for_owners();
  ASSERT_TRUE(connect(0, 2));
  const Step reads[] = {started[0]->next(kAllOps, false, 0, 1), started[1]->next(kAllOps, false, 0, 1)};
  std::atomic<bool> returned{false};
  std::thread cancelling([&] {
    pull->cancel();
    returned = true;
  });
  for (const int part : {0, 1}) {
    while (!started[part]->stopping()) std::this_thread::yield();
  }
  started[0]->dropped(reads[0], 2);
  EXPECT_FALSE(returned);
  EXPECT_FALSE(pull->done());
  started[1]->dropped(reads[1], 3);
  cancelling.join();
  EXPECT_EQ(pull->state(), PullState::kFailed);
}

/// Requested while it reads: nothing is read again, whatever the transfers say.
TEST_F(PullTest, AStoppedPullIsNotReadAgain) {
  for (const bool cancels : {true, false}) {
    wait_for_owners();
    ASSERT_TRUE(connect(0));
    const Step read = started.back()->next(kAllOps, false, 0, 1);
    cancels ? pull->request_cancel() : pull->close();
    EXPECT_EQ(pull->state(), PullState::kReading);
    EXPECT_EQ(started.back()->stopping(), cancels);
    started.back()->ended(read, Status::Unreachable("cut"), 2);
    EXPECT_EQ(pull->state(), PullState::kFailed);
    EXPECT_EQ(asked(), Strings{});
    expect_nothing_starts();
  }
}

TEST_F(PullTest, AClosedWorkerLetsReadsEnd) {
  wait_for_owners();
  ASSERT_TRUE(connect(0));
  pull->close();
  end_last(End::kSettled);
  EXPECT_EQ(pull->state(), PullState::kSettled);
}

TEST_F(PullTest, ClosedWhileItWaits) {
  wait_for_owners();
  pull->close();
  expect_cancelled("the worker was closed");
  EXPECT_EQ(asked(), Strings{"give up 0"});
  expect_nothing_starts();
}

TEST_F(PullTest, ClosedWhileItStarts) {
  for (const bool is_broken : {true, false}) {
    wait_for_owners();
    const StartReads closes = [&](int64_t deadline) {
      pull->close();
      return is_broken ? nullptr : reads()(deadline);
    };
    ASSERT_TRUE(pull->connected(0, {closes, is_broken ? broken() : reads()}));
    ASSERT_EQ(pull->state(), is_broken ? PullState::kFailed : PullState::kReading);
    EXPECT_EQ(asked(), Strings{}) << "it is not read again";
    if (is_broken) continue;
    for (const size_t part : {0, 1}) end(*pull->transfer(part), End::kSettled);
    EXPECT_EQ(pull->state(), PullState::kSettled) << "its parts go on";
  }
}

TEST_F(PullTest, TheControlThreadHasSomeTimeAfterTheDeadlineToSayWhy) {
  wait_for_owners();
  pull->tick(kLate);
  pull->tick(kLate + kAnswerNs - 1);
  EXPECT_EQ(pull->state(), PullState::kWaiting);
  pull->tick(kLate + kAnswerNs);
  EXPECT_EQ(pull->state(), PullState::kFailed);
  EXPECT_EQ(pull->failure().code(), Code::kTimeout);
  EXPECT_EQ(asked(), Strings{"give up 0"});
  expect_nothing_starts();
}

TEST_F(PullTest, NoTickEndsWhatReads) {
  wait_for_owners();
  ASSERT_TRUE(connect(0));
  pull->tick(INT64_MAX);
  EXPECT_EQ(pull->state(), PullState::kReading);
}

TEST_F(PullTest, AWaiterChecksTheDeadlineToo) {
  wait_for_owners(kPast);
  EXPECT_TRUE(pull->wait(-1));
  EXPECT_EQ(pull->failure().code(), Code::kTimeout);
}

TEST_F(PullTest, AWaitThatMayNotWaitSaysWhetherItHasEnded) {
  wait_for_owners();
  EXPECT_FALSE(pull->wait(0));
  ASSERT_TRUE(connect(0));
  EXPECT_FALSE(pull->wait(0));
  end_last(End::kSettled);
  EXPECT_TRUE(pull->wait(0));
}

TEST_F(PullTest, WhoWaitsIsToldOfTheEndWhateverHappensBefore) {
  for (const bool cut : {false, true}) {
    wait_for_owners();
    bool ended = false;
    std::thread waiting([&] { ended = pull->wait(-1); });
    ASSERT_TRUE(connect(0));
    if (cut) {
      end_last(End::kCut);
      EXPECT_EQ(asked(), Strings{"connect 1"});
      ASSERT_TRUE(connect(1));
    }
    end_last(End::kSettled);
    waiting.join();
    EXPECT_TRUE(ended);
  }
}

TEST_F(PullTest, WhoWaitedForTheOwnersDrivesTheLanesThen) {
  wait_for_owners();
  std::atomic<bool> waits{false};
  std::thread waiting([&] {
    waits = true;
    pull->wait(-1);
  });
  for (int turn = 0; !waits || turn < 1000; ++turn) std::this_thread::yield();
  ASSERT_TRUE(connect(0));
  while (drives == 0) std::this_thread::yield();
  end_last(End::kSettled);
  waiting.join();
}

TEST_F(PullTest, EachWhoAskedIsToldOfTheEndOnce) {
  const auto loop = *CompletionQueue::make(), other = *CompletionQueue::make();
  wait_for_owners();
  ASSERT_TRUE(pull->notify(loop, 5));
  ASSERT_TRUE(connect(0));
  ASSERT_TRUE(pull->notify(other, 6));
  end_last(End::kCut);
  ASSERT_TRUE(pull->notify(loop, 7));
  EXPECT_EQ(asked(), Strings{"connect 1"});
  EXPECT_TRUE(loop->drain().empty());
  ASSERT_TRUE(connect(1));
  end_last(End::kSettled);
  EXPECT_EQ(loop->drain(), (std::vector<uint64_t>{5, 7}));
  EXPECT_EQ(other->drain(), std::vector<uint64_t>{6});
  EXPECT_FALSE(pull->notify(loop, 8));
  EXPECT_TRUE(loop->drain().empty());
}

TEST_F(PullTest, APullThatNobodyKeepsGoesOn) {
  reads()(kLate);
  const std::weak_ptr<Pull> left = Pull::started(started[0], control);
  EXPECT_FALSE(left.expired());
  end_last(End::kSettled);
  EXPECT_TRUE(left.expired()) << "nothing keeps it after the end";
}

}  // namespace
}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "cpp/lease/lease_tables.h"

namespace kvlink {
namespace {

using lease_tests::kTtl;
using lease_tests::LeaseTableTest;

TEST_F(LeaseTableTest, HeaderNamesTheOwnersEpoch) {
  const auto* header = reinterpret_cast<const LeaseTableHeader*>(memory.data());
  EXPECT_EQ(header->magic, LeaseTableHeader::kMagic);
  EXPECT_EQ(header->epoch, 7u);
  EXPECT_EQ(header->num_slots, 5u);
}

TEST_F(LeaseTableTest, GrantPublishesAFreshNonceAndWhatIsReady) {
  const auto seats = table.grant(1, 1, 3, kTtl, 0);
  ASSERT_TRUE(seats.ok());
  const LeaseSeat seat = (*seats)[0];
  EXPECT_NE(seat.slot, 0u);
  EXPECT_NE(seat.nonce, seat.settle_nonce);
  EXPECT_EQ(memory[seat.slot].nonce, seat.nonce);
  EXPECT_EQ(memory[seat.slot].ready, 3u);
}

TEST_F(LeaseTableTest, WhatIsRefusedDrawsNoRandomNumbers) {
  size_t drawn = 0;
  LeaseTable counting(std::as_writable_bytes(std::span(memory)), std::as_writable_bytes(std::span(words)), 7,
                      [&drawn](std::span<uint64_t> nonces) {
                        for (uint64_t& nonce : nonces) nonce = kSmallestNonce + ++drawn;
                        return Status{};
                      });
  for (const uint32_t readers : {0u, 5u, 255u, 256u, UINT32_MAX}) {
    const auto seats = counting.grant(1, readers, 0, kTtl, 0);
    EXPECT_EQ(seats.status().code(), Code::kConfig) << readers;
    const bool full = readers == 5 || readers == 255;
    EXPECT_NE(seats.status().what().find(full ? "is full" : "1 to 255"), std::string::npos)
        << seats.status().what();
  }
  EXPECT_EQ(drawn, 0u);
  EXPECT_EQ(counting.grant(1, 4, 0, kTtl, 0)->size(), 4u);
}

TEST_F(LeaseTableTest, SettleEndsTheLeaseAndLeavesATombstone) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  words[seat.slot].settled = seat.settle_nonce;
  const auto gone = sweep(5);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].how, LeaseEnd::kSettled);
  EXPECT_EQ(gone[0].held_ns, 5);
  EXPECT_EQ(memory[seat.slot].nonce, 1u);
  EXPECT_EQ(table.num_active(), 0u);
}

TEST_F(LeaseTableTest, AGuessedSettleIsIgnored) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  words[seat.slot].settled = seat.nonce;
  EXPECT_TRUE(sweep(5).empty());
  EXPECT_EQ(memory[seat.slot].nonce, seat.nonce);
  EXPECT_FALSE(table.settle(seat.slot, seat.nonce));
  EXPECT_FALSE(table.settle(0, 0));
}

TEST_F(LeaseTableTest, BlocksComeBackWhenEveryReaderHasEnded) {
  const auto seats = *table.grant(1, 2, 0, kTtl, 0);
  words[seats[0].slot].settled = seats[0].settle_nonce;
  EXPECT_TRUE(sweep(1).empty());
  EXPECT_EQ(memory[seats[0].slot].nonce, 1u);
  EXPECT_EQ(memory[seats[1].slot].nonce, seats[1].nonce);
  ASSERT_TRUE(table.settle(seats[1].slot, seats[1].settle_nonce));
  EXPECT_EQ(sweep(2).size(), 1u);
}

TEST_F(LeaseTableTest, AbortErasesTheNonceAtOnce) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  EXPECT_TRUE(table.abort(1));
  EXPECT_EQ(memory[seat.slot].nonce, 3u);
  EXPECT_FALSE(table.abort(1));
  EXPECT_EQ(sweep(1)[0].how, LeaseEnd::kAborted);
  EXPECT_FALSE(table.abort(1));
}

TEST_F(LeaseTableTest, AFullTableTakesNothing) {
  ASSERT_TRUE(table.grant(1, 3, 0, kTtl, 0).ok());
  const auto refused = table.grant(2, 2, 0, kTtl, 0);
  EXPECT_EQ(refused.status().code(), Code::kConfig);
  EXPECT_TRUE(table.grant(3, 1, 0, kTtl, 0).ok());
}

TEST_F(LeaseTableTest, ALateSettleOfTheSlotsEarlierReaderChangesNothing) {
  const LeaseSeat first = (*table.grant(1, 4, 0, kTtl, 0))[0];
  table.abort(1);
  sweep(1);
  for (const LeaseSeat& second : *table.grant(2, 4, 0, kTtl, 1)) {
    EXPECT_NE(second.nonce, first.nonce);
    words[second.slot].settled = first.settle_nonce;
  }
  EXPECT_TRUE(sweep(2).empty());
}

TEST_F(LeaseTableTest, ReadyNeverGoesBack) {
  const LeaseSeat seat = (*table.grant(1, 1, 2, kTtl, 0))[0];
  EXPECT_TRUE(table.set_ready(1, 5));
  EXPECT_TRUE(table.set_ready(1, 4));
  EXPECT_EQ(memory[seat.slot].ready, 5u);
  EXPECT_FALSE(table.set_ready(9, 1));
}

TEST_F(LeaseTableTest, ASettledSeatsSlotIsNoLongerItsLeasesToWrite) {
  const auto first = *table.grant(1, 2, 0, kTtl, 0);  // a reader each, and two slots beside
  words[first[0].slot].settled = first[0].settle_nonce;
  EXPECT_TRUE(sweep(1).empty());
  for (uint64_t lease = 2; lease <= 4; ++lease) ASSERT_TRUE(table.grant(lease, 1, 0, kTtl, 1).ok());
  ASSERT_NE(memory[first[0].slot].nonce, 1u) << "its slot is another lease's by now";
  EXPECT_TRUE(table.set_ready(1, 8));
  EXPECT_EQ(memory[first[0].slot].ready, 0u);
  EXPECT_EQ(memory[first[1].slot].ready, 8u);
  EXPECT_TRUE(table.abort(1));
  EXPECT_GE(memory[first[0].slot].nonce, kSmallestNonce);
}

TEST_F(LeaseTableTest, AnEndedLeaseWritesNothingAndSaysSo) {
  const LeaseSeat aborted = (*table.grant(1, 1, 2, kTtl, 0))[0],
                  settled = (*table.grant(2, 1, 2, kTtl, 0))[0];
  table.abort(1);
  for (int swept = 0; swept < 2; ++swept) {
    EXPECT_FALSE(table.set_ready(1, 8));
    EXPECT_FALSE(table.extend(1, kTtl, 1));
    EXPECT_FALSE(table.set_ttl(1, kTtl, 1));
    EXPECT_FALSE(table.renew(aborted.slot, aborted.settle_nonce, 1));
    EXPECT_FALSE(table.settle(aborted.slot, aborted.settle_nonce));
    EXPECT_EQ(memory[aborted.slot].nonce, 3u);
    EXPECT_EQ(memory[aborted.slot].ready, 2u);
    words[settled.slot].settled = settled.settle_nonce;
    sweep(1);
  }
  EXPECT_FALSE(table.set_ready(2, 8));
  EXPECT_EQ(memory[settled.slot].nonce, 1u);
  EXPECT_EQ(memory[settled.slot].ready, 2u);
}

TEST_F(LeaseTableTest, AnAbortAfterTheSettleLeavesItSettled) {
  const auto seats = *table.grant(1, 2, 0, kTtl, 0);
  words[seats[0].slot].settled = seats[0].settle_nonce;
  EXPECT_TRUE(table.abort(1));
  EXPECT_EQ(memory[seats[0].slot].nonce, 1u);
  EXPECT_EQ(memory[seats[1].slot].nonce, 3u);
  EXPECT_EQ(sweep(1)[0].how, LeaseEnd::kAborted);

  const LeaseSeat other = (*table.grant(2, 1, 0, kTtl, 1))[0];
  words[other.slot].settled = other.settle_nonce;
  EXPECT_FALSE(table.abort(2));
  EXPECT_EQ(sweep(2)[0].how, LeaseEnd::kSettled);
}

TEST_F(LeaseTableTest, SlotsComeBackOldestFirstAndThoseOfAnAbortedLeaseWithItsReport) {
  std::vector<uint32_t> order;
  const auto next = [&](uint64_t lease) {
    const auto granted = table.grant(lease, 1, 0, kTtl, 0);
    if (granted.ok()) order.push_back((*granted)[0].slot);
    return granted.ok();
  };
  EXPECT_TRUE(next(1) && next(2) && next(3));
  table.abort(2);
  sweep(1);
  table.abort(1);
  EXPECT_TRUE(next(4) && next(5));
  EXPECT_FALSE(next(6));
  ASSERT_EQ(sweep(2).size(), 1u);
  EXPECT_TRUE(next(6));
  EXPECT_EQ(order, (std::vector<uint32_t>{1, 2, 3, 4, 2, 1}));
}

TEST_F(LeaseTableTest, ATombstoneStaysUntilTheSlotIsReused) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  table.abort(1);
  for (uint64_t lease = 2; lease <= 4; ++lease) {
    sweep(1);
    ASSERT_TRUE(table.grant(lease, 1, 0, kTtl, 1).ok());
    EXPECT_EQ(memory[seat.slot].nonce, 3u);
  }
  const LeaseSeat reused = (*table.grant(5, 1, 0, kTtl, 1))[0];
  EXPECT_EQ(reused.slot, seat.slot);
  EXPECT_EQ(memory[seat.slot].nonce, reused.nonce);
}

TEST_F(LeaseTableTest, RandomNumbersThatCannotBeHadAreNoLease) {
  bool refuses = true;
  LeaseTable guarded(std::as_writable_bytes(std::span(memory)), std::as_writable_bytes(std::span(words)), 7,
                     [&](std::span<uint64_t> words) {
                       std::fill(words.begin(), words.end(), 1u << 20);
                       words[0] = kSmallestNonce - 1;  // never handed out
                       return refuses ? Status::Config("getrandom is refused") : Status();
                     });
  for (int tries = 0; tries < 6; ++tries) {
    EXPECT_EQ(guarded.grant(1, 1, 0, kTtl, 0).status().what(), "getrandom is refused");
  }
  EXPECT_EQ(guarded.num_active(), 0u);
  refuses = false;
  for (int round = 0; round < 40; ++round) {
    const auto seats = guarded.grant(1, 4, 0, kTtl, 0);
    ASSERT_TRUE(seats.ok());
    for (const LeaseSeat& seat : *seats) EXPECT_EQ(std::min(seat.nonce, seat.settle_nonce), 1u << 20);
    guarded.abort(1);
    Swept swept;
    guarded.sweep(0, swept);
  }
}

TEST_F(LeaseTableTest, AReaderSaysHowManyCome) {
  const auto seats = *table.grant(1, 4, 0, kTtl, 0);
  words[seats[0].slot].settled = seats[0].settle_nonce ^ 2;
  EXPECT_TRUE(sweep(1).empty());
  EXPECT_EQ(memory[seats[1].slot].nonce, seats[1].nonce);
  EXPECT_EQ(memory[seats[2].slot].nonce, 1u);
  EXPECT_EQ(memory[seats[3].slot].nonce, 1u);
  words[seats[1].slot].settled = seats[1].settle_nonce ^ 2;
  const auto gone = sweep(2);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].how, LeaseEnd::kSettled);
}

TEST_F(LeaseTableTest, TheOnlyReaderEndsALeaseOfManySeats) {
  const auto seats = *table.grant(1, 4, 0, kTtl, 0);
  EXPECT_FALSE(table.settle(seats[0].slot, seats[0].settle_nonce ^ (kMaxSeats + 1)));
  EXPECT_TRUE(table.settle(seats[0].slot, seats[0].settle_nonce ^ 1));
  EXPECT_EQ(sweep(1).size(), 1u);
}

TEST_F(LeaseTableTest, SeatsThatTheCallerChose) {
  const std::array<LeaseSeat, 2> seats{{{3, 1000, 2000}, {1, 3000, 4000}}};
  ASSERT_TRUE(table.grant_at(1, seats, 5, kTtl, 0).ok());
  EXPECT_EQ(memory[3].nonce, 1000u);
  EXPECT_EQ(memory[1].ready, 5u);
  EXPECT_EQ(table.counts(0).granted, 1u);
  for (const LeaseSeat& other : *table.grant(2, 2, 0, kTtl, 0))
    EXPECT_TRUE(other.slot == 2 || other.slot == 4);
  words[3].settled = 2000 ^ 1;
  EXPECT_EQ(sweep(1).size(), 1u);
  EXPECT_TRUE(table.grant_at(3, seats, 0, kTtl, 2).ok());
  EXPECT_EQ(table.grant_at(4, std::array{LeaseSeat{2, 1000, 2000}}, 0, kTtl, 2).code(), Code::kConfig);
}

TEST_F(LeaseTableTest, ChosenSeatsThatCannotBeHadTakeNothing) {
  const uint32_t taken = (*table.grant(1, 1, 0, kTtl, 0))[0].slot;
  const uint32_t free = taken == 1 ? 2 : 1;
  for (const LeaseSeat& wrong : {LeaseSeat{taken, 1000, 2000}, LeaseSeat{0, 1000, 2000},
                                 LeaseSeat{9, 1000, 2000}, LeaseSeat{free, 1000, 2000}, LeaseSeat{3, 0, 2000},
                                 LeaseSeat{3, 1000, 7}, LeaseSeat{UINT32_MAX, 1000, 2000}}) {
    EXPECT_EQ(table.grant_at(2, std::array{LeaseSeat{free, 1000, 2000}, wrong}, 0, kTtl, 0).code(),
              Code::kConfig);
  }
  EXPECT_TRUE(table.grant(3, 3, 0, kTtl, 0).ok());
}

TEST_F(LeaseTableTest, ATimeToLiveCanBeCutShort) {
  ASSERT_TRUE(table.grant(1, 1, 0, 100 * kTtl, 0).ok());
  EXPECT_TRUE(table.set_ttl(1, kTtl, kTtl));
  EXPECT_FALSE(table.set_ttl(2, kTtl, kTtl));
  EXPECT_TRUE(sweep(2 * kTtl - 1).empty());
  EXPECT_EQ(sweep(2 * kTtl)[0].how, LeaseEnd::kExpired);
}

TEST_F(LeaseTableTest, AReaderRenewsByTheLeasesOwnTimeToLive) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  EXPECT_TRUE(table.renew(seat.slot, seat.settle_nonce, kTtl - 1));
  EXPECT_FALSE(table.renew(seat.slot, seat.nonce, kTtl));
  EXPECT_FALSE(table.renew(99, seat.settle_nonce, kTtl));
  EXPECT_TRUE(sweep(2 * kTtl - 2).empty());
  EXPECT_EQ(sweep(2 * kTtl - 1).size(), 1u);
  EXPECT_FALSE(table.renew(seat.slot, seat.settle_nonce, 2 * kTtl));
}

TEST_F(LeaseTableTest, ALeaseHardlyAgesWhileItsOwnerIsPaused) {
  constexpr int64_t kLong = 10 * kMostAgeingNs, kLeft = kTtl - 1;
  ASSERT_TRUE(table.grant(1, 1, 0, kMostAgeingNs + kTtl, 0).ok());
  EXPECT_TRUE(sweep(1).empty());
  EXPECT_TRUE(sweep(1 + kLong).empty());
  EXPECT_TRUE(sweep(kLong + kLeft).empty());
  EXPECT_EQ(sweep(1 + kLong + kLeft)[0].how, LeaseEnd::kExpired);
}

TEST_F(LeaseTableTest, LeasesOfAnOwnerThatIsAlwaysLateEndAllTheSame) {
  ASSERT_TRUE(table.grant(1, 1, 0, 10 * kMostAgeingNs, 0).ok());
  int late = 0;
  while (late < 20 && sweep(++late * 3 * kMostAgeingNs).empty()) {
  }
  EXPECT_EQ(late, 10);
}

TEST_F(LeaseTableTest, WhatLayUnreadInTheOwnersSocketsComesInTime) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, 2 * kMostAgeingNs, 0))[0];
  const int64_t back = 5 * kMostAgeingNs;
  EXPECT_TRUE(sweep(back).empty());
  EXPECT_TRUE(table.renew(seat.slot, seat.settle_nonce, back + 1));
  EXPECT_TRUE(sweep(back + kMostAgeingNs).empty());
  EXPECT_TRUE(sweep(back + 2 * kMostAgeingNs).empty());
  EXPECT_EQ(sweep(back + 2 * kMostAgeingNs + 1)[0].how, LeaseEnd::kExpired);
}

TEST_F(LeaseTableTest, WhoeverIsFirstAfterAStopTellsTheOthersOfIt) {
  const LeaseSeat old = (*table.grant(1, 1, 0, kMostAgeingNs + kTtl, 0))[0];
  const int64_t back = 5 * kMostAgeingNs;
  ASSERT_TRUE(table.grant(2, 1, 0, kTtl, back).ok());  // its own time has only begun
  EXPECT_TRUE(sweep(back + kTtl - 1).empty());
  EXPECT_EQ(sweep(back + kTtl).size(), 2u);
  EXPECT_EQ(memory[old.slot].nonce, 2u);
}

TEST_F(LeaseTableTest, ALateClockOfAnotherThreadIsNoStop) {
  ASSERT_TRUE(table.grant(1, 1, 0, kTtl, 0).ok());
  EXPECT_TRUE(sweep(kTtl - 1).empty());
  EXPECT_FALSE(table.extend(9, kTtl, 1));  // read the clock, then waited for the lock
  EXPECT_EQ(sweep(kTtl).size(), 1u);
}

TEST_F(LeaseTableTest, ExtendMovesTheDeadlineForwardOnly) {
  ASSERT_TRUE(table.grant(1, 1, 0, kTtl, 0).ok());
  EXPECT_TRUE(table.extend(1, kTtl, kTtl / 2));
  EXPECT_TRUE(table.extend(1, 1, 0));
  EXPECT_TRUE(sweep(kTtl).empty());
  EXPECT_EQ(sweep(kTtl + kTtl / 2).size(), 1u);
}

TEST_F(LeaseTableTest, ALongerTimeIsThatOfEverySeat) {
  const std::array<std::function<bool(const LeaseSeat&)>, 3> ways = {
      [&](const LeaseSeat&) { return table.extend(1, 2 * kTtl, 1); },
      [&](const LeaseSeat&) { return table.set_ttl(1, 2 * kTtl, 1); },
      [&](const LeaseSeat& seat) { return table.renew(seat.slot, seat.settle_nonce, kTtl); },
  };
  for (const auto& way : ways) {
    const auto seats = *table.grant(1, 2, 0, kTtl, 0);
    ASSERT_TRUE(way(seats[1]));
    EXPECT_TRUE(sweep(2 * kTtl - 1).empty());
    for (const LeaseSeat& seat : seats) EXPECT_EQ(memory[seat.slot].nonce, seat.nonce);
    EXPECT_EQ(sweep(2 * kTtl + 1).size(), 1u);
  }
}

TEST_F(LeaseTableTest, ASlotAndANonceOfAnybodyAreComparedFirst) {
  const LeaseSeat seat = (*table.grant(9, 1, 0, kTtl, 0))[0];
  EXPECT_EQ(table.lease_at(seat.slot, seat.settle_nonce), 9u);
  const std::array<std::pair<uint32_t, uint64_t>, 6> others = {{{seat.slot, seat.nonce},
                                                                {0, 0},
                                                                {seat.slot + 1, 0},
                                                                {5, seat.settle_nonce},
                                                                {1u << 30, seat.settle_nonce},
                                                                {UINT32_MAX, 0}}};
  for (const auto& [slot, nonce] : others) {
    EXPECT_EQ(table.lease_at(slot, nonce), 0u) << slot;
    EXPECT_FALSE(table.settle(slot, nonce)) << slot;
    EXPECT_FALSE(table.renew(slot, nonce, 1)) << slot;
  }
  ASSERT_TRUE(table.abort(9));
  EXPECT_EQ(table.lease_at(seat.slot, seat.settle_nonce), 9u) << "until the slot is used again";
  EXPECT_NE(table.grant(9, 2, 0, kTtl, 0).status().what().find("already granted"), std::string::npos);
}

TEST_F(LeaseTableTest, TheSmallestNonceIsOne) {
  int calls = 0;
  LeaseTable smallest(std::as_writable_bytes(std::span(memory)), std::as_writable_bytes(std::span(words)), 7,
                      [&calls](std::span<uint64_t> nonces) {
                        std::fill(nonces.begin(), nonces.end(), kSmallestNonce - 1);
                        nonces.back() = nonces.front() = kSmallestNonce;
                        return ++calls == 1 ? Status{} : Status::Config("drawn twice");
                      });
  const auto seats = smallest.grant(1, 1, 0, kTtl, 0);
  ASSERT_TRUE(seats.ok()) << seats.status().what();
  EXPECT_EQ((*seats)[0].nonce, kSmallestNonce);
  EXPECT_EQ((*seats)[0].settle_nonce, kSmallestNonce);
  const std::array<LeaseSeat, 1> chosen{{{3, kSmallestNonce, kSmallestNonce}}};
  EXPECT_TRUE(smallest.grant_at(2, chosen, 0, kTtl, 0).ok());
  const std::array<uint32_t, 1> blocks{1};
  EXPECT_TRUE(smallest.grant_soft_at({4, kSmallestNonce, kSharedSeat}, blocks, 0, kTtl, 0).ok());
}

TEST_F(LeaseTableTest, NothingIsGrantedWithoutRandomNumbers) {
  LeaseTable without(std::as_writable_bytes(std::span(memory)), std::as_writable_bytes(std::span(words)), 7,
                     [](std::span<uint64_t>) { return Status::Config("none left"); });
  const std::array<uint32_t, 1> blocks{1};
  EXPECT_EQ(without.grant(1, 1, 0, kTtl, 0).status().what(), "none left");
  EXPECT_EQ(without.grant_soft(blocks, 0, kTtl, 0).status().what(), "none left");
  EXPECT_EQ(without.counts(0).granted + without.soft_counts().granted, 0u);
}

TEST_F(LeaseTableTest, CountsSayHowLeasesEnded) {
  const LeaseSeat settled = (*table.grant(1, 1, 0, kTtl, 0))[0];
  for (uint64_t lease = 2; lease <= 4; ++lease) ASSERT_TRUE(table.grant(lease, 1, 0, kTtl, 0).ok());
  ASSERT_TRUE(table.settle(settled.slot, settled.settle_nonce));
  ASSERT_TRUE(table.abort(2));
  EXPECT_EQ(sweep(kTtl).size(), 4u);
  const LeaseCounts counts = table.counts(kTtl);
  EXPECT_EQ(counts.granted, 4u);
  EXPECT_EQ(counts.settled, 1u);
  EXPECT_EQ(counts.aborted, 1u);
  EXPECT_EQ(counts.expired, 2u);
}

TEST_F(LeaseTableTest, AReaderThatHasSettledIsNotFencedByAnAbort) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  announce(seat, 42);
  words[seat.slot].settled = seat.settle_nonce;
  EXPECT_FALSE(table.abort(1));
  EXPECT_EQ(sweep(1).size(), 1u);
  EXPECT_TRUE(fenced.empty());
}

TEST(LeaseTableMemory, IsSetUpWhateverIsInItAndNothingBeyond) {
  alignas(64) std::array<LeaseSlot, 8> memory;
  alignas(64) std::array<PeerWords, 8> words;
  const auto bytes = std::as_writable_bytes(std::span(memory));
  const auto word_bytes = std::as_writable_bytes(std::span(words));
  std::fill(bytes.begin(), bytes.end(), std::byte{0xff});
  std::fill(word_bytes.begin(), word_bytes.end(), std::byte{0xff});
  LeaseTable table(bytes.first(5 * sizeof(LeaseSlot)), word_bytes.first(5 * sizeof(PeerWords)), 7);
  for (uint32_t slot = 1; slot < memory.size(); ++slot) {
    const uint64_t wanted = slot < 5 ? 0 : UINT64_MAX;
    EXPECT_EQ(memory[slot].nonce, wanted) << slot;
    EXPECT_EQ(memory[slot].ready, wanted) << slot;
    EXPECT_EQ(words[slot].settled, wanted) << slot;
    EXPECT_EQ(words[slot].reader, wanted) << slot;
  }
}

/// More slots than are checked together.
TEST(LargeLeaseTable, ASweepSeesTheWordsOfEverySlot) {
  constexpr uint32_t kSlots = 37;
  alignas(64) std::array<LeaseSlot, kSlots + 1> memory{};
  alignas(64) std::array<PeerWords, kSlots + 1> words{};
  LeaseTable table{std::as_writable_bytes(std::span(memory)), std::as_writable_bytes(std::span(words)), 7};
  for (uint64_t lease = 1; lease <= kSlots; ++lease) {
    const LeaseSeat seat = (*table.grant(lease, 1, 0, kTtl, 0))[0];
    for (const bool announces : {true, false}) {
      if (announces) {
        words[seat.slot].reader = Announcement{42, Announcement::tag_of(seat.nonce)}.word();
      } else {
        words[seat.slot].settled = seat.settle_nonce;
      }
      Swept swept;
      table.sweep(0, swept);
      EXPECT_EQ(swept.ended.size(), announces ? 0 : 1) << "slot " << seat.slot;
      EXPECT_EQ(words[seat.slot].reader, 0) << "slot " << seat.slot;
      EXPECT_EQ(words[seat.slot].settled, 0) << "slot " << seat.slot;
    }
  }
}

/// The model explores two seats. More are alike: no seat's number decides anything but which ones a settle of
/// fewer readers ends.
TEST(LeaseOfManyReaders, EachSeatIsMovedAndEndsByItself) {
  constexpr auto kSeats = static_cast<uint32_t>(kMaxSeats);
  alignas(64) static std::array<LeaseSlot, kSeats + 1> memory{};
  alignas(64) static std::array<PeerWords, kSeats + 1> words{};
  LeaseTable table{std::as_writable_bytes(std::span(memory)), std::as_writable_bytes(std::span(words)), 7};
  const auto sweep = [&table](int64_t now) {
    Swept swept;
    table.sweep(now, swept);
    return swept.ended;
  };
  const auto standing = [&](const std::vector<LeaseSeat>& seats) {
    return std::count_if(seats.begin(), seats.end(),
                         [&](const LeaseSeat& seat) { return table.holds(seat.slot, seat.nonce); });
  };
  std::vector<LeaseSeat> seats = *table.grant(1, kSeats, 0, kTtl, 0);
  ASSERT_TRUE(table.extend(1, kTtl, kTtl / 2));
  EXPECT_TRUE(sweep(kTtl).empty());
  EXPECT_EQ(standing(seats), kSeats);
  ASSERT_TRUE(table.renew(seats.back().slot, seats.back().settle_nonce, kTtl));
  EXPECT_TRUE(sweep(kTtl + kTtl / 2).empty());
  EXPECT_EQ(standing(seats), kSeats) << "a renewal by one reader moves every seat";
  std::shuffle(seats.begin(), seats.end(), std::mt19937(1));
  for (size_t index = 0; index < seats.size(); ++index) {
    words[seats[index].slot].settled = seats[index].settle_nonce;
    const bool last = index + 1 == seats.size();
    EXPECT_EQ(sweep(kTtl + kTtl / 2).size(), size_t{last}) << index;
    EXPECT_EQ(standing(seats), static_cast<int64_t>(seats.size() - 1 - index));
  }
}

TEST(SweepPause, DoublesWhileNothingEnds) {
  SweepPause pause;
  std::vector<int> ms;
  for (const bool ended : {false, false, false, false, true, false}) {
    ms.push_back(pause.ms());
    pause.swept(ended);
  }
  EXPECT_EQ(ms, (std::vector{1, 2, 4, 8, 8, 1}));
  EXPECT_EQ(pause.ms(), 2);
}

}  // namespace
}  // namespace kvlink

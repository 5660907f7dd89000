// SPDX-License-Identifier: Apache-2.0
// Which readers a lease table names to be cut off, by what they announced.
#include "cpp/lease/lease_tables.h"

namespace kvlink {
namespace {

using lease_tests::kTtl;
using LeaseReadersTest = lease_tests::LeaseTableTest;

TEST_F(LeaseReadersTest, ExpiryAndAbortNameTheReadersToFence) {
  for (uint64_t lease = 1; lease <= 2; ++lease) {
    const LeaseSeat seat = (*table.grant(lease, 1, 0, kTtl, 0))[0];
    announce(seat, 42);
    EXPECT_TRUE(sweep(kTtl - 1).empty());
    if (lease == 2) table.abort(lease);
    EXPECT_EQ(sweep(kTtl).size(), 1u);
    EXPECT_EQ(fenced, std::vector<uint64_t>{42});
    EXPECT_EQ(table.counts(kTtl).fenced_readers, lease);
  }
  EXPECT_TRUE(sweep(kTtl).empty());
  EXPECT_TRUE(fenced.empty()) << "each once";
}

TEST_F(LeaseReadersTest, EveryReaderThatAnnouncedItselfIsKept) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  announce(seat, 42);
  sweep(1);
  announce(seat, 43);
  sweep(2);
  announce(seat, 42);  // another pull of it
  sweep(kTtl);
  EXPECT_EQ(fenced, (std::vector<uint64_t>{42, 43}));
}

TEST_F(LeaseReadersTest, WhoWithdrewIsNotFenced) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  announce(seat, 42);
  sweep(1);
  announce(seat, 43);
  sweep(2);
  announce(seat, 42, true);
  table.abort(1);
  sweep(3);
  EXPECT_EQ(fenced, std::vector<uint64_t>{43});
  announce(seat, 43, true);
  sweep(4);
  EXPECT_TRUE(fenced.empty());
}

TEST_F(LeaseReadersTest, AnAbortFencesItsReadersInTheSweepAndNotBefore) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  announce(seat, 42);
  table.abort(1);
  announce(seat, 42, true);  // it saw the tombstone meanwhile
  EXPECT_EQ(sweep(1).size(), 1u);
  EXPECT_TRUE(fenced.empty());
}

TEST_F(LeaseReadersTest, WhoAnnouncesItselfInAnEndedSlotIsFencedUntilTheSlotIsReused) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  words[seat.slot].settled = seat.settle_nonce;
  EXPECT_EQ(sweep(1).size(), 1u);
  announce(seat, 42);
  sweep(2);
  EXPECT_EQ(fenced, std::vector<uint64_t>{42});
  announce(seat, 43);  // before the slot's next lease, and seen after it
  ASSERT_TRUE(table.grant(2, 4, 0, kTtl, 2).ok());
  sweep(3);
  EXPECT_EQ(fenced, std::vector<uint64_t>{43});
  announce(seat, 44);
  table.abort(2);
  sweep(4);
  EXPECT_TRUE(fenced.empty()) << "it names a lease that is long gone";
}

TEST_F(LeaseReadersTest, AnnouncementsThatNobodyCouldMakeAreIgnored) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  for (uint32_t slot = 0; slot < words.size(); ++slot) words[slot].reader = Announcement{42, 0}.word();
  sweep(1);
  words[seat.slot].reader = Announcement{0, Announcement::tag_of(seat.nonce)}.word();
  sweep(2);
  words[seat.slot].reader = Announcement{42, Announcement::tag_of(seat.nonce) ^ 2}.word();
  sweep(kTtl);
  EXPECT_TRUE(fenced.empty());
}

TEST_F(LeaseReadersTest, AReaderWhoSettledIsNotFencedWhenTheOtherExpires) {
  const auto seats = *table.grant(1, 2, 0, kTtl, 0);
  announce(seats[0], 10);
  words[seats[0].slot].settled = seats[0].settle_nonce;
  announce(seats[1], 11);
  ASSERT_EQ(sweep(kTtl).size(), 1u);
  EXPECT_EQ(fenced, std::vector<uint64_t>{11});
}

TEST_F(LeaseReadersTest, ASettleThatComesAfterTheEndSaysThatNobodyReads) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  announce(seat, 42);
  table.abort(1);
  words[seat.slot].settled = seat.settle_nonce;
  EXPECT_EQ(sweep(1)[0].how, LeaseEnd::kAborted);
  EXPECT_TRUE(fenced.empty());
}

TEST_F(LeaseReadersTest, AReaderOfTheNextLeaseIsNotTakenForALateOneOfTheLast) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, kTtl, 0))[0];
  table.abort(1);
  sweep(1);
  announce(seat, 42);  // late; read when the slot is granted again
  const auto seats = *table.grant(2, 4, 0, kTtl, 1);
  for (const LeaseSeat& next : seats) announce(next, 43);
  sweep(2);
  EXPECT_EQ(fenced, std::vector<uint64_t>{42});
  sweep(3);
  EXPECT_TRUE(fenced.empty());
}

}  // namespace
}  // namespace kvlink

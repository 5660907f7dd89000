// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "cpp/lease/lease_tables.h"

namespace kvlink {
namespace {

using lease_tests::kTtl;

struct SoftLeaseTableTest : lease_tests::LeaseTableTest {
  using Blocks = std::vector<uint32_t>;

  LeaseSeat soft(const Blocks& blocks, int64_t ttl = kNoExpiryNs, int64_t now = 0) {
    return *table.grant_soft(blocks, blocks.size(), ttl, now);
  }
  uint32_t revoke(const Blocks& blocks) { return table.revoke(blocks).num_ended; }
  bool stands(const LeaseSeat& seat) {
    const bool stands = memory[seat.slot].nonce == seat.nonce;
    EXPECT_EQ(table.holds(seat.slot, seat.nonce), stands);
    return stands;
  }
};

TEST_F(SoftLeaseTableTest, ASoftLeaseHasOneSharedSeatAndPinsNothing) {
  const LeaseSeat seat = soft({3, 1, 2});
  EXPECT_TRUE(seat.is_shared());
  EXPECT_TRUE(stands(seat));
  EXPECT_EQ(memory[seat.slot].ready, 3u);
  EXPECT_EQ(table.counts(0).active, 0u);
  EXPECT_EQ(table.num_active(), 0u) << "no thread sweeps for it";
  EXPECT_EQ(table.soft_counts().active, 1u);
}

TEST_F(SoftLeaseTableTest, AWithdrawnLeaseEndsAloneAndOnlyUnderItsOwnNonce) {
  const LeaseSeat seat = soft({1, 2}), other = soft({1, 2});
  EXPECT_FALSE(table.withdraw_soft(seat.slot, other.nonce));
  EXPECT_FALSE(table.withdraw_soft(0, 0));
  EXPECT_FALSE(table.withdraw_soft(1000, seat.nonce));
  const LeaseSeat pinning = (*table.grant(1, 1, 0, kTtl, 0))[0];
  EXPECT_FALSE(table.withdraw_soft(pinning.slot, pinning.nonce));
  EXPECT_TRUE(stands(seat));
  EXPECT_TRUE(table.withdraw_soft(seat.slot, seat.nonce));
  EXPECT_FALSE(table.withdraw_soft(seat.slot, seat.nonce));
  EXPECT_FALSE(stands(seat));
  EXPECT_TRUE(stands(other));
  EXPECT_EQ(revoke({1}), 1u);
}

TEST_F(SoftLeaseTableTest, ARevokeEndsEveryLeaseThatCoversABlockAndNoOther) {
  const LeaseSeat first = soft({1, 2}), grown = soft({1, 2, 3}), other = soft({4});
  EXPECT_EQ(revoke({9, 1000, 0}), 0u);
  EXPECT_EQ(revoke({3}), 1u);
  EXPECT_EQ(memory[grown.slot].nonce, 4u);
  EXPECT_TRUE(stands(first));
  EXPECT_EQ(revoke({2, 2, 1}), 1u);
  EXPECT_EQ(memory[first.slot].nonce, 4u);
  EXPECT_EQ(revoke({1, 2, 3}), 0u);
  EXPECT_TRUE(stands(other));
  EXPECT_EQ(table.soft_counts().evicted, 2u);
  EXPECT_EQ(table.soft_counts().active, 1u);
}

TEST_F(SoftLeaseTableTest, ASlotThatDoesNotExistHoldsNothing) {
  EXPECT_FALSE(table.holds(0, LeaseTableHeader::kMagic));
  EXPECT_FALSE(table.holds(1, 256));
  EXPECT_FALSE(table.holds(1u << 31, 256));
}

TEST_F(SoftLeaseTableTest, ARevokeLeavesLeasesThatPinAlone) {
  const LeaseSeat hard = (*table.grant(1, 1, 0, kTtl, 0))[0];
  soft({1});
  EXPECT_EQ(revoke({0, 1, 2, hard.slot}), 1u);
  EXPECT_TRUE(stands(hard));
}

TEST_F(SoftLeaseTableTest, NoReaderEndsIt) {
  const LeaseSeat seat = soft({1});
  for (const uint64_t word : {kSharedSeat, uint64_t{0}, uint64_t{2}, kMaxSeats, seat.nonce}) {
    EXPECT_FALSE(table.settle(seat.slot, word));
    EXPECT_FALSE(table.renew(seat.slot, word, 0));
    words[seat.slot].settled = word;
    EXPECT_TRUE(sweep(1).empty());
    EXPECT_TRUE(stands(seat)) << word;
  }
}

TEST_F(SoftLeaseTableTest, TheOldestEndsFirstWhenSlotsRunOut) {
  const LeaseSeat oldest = soft({1}), middle = soft({2}), newest = soft({3});
  const auto pinned = table.grant(1, 2, 0, kTtl, 0);
  ASSERT_TRUE(pinned.ok());
  EXPECT_FALSE(stands(oldest));
  EXPECT_TRUE(stands(middle) && stands(newest));
  const LeaseSeat further = soft({4});
  EXPECT_FALSE(stands(middle));
  ASSERT_TRUE(table.grant(2, 2, 0, kTtl, 0).ok());
  EXPECT_FALSE(stands(newest) || stands(further));
  EXPECT_EQ(table.soft_counts().displaced, 4u);
  EXPECT_EQ(table.grant_soft(Blocks{5}, 1, kNoExpiryNs, 0).status().code(), Code::kConfig);
  EXPECT_EQ(revoke({1, 2, 3, 4, 5}), 0u);
}

TEST_F(SoftLeaseTableTest, AGrantThatIsRefusedEndsNone) {
  ASSERT_TRUE(table.grant(1, 2, 0, kTtl, 0).ok());
  const LeaseSeat one = soft({1}), other = soft({2});
  EXPECT_EQ(table.grant(2, 3, 0, kTtl, 0).status().code(), Code::kConfig);
  EXPECT_EQ(table.grant_soft(Blocks{}, 0, kNoExpiryNs, 0).status().code(), Code::kConfig);
  EXPECT_TRUE(stands(one) && stands(other));
}

TEST_F(SoftLeaseTableTest, AnEndedLeaseSaysWhyUntilItsSlotIsNeeded) {
  const LeaseSeat seat = soft({1});
  revoke({1});
  for (uint64_t lease = 1; lease <= 3; ++lease) {
    ASSERT_TRUE(table.grant(lease, 1, 0, kTtl, 0).ok());
    EXPECT_EQ(memory[seat.slot].nonce, 4u);
  }
  EXPECT_EQ((*table.grant(4, 1, 0, kTtl, 0))[0].slot, seat.slot);
}

TEST_F(SoftLeaseTableTest, ATimeToLiveEndsIt) {
  const LeaseSeat lasting = soft({1}), expiring = soft({1}, kTtl);
  EXPECT_EQ(table.num_active(), 1u);
  EXPECT_TRUE(sweep(kTtl - 1).empty());
  EXPECT_TRUE(stands(expiring));
  EXPECT_TRUE(sweep(kTtl).empty()) << "nothing reports it";
  EXPECT_EQ(memory[expiring.slot].nonce, 2u);
  EXPECT_TRUE(stands(lasting));
  EXPECT_EQ(table.soft_counts().expired, 1u);
  EXPECT_EQ(table.num_active(), 0u);
  EXPECT_EQ(revoke({1}), 1u);
}

TEST_F(SoftLeaseTableTest, ATableThatClosesEndsAll) {
  const LeaseSeat seat = soft({1});
  table.abort_all();
  EXPECT_EQ(memory[seat.slot].nonce, 3u);
  EXPECT_EQ(table.soft_counts().active, 0u);
}

TEST_F(SoftLeaseTableTest, SeatsThatTheCallerChose) {
  const LeaseSeat seat{2, 1000, kSharedSeat}, next{2, 2000, kSharedSeat};
  ASSERT_TRUE(table.grant_soft_at(seat, Blocks{1}, 1, kNoExpiryNs, 0).ok());
  EXPECT_TRUE(stands(seat));
  ASSERT_TRUE(table.grant_soft_at(next, Blocks{2}, 1, kNoExpiryNs, 0).ok()) << "it replaces the soft one";
  EXPECT_TRUE(stands(next));
  EXPECT_EQ(revoke({1}), 0u);
  ASSERT_TRUE(table.grant_at(1, std::array{LeaseSeat{2, 3000, 4000}}, 0, kTtl, 0).ok());
  EXPECT_FALSE(stands(next));
  for (const LeaseSeat& wrong :
       {LeaseSeat{2, 1000, kSharedSeat}, LeaseSeat{0, 1000, kSharedSeat}, LeaseSeat{99, 1000, kSharedSeat},
        LeaseSeat{3, 7, kSharedSeat}, LeaseSeat{3, 1000, 2000}, LeaseSeat{3, 1000, 0}}) {
    EXPECT_EQ(table.grant_soft_at(wrong, Blocks{1}, 1, kNoExpiryNs, 0).code(), Code::kConfig);
  }
  EXPECT_EQ(table.grant_at(2, std::array{LeaseSeat{3, 1000, kSharedSeat}}, 0, kTtl, 0).code(), Code::kConfig);
  EXPECT_EQ(table.soft_counts().displaced, 2u);
}

TEST_F(SoftLeaseTableTest, EndsOfWhateverReasonAreCounted) {
  EXPECT_EQ(table.revoke(Blocks{1}).all_ended_so_far, 0u);
  soft({1});
  ASSERT_TRUE(table.grant(1, 4, 0, kTtl, 0).ok());
  const Revoked later = table.revoke(Blocks{1});
  EXPECT_EQ(later.num_ended, 0u);
  EXPECT_EQ(later.all_ended_so_far, 1u);
}

/// An index that keeps sets says what each revoke has to end.
TEST(SoftLeases, TheIndexAgreesWithSetsOfBlocks) {
  constexpr uint32_t kSlots = 24, kBlocks = 40;
  SoftLeases index;
  std::vector<std::set<uint32_t>> covered(kSlots + 1);
  std::vector<uint32_t> by_age;
  std::mt19937 random(1);
  const auto draw = [&](uint32_t end) { return static_cast<uint32_t>(random() % end); };
  for (int step = 0; step < 20'000; ++step) {
    std::vector<uint32_t> blocks(1 + draw(12));
    std::generate(blocks.begin(), blocks.end(), [&] { return draw(kBlocks); });
    if (const uint32_t slot = 1 + draw(kSlots); draw(2) == 0 && !index.has(slot)) {
      index.add(slot, blocks);
      covered[slot] = {blocks.begin(), blocks.end()};
      by_age.push_back(slot);
    } else if (draw(4) == 0 && index.size() > 0) {
      ASSERT_EQ(index.oldest(), by_age.front());
      covered[by_age.front()].clear();
      index.end(by_age.front());
      by_age.erase(by_age.begin());
    } else {
      blocks.resize(1 + draw(2));
      std::set<uint32_t> expected, ended;
      for (const uint32_t live : by_age) {
        for (const uint32_t block : blocks) {
          if (covered[live].contains(block)) expected.insert(live);
        }
      }
      index.end_covering(blocks, [&](uint32_t gone) {
        ended.insert(gone);
        index.end(gone);
      });
      ASSERT_EQ(ended, expected);
      std::erase_if(by_age, [&](uint32_t live) { return ended.contains(live); });
    }
    ASSERT_EQ(index.size(), by_age.size());
  }
}

TEST(SoftLeases, TooManyBlocksEndTheOldest) {
  constexpr uint32_t kHalf = SoftLeases::kMaxEntries / 2;
  std::vector<uint32_t> blocks(kHalf);
  std::iota(blocks.begin(), blocks.end(), 0u);
  alignas(64) std::array<LeaseSlot, 9> memory{};
  alignas(64) std::array<PeerWords, 9> words{};
  LeaseTable table{std::as_writable_bytes(std::span(memory)), std::as_writable_bytes(std::span(words)), 7};
  std::vector<LeaseSeat> seats;
  for (int lease = 0; lease < 3; ++lease) seats.push_back(*table.grant_soft(blocks, kHalf, kNoExpiryNs, 0));
  EXPECT_EQ(memory[seats[0].slot].nonce, 4u);
  EXPECT_EQ(memory[seats[1].slot].nonce, seats[1].nonce);
  EXPECT_EQ(memory[seats[2].slot].nonce, seats[2].nonce);
  EXPECT_EQ(table.soft_counts().displaced, 1u);
  blocks.resize(SoftLeases::kMaxEntries + 1);
  EXPECT_EQ(table.grant_soft(blocks, 1, kNoExpiryNs, 0).status().code(), Code::kConfig);
  EXPECT_EQ(table.soft_counts().active, 2u);
}

}  // namespace
}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// What the rooms require of each other: each contract, broken once, ends the call by an exception.
#include "base/check.h"

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>

#include "base/free_slots.h"
#include "base/status.h"
#include "cpp/lease/lease_tables.h"
#include "engine/engine.h"
#include "engine/pull.h"
#include "engine/stream_planner.h"
#include "plan/groups.h"

namespace kvlink {
namespace {

struct Broken {
  const char* name;
  std::function<void()> call;
  friend std::ostream& operator<<(std::ostream& out, const Broken& one) { return out << one.name; }
};

LeaseTable table_of(size_t slots, size_t words) {
  alignas(64) static std::array<std::byte, 4096> memory;
  return {std::span(memory).first(slots), std::span(memory).last(words), 1};
}

void end_soft(const std::function<void(SoftLeases&)>& call) {
  SoftLeases soft;
  call(soft);
}

const Broken kBroken[] = {
    {"pop_of_none", [] { FreeSlots(1).pop(); }},
    {"push_twice", [] { FreeSlots(2).push(1); }},
    {"push_beyond", [] { FreeSlots(2).push(2); }},
    {"remove_what_is_not_free",
     [] {
       FreeSlots free(2);
       free.remove(free.pop());
     }},
    {"deadline_of_none", [] { static_cast<void>(SeatDeadlines(2).at(1)); }},
    {"soft_end_of_none", [] { end_soft([](SoftLeases& soft) { soft.end(1); }); }},
    {"soft_oldest_of_none", [] { end_soft([](SoftLeases& soft) { static_cast<void>(soft.oldest()); }); }},
    {"soft_twice", [] { end_soft([](SoftLeases& soft) { soft.add(1, {}), soft.add(1, {}); }); }},
    {"words_of_another_table", [] { table_of(LeaseTable::slots_bytes(2), LeaseTable::words_bytes(3)); }},
    {"a_part_of_a_slot", [] { table_of(LeaseTable::slots_bytes(2) + 8, LeaseTable::words_bytes(2)); }},
    {"begin_without_control", [] { Pull::waiting(0, nullptr)->begin(); }},
    {"stream_of_nothing", [] { static_cast<void>(StreamPlanner().start({})); }},
    {"behind_repeats",
     [] {
       Plan plan;
       plan.repeats.resize(1);
       static_cast<void>(plan_behind({}, {}, plan));
     }},
    {"leases_before_the_start", [] { (*Engine::make({}))->leases(); }},
    {"a_start_without_a_pool", [] { static_cast<void>((*Engine::make({}))->start()); }},
};

struct CheckTest : ::testing::TestWithParam<Broken> {};

TEST_P(CheckTest, EndsTheCallAndSaysWhich) {
  try {
    GetParam().call();
    FAIL() << "nothing was noticed";
  } catch (const BrokenContract& broken) {
    EXPECT_NE(std::string(broken.what()).find("() needs "), std::string::npos);
  }
}

INSTANTIATE_TEST_SUITE_P(Contracts, CheckTest, ::testing::ValuesIn(kBroken),
                         [](const auto& one) { return std::string(one.param.name); });

/// A slot holds what the table stored there, at both ends of a lease.
struct PairTest : lease_tests::LeaseTableTest {};

TEST_F(PairTest, ASlotThatAnotherWroteIsNoticedAtTheEndOfItsLease) {
  const LeaseSeat seat = (*table.grant(1, 1, 0, lease_tests::kTtl, 0))[0];
  for (const uint64_t other : {uint64_t{0}, uint64_t{2}, ~seat.nonce}) {
    memory[seat.slot].nonce = other;
    EXPECT_THROW(table.abort(1), BrokenContract) << other;
  }
  memory[seat.slot].nonce = seat.nonce;
  EXPECT_TRUE(table.abort(1)) << "the call alone has ended";
}

TEST_F(PairTest, ASlotThatAnotherWroteIsNoticedBeforeItIsGranted) {
  for (LeaseSlot& slot : memory) slot.nonce = kSmallestNonce;
  EXPECT_THROW(static_cast<void>(table.grant(1, 1, 0, lease_tests::kTtl, 0)), BrokenContract);
}

TEST_F(PairTest, NothingValidatesInATableThatCannotBeTrusted) {
  const LeaseSeat hard = (*table.grant(1, 1, 0, lease_tests::kTtl, 0))[0];
  const LeaseSeat soft = *table.grant_soft(std::array{1u}, 1, kNoExpiryNs, 0);
  table.void_all();
  EXPECT_FALSE(table.holds(hard.slot, hard.nonce) || table.holds(soft.slot, soft.nonce));
}

}  // namespace
}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Caches of several shapes in one region: attention with eight tokens a block, and states of which a block is
// one.
#include "plan/groups.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

namespace kvlink {
namespace {

/// Pages of one region hold either eight rows of attention, or one state behind 64 bytes of something else.
class GroupsTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kPage = 256, kPages = 16, kTokens = 8, kRow = 32;
  static constexpr uint32_t kStateBytes = 96, kStateOffset = 64;
  std::vector<std::byte> owner = std::vector<std::byte>(kPage * kPages);
  std::vector<std::byte> reader = std::vector<std::byte>(kPage * kPages);
  const Layout attention{kPages, kTokens, 0, 1, kRow, kPage, kRow, kRow, {{0, 0, 0}}};
  const Layout state{kPages, 1, 0, 1, kStateBytes, kPage, kStateBytes, kStateBytes, {{0, 0, kStateOffset}}};
  std::array<uint32_t, 2> owner_tokens{3, 7}, reader_tokens{5, 2};
  std::array<uint32_t, 1> owner_state{9}, reader_state{4};

  void SetUp() override {
    for (size_t i = 0; i < owner.size(); ++i) owner[i] = static_cast<std::byte>(i * 7 + i / 251);
  }

  GroupRead read_of(const Layout& layout, std::span<const uint32_t> from, std::span<const uint32_t> to,
                    Range tokens, bool at_end = false) {
    auto made =
        Planner::make(layout, layout, {{reader.data(), reader.size(), -1, 0}}, {owner.size()}, {0}, {});
    EXPECT_TRUE(made.ok()) << made.status().what();
    return {*made, from, to, tokens, {}, at_end};
  }

  void carry_out(const Plan& plan) const {
    for (const ReadOp& op : plan.ops) {
      const std::byte* from = owner.data() + op.offset;
      for (uint32_t i = 0; i < op.num_segments; ++i) {
        const Segment& segment = plan.segments[op.first_segment + i];
        std::memcpy(segment.local, from, segment.bytes);
        from += segment.bytes;
      }
    }
  }

  bool landed(uint32_t from, uint32_t to, size_t offset, size_t bytes) const {
    return std::memcmp(owner.data() + from * kPage + offset, reader.data() + to * kPage + offset, bytes) == 0;
  }
};

TEST_F(GroupsTest, OnePlanReadsEveryGroup) {
  const GroupRead tokens = read_of(attention, owner_tokens, reader_tokens, {0, 11});
  const std::array more{read_of(state, owner_state, reader_state, {0, 1}, true)};
  Plan plan;
  ASSERT_TRUE(plan_groups(tokens, more, plan).ok());
  EXPECT_EQ(plan.bytes, 11 * kRow + kStateBytes);
  carry_out(plan);
  EXPECT_TRUE(landed(3, 5, 0, 8 * kRow));
  EXPECT_TRUE(landed(7, 2, 0, 3 * kRow));
  EXPECT_TRUE(landed(9, 4, kStateOffset, kStateBytes));
  EXPECT_FALSE(landed(7, 2, 3 * kRow, kRow)) << "a token beyond the range";
  EXPECT_FALSE(landed(9, 4, 0, kStateOffset)) << "bytes of the page before the state";
}

TEST_F(GroupsTest, RefusesGroupsThatWriteTheSameBytes) {
  const GroupRead tokens = read_of(attention, owner_tokens, reader_tokens, {0, 11});
  reader_state[0] = 2;  // the page of the second block of tokens; the third token's row and the state overlap
  const std::array more{read_of(state, owner_state, reader_state, {0, 1}, true)};
  Plan plan;
  const Status refused = plan_groups(tokens, more, plan);
  EXPECT_EQ(refused.code(), Code::kConfig);
  EXPECT_NE(refused.what().find("two cache groups name blocks in the same memory"), std::string::npos);
  EXPECT_TRUE(plan.ops.empty() && plan.segments.empty() && plan.bytes == 0);
}

TEST_F(GroupsTest, GroupsMayShareAPageWithoutSharingBytes) {
  const GroupRead tokens = read_of(attention, owner_tokens, reader_tokens, {0, 10});
  reader_state[0] = 2;  // two rows of 32 bytes end where the state begins
  const std::array more{read_of(state, owner_state, reader_state, {0, 1}, true)};
  Plan plan;
  EXPECT_TRUE(plan_groups(tokens, more, plan).ok());
}

TEST_F(GroupsTest, RefusesWhatItsPlannersRefuse) {
  const GroupRead tokens = read_of(attention, owner_tokens, reader_tokens, {0, 11});
  owner_state[0] = kPages;
  const std::array more{read_of(state, owner_state, reader_state, {0, 1}, true)};
  Plan plan;
  EXPECT_EQ(plan_groups(tokens, more, plan).code(), Code::kConfig);
  EXPECT_TRUE(plan.ops.empty() && plan.segments.empty());
  EXPECT_EQ(plan_groups(more[0], std::array{tokens}, plan).code(), Code::kConfig)
      << "also of the first alone";
  EXPECT_TRUE(plan.ops.empty() && plan.segments.empty());
}

}  // namespace
}  // namespace kvlink

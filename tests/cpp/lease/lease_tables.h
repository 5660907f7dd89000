// SPDX-License-Identifier: Apache-2.0
// A lease table of four slots, and time that the test owns.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "lease/lease_table.h"

namespace kvlink::lease_tests {

constexpr int64_t kTtl = 1000;

struct LeaseTableTest : ::testing::Test {
  alignas(64) std::array<LeaseSlot, 5> memory{};  // the header and four slots
  alignas(64) std::array<PeerWords, 5> words{};
  LeaseTable table{std::as_writable_bytes(std::span(memory)), std::as_writable_bytes(std::span(words)), 7};
  std::vector<uint64_t> fenced;  // by the last sweep

  std::vector<EndedLease> sweep(int64_t now) {
    Swept swept;
    table.sweep(now, swept);
    fenced = swept.to_fence;
    return swept.ended;
  }
  void announce(const LeaseSeat& seat, uint32_t connection, bool withdrawn = false) {
    words[seat.slot].reader = Announcement{connection, Announcement::tag_of(seat.nonce), withdrawn}.word();
  }
};

}  // namespace kvlink::lease_tests

// SPDX-License-Identifier: Apache-2.0
// Transfers whose lanes are the test: no endpoint, no thread, no clock.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "engine/transfer.h"
#include "lease/lease_table.h"

namespace kvlink::by_hand {

constexpr uint64_t kNonce = 7700;
constexpr uint64_t kSettle = 9900;
constexpr uint32_t kBlockBytes = 64;
constexpr int64_t kFar = INT64_MAX;
constexpr Window kOneOp{kBlockBytes, 1, 8};
constexpr Window kAllOps{1 << 20, 64, 8};

using Kind = Step::Kind;

struct TransferTest : ::testing::Test {
  std::vector<std::byte> pool = std::vector<std::byte>(16 * kBlockBytes);
  std::shared_ptr<const Planner> planner;
  std::shared_ptr<uint64_t[]> words{new uint64_t[8]{}};
  std::array<uint32_t, 3> owner{1, 5, 9}, reader{2, 4, 6};
  std::shared_ptr<PathStats> path_stats;  // may be null
  int wakes = 0;                          // of the lanes' drivers
  std::atomic<int> drives{0};             // of the lanes, by those who wait

  void SetUp() override {
    const Layout layout{16, 1, 0, 1, kBlockBytes, kBlockBytes, kBlockBytes, kBlockBytes, {{0, 0, 0}}};
    auto made = Planner::make(layout, layout, {{pool.data(), pool.size(), -1, 0}}, {pool.size()}, {0}, {});
    ASSERT_TRUE(made.ok()) << made.status().what();
    planner = *made;
  }

  std::unique_ptr<Transfer> start(StreamUnit stream = StreamUnit::kNone, int64_t deadline = kFar,
                                  const LeaseSeat& seat = {1, kNonce, kSettle}, PullRequest request = {}) {
    request.planner = planner;
    request.owner_blocks = owner;
    request.reader_blocks = reader;
    request.tokens = {0, 3};
    request.stream = stream;
    request.seat = seat;
    request.deadline_ns = deadline;
    auto transfer =
        std::make_unique<Transfer>(request, 0,
                                   std::make_shared<TransferDriver>(TransferDriver{
                                       [this] { ++wakes; }, [this](const Transfer&, int64_t) { ++drives; }}),
                                   path_stats);
    transfer->set_scratch(words, 1);
    transfer->attach();
    return transfer;
  }

  void slot_says(uint64_t nonce, uint64_t ready = 0) {
    words[0] = nonce;
    words[1] = ready;
  }
};

}  // namespace kvlink::by_hand

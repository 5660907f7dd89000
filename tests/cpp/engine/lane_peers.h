// SPDX-License-Identifier: Apache-2.0
// One pull over two lanes with fake endpoints: what is posted in one round lands in the next, so that every
// lane is equally far away.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "engine/lane.h"
#include "lease/lease_table.h"

namespace kvlink::lane_tests {

constexpr uint32_t kBlockBytes = 1024;
constexpr uint32_t kNumBlocks = 4096;
constexpr uint64_t kNonce = 7700;
constexpr uint32_t kSlot = 1;
constexpr uint32_t kPool = 0, kLeases = 1, kWords = 2;  // regions of the owner

/// The owner's memory, which a test may fill.
struct Owner {
  std::vector<std::byte> pool = std::vector<std::byte>(size_t{kNumBlocks} * kBlockBytes);
  std::array<uint64_t, 16> leases{};

  const std::byte* region(uint32_t index) const {
    return index == kPool ? pool.data() : reinterpret_cast<const std::byte*>(leases.data());
  }
};

class FakeEndpoint final : public Endpoint {
 public:
  FakeEndpoint(const Owner& owner, const Traits& traits, uint64_t& landed, const bool& broken)
      : owner_(owner), traits_(traits), landed_(landed), broken_(broken) {}

  std::string hello() const override { return {}; }
  Status establish(std::string_view, const Patience&) override { return {}; }
  Result<uint32_t> import_region(std::string_view) override { return num_regions_++; }
  const Traits& traits() const override { return traits_; }

  Status post_read(uint64_t token, const Chunk& chunk) override {
    posts_.push_back({token, chunk});
    const bool of_lease = chunk.ops.front().region == kLeases;
    num_unguarded_ += !of_lease && (chunk.guard.region != kLeases || chunk.guard.value != kNonce ||
                                    chunk.guard.offset != kSlot * sizeof(LeaseSlot));
    return {};
  }
  Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) override {
    EXPECT_EQ(region, kWords);
    if (!write_refusal_.ok()) return write_refusal_;
    posts_.push_back({token, {}});
    if (words_.empty()) num_posts_before_word_ = posts_.size() - 1;
    words_.push_back({offset, value});
    return {};
  }
  PollResult poll(int64_t, bool waiting, std::vector<Completion>& ended) override {
    if (on_poll_) on_poll_();
    ended.insert(ended.end(), stray_.begin(), stray_.end());
    num_checks_ += waiting && posts_.empty();
    if (broken_) return {Status::Unreachable("the NIC died"), false};
    if (num_due_ > 0 && num_vain_++ % (1 + late_polls_) < late_polls_) return {{}, false, next_check_ns_};
    const bool any = num_due_ > 0;
    for (; num_due_ > 0; --num_due_) {
      if (refusal_.ok()) copy(posts_.front().chunk);
      ended.push_back({posts_.front().token, refusal_});
      posts_.erase(posts_.begin());
    }
    num_due_ = posts_.size();
    return {{}, any, next_check_ns_};
  }
  bool cancel(uint64_t) override { return false; }
  bool arm() override {
    ++num_arms_;
    return true;
  }
  void close() override { posts_.clear(); }

  std::function<void()> on_poll_;
  Status refusal_;                 // of every post that ends
  Status write_refusal_;           // of every store
  std::vector<Completion> stray_;  // of what was never posted
  int64_t next_check_ns_ = INT64_MAX;
  uint32_t num_checks_ = 0;  // polls for a pull that waits, with nothing posted
  uint32_t late_polls_ = 0;  // polls in vain before a post has landed
  uint32_t num_vain_ = 0;
  uint32_t num_arms_ = 0;
  std::vector<std::array<uint64_t, 2>> words_;  // stores: where, and what
  size_t num_posts_before_word_ = 0;            // the first
  uint32_t num_unguarded_ = 0;                  // reads of blocks that do not name their lease
  size_t num_posts() const { return posts_.size(); }

 private:
  struct Post {
    uint64_t token;
    Chunk chunk;
  };

  void copy(const Chunk& chunk) {
    for (const ReadOp& op : chunk.ops) {
      const std::byte* from = owner_.region(op.region) + op.offset;
      for (uint32_t i = 0; i < op.num_segments; ++i) {
        const Segment& segment = chunk.segments[op.first_segment + i];
        std::memcpy(segment.local, from, segment.bytes);
        from += segment.bytes;
      }
      if (op.region == kPool) landed_ += op.bytes;
    }
  }

  const Owner& owner_;
  const Traits traits_;
  uint64_t& landed_;
  const bool& broken_;
  std::vector<Post> posts_;
  size_t num_due_ = 0;
  uint32_t num_regions_ = 0;
};

struct FakeDriver final : LaneDriver {
  void wake() override { ++wakes; }
  void wake_from_doze() override { ++doze_wakes; }

  int wakes = 0, doze_wakes = 0;
};

inline Window window(uint64_t bytes) {
  return {.chunk_bytes = static_cast<uint32_t>(bytes / 4), .chunk_ops = 256, .depth = 4, .bytes = bytes};
}

inline const Window kWhole{.chunk_bytes = UINT32_MAX, .chunk_ops = UINT32_MAX, .depth = 4};

/// One pull of every other block over lanes of their own windows.
struct LaneTest : ::testing::Test {
  Owner owner;
  std::vector<std::byte> mine = std::vector<std::byte>(owner.pool.size());
  std::vector<uint32_t> owner_blocks, reader_blocks;
  std::shared_ptr<uint64_t[]> words{new uint64_t[8]{}};
  std::shared_ptr<Transfer> transfer;
  std::shared_ptr<FakeDriver> driver = std::make_shared<FakeDriver>();
  std::vector<std::unique_ptr<Lane>> lanes;
  std::array<uint64_t, 2> landed{};
  std::array<bool, 2> broken{};
  std::shared_ptr<AnnouncedReaders> readers;  // null: nobody announces anything
  uint64_t settle_nonce = 0;                  // 0: the pull does not settle
  int64_t timeout_ns = 0;                     // 0: none
  bool device_driven = false;                 // both lanes
  int driver_wakes = 0;

  void start(std::array<Window, 2> windows, bool submits = true) {
    for (size_t i = 0; i < owner.pool.size(); ++i) owner.pool[i] = static_cast<std::byte>(i * 31 >> 3);
    owner.leases[kSlot * sizeof(LeaseSlot) / sizeof(uint64_t)] = kNonce;
    owner_blocks.clear();
    reader_blocks.clear();
    for (uint32_t block = 0; block < kNumBlocks; block += 2) {
      owner_blocks.push_back(block);
      reader_blocks.push_back(kNumBlocks - 1 - block);
    }
    const Layout layout{kNumBlocks, 1, 0, 1, kBlockBytes, kBlockBytes, kBlockBytes, kBlockBytes, {{0, 0, 0}}};
    auto planner = Planner::make(layout, layout, {{mine.data(), mine.size()}}, {mine.size()}, {kPool}, {});
    ASSERT_TRUE(planner.ok()) << planner.status().what();
    PullRequest request;
    request.planner = *planner;
    request.owner_blocks = owner_blocks;
    request.reader_blocks = reader_blocks;
    request.tokens = {0, static_cast<uint32_t>(owner_blocks.size())};
    request.seat = {kSlot, kNonce, settle_nonce};
    request.deadline_ns = timeout_ns > 0 ? now_ns() + timeout_ns : INT64_MAX;
    const auto drive_for = [this](const Transfer& mine, int64_t until) { lanes[0]->drive_for(mine, until); };
    transfer = std::make_shared<Transfer>(
        request, 0, std::make_shared<TransferDriver>(TransferDriver{[this] { ++driver_wakes; }, drive_for}));
    transfer->set_scratch(words, 1);
    for (uint32_t i = 0; i < 2; ++i) {
      auto endpoint = std::make_unique<FakeEndpoint>(
          owner, Traits{.window = windows[i], .device_driven = device_driven}, landed[i], broken[i]);
      lanes.push_back(std::make_unique<Lane>(LaneEnd{std::move(endpoint)}, i));
      lanes.back()->ready({kLeases, kWords}, readers, driver);
      if (submits) lanes.back()->submit(transfer);
    }
  }

  FakeEndpoint& endpoint(size_t lane) { return static_cast<FakeEndpoint&>(lanes[lane]->endpoint()); }
  /// Polls in vain by whoever waits, each time, until the pull has ended.
  std::vector<uint32_t> vain_polls() {
    std::vector<uint32_t> vain;
    while (!transfer->done()) {
      const uint32_t before = endpoint(0).num_vain_;
      lanes[0]->drive_for(*transfer, INT64_MAX);
      vain.push_back(endpoint(0).num_vain_ - before);
    }
    return vain;
  }

  void drive(int rounds = 10'000) {
    for (int round = 0; round < rounds && !transfer->done(); ++round) {
      for (const auto& lane : lanes) lane->drive();
    }
  }

  void expect_valid() {
    ASSERT_EQ(transfer->state(), TransferState::kValid) << transfer->status().what();
    for (size_t i = 0; i < owner_blocks.size(); ++i) {
      const std::byte* const theirs = &owner.pool[size_t{owner_blocks[i]} * kBlockBytes];
      ASSERT_EQ(std::memcmp(&mine[size_t{reader_blocks[i]} * kBlockBytes], theirs, kBlockBytes), 0) << i;
    }
  }
};

}  // namespace kvlink::lane_tests

// SPDX-License-Identifier: Apache-2.0
// The endpoint that stages its reads, step by step: the test decides when a read arrives and when a copy
// ends.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "cpp/staging/bounce_peers.h"
#include "staging/device_staging.h"

namespace kvlink::testing {
namespace {

constexpr uint32_t kSlot = SlotRing::kSlotBytes;

/// Ends what the test says, in the next poll.
struct HandEndpoint final : Endpoint {
  struct Post {
    uint64_t token;
    std::vector<ReadOp> ops;  // none: a write
    std::vector<Segment> segments;
  };

  std::string hello() const override { return {}; }
  Status establish(std::string_view, const Patience&) override { return {}; }
  Result<uint32_t> import_region(std::string_view) override { return 0u; }
  const Traits& traits() const override { return traits_; }
  Status post_read(uint64_t token, const Chunk& chunk) override {
    Post& post = posts_.emplace_back(Post{token, {chunk.ops.begin(), chunk.ops.end()}, {}});
    for (const ReadOp& op : chunk.ops) {
      post.segments.insert(post.segments.end(), chunk.segments + op.first_segment,
                           chunk.segments + op.first_segment + op.num_segments);
    }
    return {};
  }
  Status post_write(uint64_t token, uint32_t, uint64_t, uint64_t) override {
    posts_.push_back({token, {}, {}});
    return {};
  }
  PollResult poll(int64_t, bool, std::vector<Completion>& ended) override {
    ended.insert(ended.end(), ended_.begin(), ended_.end());
    ended_.clear();
    return {{}, std::exchange(progressed_, false)};
  }
  bool cancel(uint64_t) override { return false; }
  void close() override {}

  void end(size_t post, const Status& status = {}) { ended_.push_back({posts_[post].token, status}); }

  Traits traits_{.window = {.chunk_bytes = 1 << 20, .chunk_ops = 8, .depth = 2, .bytes = 4 << 20}};
  std::vector<Post> posts_;
  std::vector<Completion> ended_;
  bool progressed_ = false;
};

/// Copies end when the test says so.
struct HandCopier final : DeviceCopier {
  struct Queue final : CopyQueue {
    explicit Queue(HandCopier& copier) : copier(copier) {}
    Result<uint64_t> start(CopyTo, std::span<const CopyPiece>) override { return ++copier.started; }
    Result<bool> done(uint64_t number) override { return copier.landed.contains(number); }
    void drain() override {}
    HandCopier& copier;
  };

  Status pin(std::byte*, uint64_t) override { return pins; }
  Result<std::unique_ptr<CopyQueue>> open_queue() override {
    if (!opens.ok()) return opens;
    return std::unique_ptr<CopyQueue>(std::make_unique<Queue>(*this));
  }

  Status pins, opens;
  uint64_t started = 0;
  std::set<uint64_t> landed;
};

struct StagedEndpointTest : ::testing::Test {
  std::vector<std::byte> pool = std::vector<std::byte>(8 * kSlot), slots = std::vector<std::byte>(8 * kSlot);
  std::shared_ptr<HandCopier> copier = std::make_shared<HandCopier>();
  std::shared_ptr<StagingBuffer> buffer =
      std::make_shared<StagingBuffer>(MemoryRange{.base = slots.data(), .bytes = slots.size()}, copier);
  HandEndpoint* inner = nullptr;
  std::unique_ptr<StageableEndpoint> endpoint;
  std::vector<Completion> ended;
  std::vector<Scatter> kept;  // as long as their posts

  Status open(const StagingRules& rules, const Traits& traits = HandEndpoint().traits_) {
    auto made = std::make_unique<HandEndpoint>();
    inner = made.get();
    inner->traits_ = traits;
    endpoint = std::move(*stage_endpoint(std::move(made), buffer, rules, 0));
    return endpoint->establish({}, kSecondNs);
  }
  Chunk to_pool(const std::vector<std::pair<uint64_t, uint32_t>>& ranges, uint32_t region = 0) {
    if (kept.capacity() == 0) kept.reserve(100);
    Scatter& scatter = kept.emplace_back();
    for (const auto& [offset, bytes] : ranges) {
      scatter.add(0, offset, {{&pool[offset % pool.size()], bytes, region}});
    }
    return scatter.chunk();
  }
  bool poll() { return endpoint->poll(0, false, ended).progressed; }
};

TEST_F(StagedEndpointTest, AsksForMoreThanTheWireTakesBecauseCopiesTakeTimeToo) {
  ASSERT_TRUE(open({}).ok());
  EXPECT_EQ(endpoint->traits().window.depth, 6u) << "two on the wire, four that are copied";
  EXPECT_EQ(endpoint->traits().window.bytes, (4u << 20) + 4 * (1u << 20));
  EXPECT_EQ(endpoint->traits().window.chunk_bytes, 1u << 20) << "reads that go straight are no slots";
  ASSERT_TRUE(open({.num_out_of_reach = 1}).ok());
  EXPECT_EQ(endpoint->traits().window.chunk_bytes, kSlot);
  EXPECT_EQ(endpoint->traits().window.bytes, (4u << 20) + 4 * kSlot);
  Traits unlimited = HandEndpoint().traits_;
  unlimited.window.bytes = UINT64_MAX;
  ASSERT_TRUE(open({}, unlimited).ok());
  EXPECT_EQ(endpoint->traits().window.bytes, UINT64_MAX);
}

TEST_F(StagedEndpointTest, RefusesADescriptorThatCannotBeWatched) {
  Traits closed = HandEndpoint().traits_;
  closed.wake_fd = INT32_MAX;
  EXPECT_EQ(open({}, closed).code(), Code::kTransportUnavailable);
}

TEST_F(StagedEndpointTest, RefusesAReadWithoutOperations) {
  ASSERT_TRUE(open({}).ok());
  EXPECT_EQ(endpoint->post_read(1, {}).code(), Code::kConfig);
  EXPECT_EQ(endpoint->post_staged(1, {}).code(), Code::kConfig);
}

TEST_F(StagedEndpointTest, HasAsManySlotsOnTheWireAsItTakesWhateverTheRingHas) {
  ASSERT_TRUE(open({}).ok());
  ASSERT_TRUE(endpoint->post_staged(1, to_pool({{0, 4 * kSlot}})).ok());
  poll();
  ASSERT_EQ(inner->posts_.size(), 2u) << "both in one poll";
  EXPECT_EQ(buffer->ring().num_free(), 6u);
  EXPECT_TRUE(endpoint->arm()) << "nothing can be asked for before one arrives";
  inner->end(0);
  poll();
  poll();
  EXPECT_EQ(inner->posts_.size(), 3u) << "the slot that is copied is no longer on the wire";
}

TEST_F(StagedEndpointTest, ProgressIsWhatTheWireACopyOrAnEndMade) {
  ASSERT_TRUE(open({}).ok());
  ASSERT_TRUE(endpoint->post_staged(1, to_pool({{0, 64}})).ok());
  EXPECT_FALSE(poll());
  inner->end(0);
  inner->progressed_ = true;
  EXPECT_TRUE(poll()) << "of the wire, while a copy is under way and nothing has ended";
  EXPECT_FALSE(poll()) << "the copy has not landed";
  copier->landed.insert(1);
  EXPECT_TRUE(poll());
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_TRUE(ended[0].status.ok());
  EXPECT_EQ(buffer->ring().num_free(), 8u);
  ASSERT_TRUE(endpoint->post_write(2, 0, 0, 7).ok());
  poll();
  inner->end(1);
  EXPECT_TRUE(poll()) << "a post that has ended, without a copy";
}

TEST_F(StagedEndpointTest, WhoMovesTheBytesInPollDoesNotSleepMeanwhile) {
  Traits copies = HandEndpoint().traits_;
  copies.cpu_copies = true;
  ASSERT_TRUE(open({}, copies).ok());
  EXPECT_TRUE(endpoint->arm());
  ASSERT_TRUE(endpoint->post_staged(1, to_pool({{0, 64}})).ok());
  EXPECT_FALSE(endpoint->arm()) << "it has not been asked for";
  poll();
  EXPECT_FALSE(endpoint->arm());
  inner->end(0);
  poll();
  EXPECT_TRUE(endpoint->arm()) << "now the device copies";
}

TEST_F(StagedEndpointTest, APostThatFailsInPartLeavesTheNextOneAlone) {
  ASSERT_TRUE(open({}).ok());
  ASSERT_TRUE(endpoint->post_staged(1, to_pool({{0, 4 * kSlot}})).ok());
  ASSERT_TRUE(endpoint->post_staged(2, to_pool({{4 * kSlot, 64}})).ok());
  poll();
  inner->end(0, Status::Stale(StaleReason::kExpired, "the lease ended"));
  inner->end(1, Status::Unreachable("the owner died"));
  poll();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].status.code(), Code::kStaleBlocks) << "the first failure";
  poll();
  ASSERT_EQ(inner->posts_.size(), 3u) << "nothing more of the first, and the second";
  EXPECT_EQ(inner->posts_[2].ops[0].offset, 4 * kSlot);
  inner->end(2);
  poll();
  copier->landed.insert(1);
  poll();
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_TRUE(ended[1].status.ok());
}

TEST_F(StagedEndpointTest, AStagedReadMayGoToRegionsThatTheWireReaches) {
  ASSERT_TRUE(open({}).ok());
  Scatter both;
  both.add(0, 0, {{&pool[0], 8, 0}, {&pool[64], 8, 1}});
  ASSERT_TRUE(endpoint->post_staged(1, both.chunk()).ok());
  poll();
  ASSERT_EQ(inner->posts_.size(), 1u);
  EXPECT_EQ(inner->posts_[0].segments[0].region, 0u) << "both land in a slot first";
  EXPECT_EQ(inner->posts_[0].segments[0].bytes, 16u);
}

/// 4 KiB take as long as another operation.
TEST_F(StagedEndpointTest, OfADeviceGapsOf4KibAreReadAlongAndNoLongerOnes) {
  auto made = std::make_unique<HandEndpoint>();
  inner = made.get();
  endpoint = std::move(*DeviceStaging(buffer, "verbs", false, 0).wrap(std::move(made)));
  ASSERT_TRUE(endpoint->establish({}, kSecondNs).ok());
  ASSERT_TRUE(endpoint->post_staged(1, to_pool({{0, 64}, {64 + 4096, 64}})).ok());
  ASSERT_TRUE(endpoint->post_staged(2, to_pool({{0, 64}, {64 + 4097, 64}})).ok());
  poll();
  ASSERT_EQ(inner->posts_.size(), 2u);
  EXPECT_EQ(inner->posts_[0].ops.size(), 1u);
  EXPECT_EQ(inner->posts_[0].ops[0].bytes, 64u + 4096 + 64);
  EXPECT_EQ(inner->posts_[1].ops.size(), 2u);
}

TEST_F(StagedEndpointTest, ADeviceThatRefusesIsNotUsed) {
  const MakeDeviceCopier copiers = [this](const std::byte*) { return copier; };
  copier->pins = Status::Unavailable("no memory can be pinned", {});
  EXPECT_EQ(Bounce::make(pool.data(), Bounce::kLeastBytes, copiers).status().code(),
            Code::kTransportUnavailable);
  copier->pins = {};
  copier->opens = Status::Unavailable("there is no stream", {});
  EXPECT_EQ(stage_endpoint(std::make_unique<HandEndpoint>(), buffer, {}, 0).status().code(),
            Code::kTransportUnavailable);
  const auto bounce = Bounce::make(pool.data(), Bounce::kLeastBytes, copiers);
  ASSERT_TRUE(bounce.ok());
  const auto transport = bounce_wrap(must_make("loopback"), *bounce, 1, {});
  ASSERT_TRUE(transport.ok());
  EXPECT_TRUE((*transport)->capabilities().reaches_device_memory);
  Owner owner("loopback");
  EXPECT_EQ(open_one(**transport, owner.card().address).status().code(), Code::kTransportUnavailable);
}

}  // namespace
}  // namespace kvlink::testing

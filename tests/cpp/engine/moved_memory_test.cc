// SPDX-License-Identifier: Apache-2.0
// Engines whose GPU memory is replaced by other memory at the same addresses: what vLLM's
// sleep mode and SGLang's memory saver do. Peers must never get the old bytes under a lease of the new ones.
#include "cpp/transports/cuda/pair.h"
#include "engine/engine.h"

namespace kvlink::testing {
namespace {

constexpr uint32_t kBlocks = 16;
constexpr uint32_t kBlockBytes = kPoolBytes / kBlocks;
constexpr uint64_t kGranule = 2 << 20;

Layout layout() {
  return {kBlocks, 1, 0, 1, kBlockBytes, kBlockBytes, kBlockBytes, kBlockBytes, {{0, 0, 0}}};
}

/// GPU memory in allocations of kGranule, as an engine's allocator maps it.
struct SleepingMemory {
  SleepingMemory() : device(*cuda::Device::at(0)) {
    const cuda::Current current(*device);
    EXPECT_EQ(device->api.address_reserve(&at, kPoolBytes, 0, 0, 0), 0);
    for (uint64_t part = 0; part < kPoolBytes; part += kGranule) map(part);
  }
  ~SleepingMemory() {
    const cuda::Current current(*device);
    for (uint64_t part = 0; part < kPoolBytes; part += kGranule)
      device->api.memory_unmap(at + part, kGranule);
    device->api.address_free(at, kPoolBytes);
  }
  void map(uint64_t part) const {
    cuda::AllocationProperties wanted{};
    wanted.type = cuda::kPinnedAllocation;
    wanted.handle_types = cuda::kPosixFd;
    wanted.location = {cuda::kOnDevice, 0};
    cuda::Allocation allocation = 0;
    EXPECT_EQ(device->api.allocation_create(&allocation, kGranule, &wanted, 0), 0);
    EXPECT_EQ(device->api.memory_map(at + part, kGranule, 0, allocation, 0), 0);
    device->api.allocation_release(allocation);
    const cuda::AccessDescription access{wanted.location, cuda::kReadWrite};
    EXPECT_EQ(device->api.memory_set_access(at + part, kGranule, &access, 1), 0);
  }
  /// Replaces one allocation.
  void replace(uint64_t part) const {
    const cuda::Current current(*device);
    EXPECT_EQ(device->api.memory_unmap(at + part, kGranule), 0);
    map(part);
  }
  MemoryRange range() const {
    return {.base = reinterpret_cast<std::byte*>(at), .bytes = kPoolBytes, .device = true};
  }
  void fill(uint8_t value) const { std::memset(behind(range().base), value, kPoolBytes); }

  const std::shared_ptr<const cuda::Device> device;
  cuda::Address at = 0;
};

std::unique_ptr<Engine> engine_over(const MemoryRange& range, uint64_t epoch) {
  EngineOptions options;
  options.epoch = epoch;
  options.transports = {"cuda"};
  auto engine = std::move(*Engine::make(options));
  EXPECT_TRUE(engine->add_pool_region(range).ok());
  const Status started = engine->start();
  EXPECT_TRUE(started.ok()) << started.what();
  return engine;
}

/// An owner and a reader. They exist once the stand-in for the driver is loaded.
struct World {
  std::shared_ptr<Transfer> pull(const LeaseSeat& seat) {
    if (!connection) {
      const TransportAccess access = owner->access().front();
      connection = *reader->open("cuda", access.address);
      const Accepted accepted = *owner->accept("cuda", connection->hellos());
      regions = *connection->establish(accepted.connection_id, accepted.replies, access.pool_keys,
                                       access.lease_keys, 7, 20 * kSecondNs);
    }
    const std::vector<uint32_t> blocks{0, 5, kBlocks - 1};
    PullRequest request;
    request.planner = *Planner::make(layout(), layout(), {into.range()}, {kPoolBytes}, regions, {});
    request.owner_blocks = request.reader_blocks = blocks;
    request.tokens = {0, 3};
    request.seat = seat;
    request.deadline_ns = now_ns() + 60 * kSecondNs;
    auto transfer = connection->pull(request);
    EXPECT_TRUE(transfer && transfer->wait(60 * kSecondNs));
    return transfer;
  }
  LeaseSeat grant() { return (*owner->grant(++lease, 1, 0, 60 * kSecondNs)).front(); }

  SleepingMemory from, into;
  std::unique_ptr<Engine> owner = engine_over(from.range(), 7), reader = engine_over(into.range(), 8);
  std::shared_ptr<Connection> connection;
  std::vector<uint32_t> regions;
  uint64_t lease = 0;
};

class MovedMemory : public Cuda {
 protected:
  void SetUp() override {
    Cuda::SetUp();
    world_ = std::make_unique<World>();
  }
  void TearDown() override {
    world_.reset();
    Cuda::TearDown();
  }

  std::unique_ptr<World> world_;
};

class StagedMemory : public Cuda {};

TEST_F(StagedMemory, IsNotNeededButItsLackIsSaid) {
  const SleepingMemory pool, slots;
  for (const bool suffices : {true, false}) {
    EngineOptions options;
    options.transports = {"cuda"};
    const auto engine = std::move(*Engine::make(options));
    engine->set_staging(
        {{.base = slots.range().base, .bytes = SlotRing::kSlotBytes - (suffices ? 0 : 1), .device = true},
         true});
    ASSERT_TRUE(engine->add_pool_region(pool.range()).ok());
    ASSERT_TRUE(engine->start().ok());
    EXPECT_EQ(engine->staging_refused().empty(), suffices) << engine->staging_refused();
    EXPECT_TRUE(engine->access().front().refused.empty());
  }
}

TEST_F(MovedMemory, EndsLeasesAndOffersNoMore) {
  world_->from.fill(1);
  EXPECT_TRUE(world_->pull(world_->grant())->status().ok());
  const LeaseSeat before = world_->grant();
  world_->from.replace(kPoolBytes - kGranule);
  world_->from.fill(2);
  const Status refused = world_->owner->grant(++world_->lease, 1, 0, 60 * kSecondNs).status();
  EXPECT_EQ(refused.code(), Code::kConfig);
  EXPECT_NE(refused.what().find("its engine slept, used a memory saver"), std::string::npos);
  EXPECT_EQ(world_->pull(before)->status().code(), Code::kStaleBlocks);
}

TEST_F(MovedMemory, AnnouncesNothingMoreToStreamingReaders) {
  const uint64_t streamed = ++world_->lease;
  ASSERT_TRUE(world_->owner->grant(streamed, 1, 0, 60 * kSecondNs).ok());
  EXPECT_TRUE(world_->owner->set_ready(streamed, 1));
  world_->from.replace(0);
  EXPECT_FALSE(world_->owner->set_ready(streamed, 2));
}

TEST_F(MovedMemory, IsNotReadInto) {
  EXPECT_TRUE(world_->pull(world_->grant())->status().ok());
  world_->into.replace(0);
  const auto transfer = world_->pull(world_->grant());
  EXPECT_EQ(transfer->status().code(), Code::kConfig);
  EXPECT_EQ(transfer->stats().bytes, 0u);
}

TEST_F(MovedMemory, IsReadRightlyByTheNextWorkerOverIt) {
  world_->from.replace(0);
  ASSERT_FALSE(world_->owner->grant(++world_->lease, 1, 0, 60 * kSecondNs).ok());
  world_->owner = engine_over(world_->from.range(), 7);
  world_->from.fill(2);
  world_->into.fill(1);
  EXPECT_TRUE(world_->pull(world_->grant())->status().ok());
  EXPECT_EQ(behind(world_->into.range().base)[0], std::byte{2});
}

TEST_F(MovedMemory, WhatCudaMallocMadeIsComparedByItsNumber) {
  GpuPool malloced(GpuPool::Kind::kMalloc);
  const MemoryRange range = malloced.range();
  const auto kept = cuda::Placement::of(std::span(&range, 1));
  ASSERT_TRUE(kept);
  EXPECT_TRUE(kept->check().ok());
  malloced.free();
  EXPECT_EQ(kept->check().code(), Code::kConfig);
}

}  // namespace
}  // namespace kvlink::testing

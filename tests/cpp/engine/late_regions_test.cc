// SPDX-License-Identifier: Apache-2.0
// Memory that is registered and dropped while engines run, on both ends and on devices.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "cpp/device/fake_device.h"
#include "cpp/transports/copy_peers.h"
#include "engine/engine.h"
#include "plan/pieces.h"

namespace kvlink::testing {
namespace {

constexpr uint64_t kRegionBytes = 1 << 20;
constexpr uint32_t kTurn[] = {0};

std::unique_ptr<Engine> started(uint64_t epoch, const std::string& transport, const MemoryRange& like,
                                const MakeDeviceCopier& copier = {}) {
  EngineOptions options;
  options.epoch = epoch;
  options.transports = {transport};
  options.bounce_bytes = 4 << 20;
  options.make_copier = copier;
  options.transport.self = {"late", epoch};
  auto engine = std::move(*Engine::make(options));
  engine->expect_regions(like);
  const Status status = engine->start();
  EXPECT_TRUE(status.ok()) << status.what();
  return engine;
}

struct Reader {
  std::shared_ptr<Connection> connection;
  std::vector<uint32_t> regions;
};

/// Connects to all regions that the owner has now.
Reader connected(Engine& reader, Engine& owner, const std::string& transport, uint64_t epoch) {
  const TransportAccess access = owner.access().front();
  std::vector<std::string> keys;
  for (const LateRegion& region : owner.late_regions()) keys.push_back(region.keys.front());
  Reader made{*reader.open(transport, access.address, std::make_shared<PathStats>(), {"late", epoch}), {}};
  const Accepted accepted = *owner.accept(transport, made.connection->hellos());
  const auto regions = made.connection->establish(accepted.connection_id, accepted.replies, keys,
                                                  access.lease_keys, epoch, 5 * kSecondNs);
  EXPECT_TRUE(regions.ok()) << regions.status().what();
  if (regions.ok()) made.regions = *regions;
  return made;
}

Status read(const Reader& reader, const LeaseSeat& seat, const ReadPiece& piece) {
  PullRequest request;
  request.prepared = plan_pieces({&piece, 1});
  request.seat = seat;
  request.deadline_ns = now_ns() + 20 * kSecondNs;
  const auto transfer = reader.connection->pull(request);
  if (!transfer) return Status::Unreachable(reader.connection->why_broken());
  transfer->wait(-1);
  return transfer->status();
}

struct LateRegions : ::testing::TestWithParam<const char*> {
  void SetUp() override {
    const Status here = find_transport(GetParam())->probe();
    if (!here.ok()) GTEST_SKIP() << here.what() << ": " << here.fix();
  }
  std::shared_ptr<HostMemory> first = allocate(kRegionBytes), second = allocate(kRegionBytes),
                              into = allocate(kRegionBytes);
  std::unique_ptr<Engine> owner = started(7, GetParam(), first->range()),
                          reader = started(8, GetParam(), into->range());
  LeaseSeat seat = *owner->grant_soft(kTurn, 0, kNoExpiryNs);
};

TEST_P(LateRegions, AreReadAndReadInto) {
  fill_random(first->range(), 1);
  fill_random(second->range(), 2);
  EXPECT_EQ(*owner->add_region(first->range()), 0U);
  EXPECT_EQ(*owner->add_region(second->range()), 1U);
  const uint32_t here = reader->segment_region(GetParam(), *reader->add_region(into->range()));
  const Reader peer = connected(*reader, *owner, GetParam(), 7);
  ASSERT_EQ(peer.regions.size(), 2U);
  const Status ended = read(peer, seat, {64, into->range().base + 128, 5000, peer.regions[1], here});
  ASSERT_TRUE(ended.ok()) << ended.what();
  EXPECT_EQ(std::memcmp(into->range().base + 128, second->range().base + 64, 5000), 0);
  EXPECT_EQ(std::to_integer<int>(into->range().base[127]), 0);
}

TEST_P(LateRegions, ADroppedOneGivesNothing) {
  fill_random(first->range(), 1);
  fill_random(second->range(), 2);
  const uint32_t number = *owner->add_region(first->range());
  ASSERT_TRUE(owner->add_region(second->range()).ok());
  const uint32_t here = reader->segment_region(GetParam(), *reader->add_region(into->range()));
  const Reader before = connected(*reader, *owner, GetParam(), 7);
  ASSERT_TRUE(read(before, seat, {0, into->range().base, 64, before.regions[0], here}).ok());
  EXPECT_EQ(owner->revoke(kTurn), 1U);
  owner->drop_region(number);
  owner->drop_region(number);  // nothing
  const Status ended = read(before, seat, {0, into->range().base, 64, before.regions[0], here});
  EXPECT_TRUE(ended.code() == Code::kStaleBlocks || ended.code() == Code::kAccessDenied) << ended.what();
  const std::vector<LateRegion> left = owner->late_regions();
  ASSERT_EQ(left.size(), 1U);
  EXPECT_EQ(left[0].number, 1U);
  EXPECT_EQ(*owner->add_region(first->range()), 2U);  // no number comes again

  const LeaseSeat next = *owner->grant_soft(kTurn, 0, kNoExpiryNs);
  const Reader after = connected(*reader, *owner, GetParam(), 7);
  ASSERT_EQ(after.regions.size(), 2U);
  ASSERT_TRUE(read(after, next, {0, into->range().base, kRegionBytes, after.regions[0], here}).ok());
  EXPECT_EQ(std::memcmp(into->range().base, second->range().base, kRegionBytes), 0);
}

TEST_P(LateRegions, ComeAndGoWhileOthersAreRead) {
  fill_random(first->range(), 1);
  ASSERT_TRUE(owner->add_region(first->range()).ok());
  const uint32_t here = reader->segment_region(GetParam(), *reader->add_region(into->range()));
  const Reader peer = connected(*reader, *owner, GetParam(), 7);
  std::thread other([&] {
    for (int round = 0; round < 100; ++round) {
      owner->drop_region(*owner->add_region(second->range()));
      reader->drop_region(*reader->add_region(second->range()));
    }
  });
  for (int round = 0; round < 100; ++round) {
    const Status ended = read(peer, seat, {0, into->range().base, kRegionBytes, peer.regions[0], here});
    ASSERT_TRUE(ended.ok()) << ended.what();
  }
  other.join();
  EXPECT_EQ(*owner->add_region(second->range()), 101U);
}

INSTANTIATE_TEST_SUITE_P(All, LateRegions, ::testing::Values("loopback", "cma", "tcp"),
                         [](const auto& of) { return std::string(of.param); });

TEST(LateRegionsOnDevices, AreStaged) {
  FakeDevice device(kPoolBytes);
  const auto host = allocate(kPoolBytes);
  fill_random(host->range(), 5);
  const auto owner = started(7, "tcp", host->range()),
             reader = started(8, "tcp", device.range(), device.maker());
  ASSERT_TRUE(owner->add_region(host->range()).ok());
  EXPECT_EQ(reader->add_region(host->range()).status().code(), Code::kConfig);  // of another kind
  const uint32_t here = reader->segment_region("tcp", *reader->add_region(device.range()));
  const LeaseSeat seat = *owner->grant_soft(kTurn, 0, kNoExpiryNs);
  const Reader peer = connected(*reader, *owner, "tcp", 7);
  const Status ended = read(peer, seat, {0, device.range().base, kPoolBytes, peer.regions[0], here});
  ASSERT_TRUE(ended.ok()) << ended.what();
  EXPECT_EQ(std::memcmp(device.behind(device.at(0)), host->range().base, kPoolBytes), 0);

  // And back, from the device.
  const LeaseSeat theirs = *reader->grant_soft(kTurn, 0, kNoExpiryNs);
  const auto back = allocate(kPoolBytes);
  const uint32_t there = owner->segment_region("tcp", *owner->add_region(back->range()));
  const Reader other = connected(*owner, *reader, "tcp", 8);
  const Status sent = read(other, theirs, {0, back->range().base, kPoolBytes, other.regions[0], there});
  ASSERT_TRUE(sent.ok()) << sent.what();
  EXPECT_EQ(std::memcmp(back->range().base, host->range().base, kPoolBytes), 0);
}

}  // namespace
}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// Reads into the memory of a device, over transports that do not reach it.
#include "cpp/staging/bounce_peers.h"

namespace kvlink::testing {
namespace {

std::vector<std::byte> pool_of(const Owner& owner) {
  const MemoryRange range = owner.pool->range();
  return {range.base, range.base + range.bytes};
}

/// Pieces of random sizes, some larger than a slot, from random places to random places; gaps stay poisoned.
std::vector<Scatter> random_scatters(const FakeDevice& device, size_t count, std::mt19937_64& random) {
  std::vector<Scatter> scatters(count);
  for (uint64_t to = 0, turn = 0; to < kPoolBytes; ++turn) {
    std::vector<Segment> pieces;
    uint64_t bytes = 0;
    for (size_t piece = 1 + random() % 4; piece > 0 && to < kPoolBytes; --piece) {
      const uint64_t most = random() % 16 == 0 ? 3 * SlotRing::kSlotBytes : 40'000;
      const auto size = static_cast<uint32_t>(std::min(1 + random() % most, kPoolBytes - to));
      pieces.push_back({device.at(to), size, kDeviceRegion});
      to += size + random() % 100;
      bytes += size;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    scatters[turn % count].add(kPool, random() % (kPoolBytes - bytes), pieces);
  }
  return scatters;
}

/// The bytes that the device should have then.
std::vector<std::byte> expected(const std::vector<Scatter>& scatters, const FakeDevice& device,
                                const std::vector<std::byte>& pool) {
  std::vector<std::byte> wanted(kPoolBytes, kPoison);
  for (const Scatter& scatter : scatters) {
    for (const ReadOp& op : scatter.ops) {
      uint64_t from = op.offset;
      for (uint32_t i = 0; i < op.num_segments; ++i) {
        const Segment& to = scatter.segments[op.first_segment + i];
        std::memcpy(&wanted[static_cast<size_t>(to.local - device.at(0))], &pool[from], to.bytes);
        from += to.bytes;
      }
    }
  }
  return wanted;
}

struct Bounces : ::testing::TestWithParam<const char*> {};

TEST_P(Bounces, EveryByteToItsPlaceAndNoneBeside) {
  DevicePair pair(GetParam());
  std::mt19937_64 random(5);
  for (int round = 0; round < 3; ++round) {
    pair.device.fill(kPoison);
    const std::vector<Scatter> scatters = random_scatters(pair.device, 5, random);
    for (size_t index = 0; index < scatters.size(); ++index) {
      ASSERT_TRUE(pair.reader.endpoint->post_read(index, scatters[index].chunk()).ok());
    }
    pair.reader.ended.clear();
    ASSERT_TRUE(pair.reader.wait(scatters.size() - 1).ok());
    ASSERT_EQ(pair.reader.ended.size(), scatters.size()) << "the last one ends last";
    ASSERT_TRUE(pair.device.contents() == expected(scatters, pair.device, pool_of(pair.owner)));
    ASSERT_EQ(pair.bounce->receiving()->ring().num_free(), kSlots);
  }
}

TEST_P(Bounces, WhatIsReadBehindDataEndsAfterItHasLanded) {
  DevicePair pair(GetParam());
  uint64_t slot[2] = {1, 1};
  Scatter data = whole(pair.device, kSlots * SlotRing::kSlotBytes), behind;
  behind.add(kTable, 64, {{reinterpret_cast<std::byte*>(slot), sizeof slot, kHostRegion}});
  pair.device.stall();
  ASSERT_TRUE(pair.reader.endpoint->post_write(1, kWords, 72, 33).ok());
  ASSERT_TRUE(pair.reader.endpoint->post_read(2, data.chunk()).ok());
  ASSERT_TRUE(pair.reader.endpoint->post_read(3, behind.chunk()).ok());
  while (pair.device.num_under_way() < kSlots) pair.reader.poll_for(1'000'000);
  pair.reader.poll_for(20'000'000);
  EXPECT_TRUE(pair.reader.ended.size() == 1 && pair.reader.ended[0].token == 1);
  EXPECT_EQ(pair.owner.words->range().base[72], std::byte{33})
      << "the store goes ahead of what is posted later";
  EXPECT_TRUE(pair.reader.is_poisoned());
  pair.device.go_on();
  ASSERT_TRUE(pair.reader.wait(3).ok());
  EXPECT_EQ(pair.reader.ended[1].token, 2u);
  EXPECT_EQ(slot[0], 0u);
  EXPECT_TRUE(std::memcmp(pair.device.contents().data(), pair.owner.pool->range().base,
                          kSlots * SlotRing::kSlotBytes) == 0);
}

TEST_P(Bounces, NothingAfterTheEndpointWasClosed) {
  DevicePair pair(GetParam());
  const Scatter data = whole(pair.device, kPoolBytes);
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(round > 0 || pair.reader.endpoint->post_read(1, data.chunk()).ok());
    while (round == 0 && pair.device.num_copied() == 0) pair.reader.poll_for(100'000);
    pair.reader.endpoint->close();
    EXPECT_EQ(pair.device.num_under_way(), 0u);
    EXPECT_EQ(pair.bounce->receiving()->ring().num_free(), kSlots);
  }
  const std::vector<std::byte> then = pair.device.contents();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_TRUE(pair.device.contents() == then);
  EXPECT_NE(then.back(), pool_of(pair.owner).back()) << "it was over before it was closed";
  EXPECT_FALSE(poll_once(*pair.reader.endpoint, pair.reader.ended).status.ok());
}

TEST_P(Bounces, ALostDeviceFailsTheReadAndNoMore) {
  DevicePair pair(GetParam());
  pair.device.break_down();
  const Status status = pair.reader.read(whole(pair.device, 2 << 20));
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_EQ(status.what(), "the device is lost");
  EXPECT_EQ(pair.bounce->receiving()->ring().num_free(), kSlots);
  uint64_t word = 1;
  Scatter host;
  host.add(kTable, 0, {{reinterpret_cast<std::byte*>(&word), sizeof word, kHostRegion}});
  EXPECT_TRUE(pair.reader.read(host, 8).ok());
  EXPECT_EQ(word, 0u);
}

TEST_P(Bounces, TwoReadersShareTheSlots) {
  DevicePair one(GetParam());
  FakeDevice& device = one.device;
  const auto transport = *bounce_wrap(must_make(GetParam()), one.bounce, 1, {});
  const auto endpoint = std::move(*open_one(*transport, one.owner.card().address));
  ASSERT_TRUE(endpoint->establish(*one.owner.transport->accept(43, endpoint->hello()), kSecondNs).ok());
  ASSERT_TRUE(endpoint->import_region(one.owner.card().pool_key).ok());
  Scatter first = whole(device, kPoolBytes / 2), second;
  second.add(kPool, kPoolBytes / 2, {{device.at(kPoolBytes / 2), kPoolBytes / 2, kDeviceRegion}});
  ASSERT_TRUE(one.reader.endpoint->post_read(1, first.chunk()).ok());
  ASSERT_TRUE(endpoint->post_read(2, second.chunk()).ok());
  bool other_ended = false;
  std::thread other([&] {
    std::vector<Completion> ended;
    for (const int64_t end = now_ns() + 20 * kSecondNs; ended.empty() && now_ns() < end;) {
      if (poll_once(*endpoint, ended).progressed || !endpoint->arm()) continue;
      pollfd asleep{endpoint->traits().wake_fd, POLLIN, 0};
      ::poll(&asleep, 1, 1000);
    }
    other_ended = ended.size() == 1 && ended[0].status.ok();
  });
  EXPECT_TRUE(one.reader.wait(1).ok());
  other.join();
  EXPECT_TRUE(other_ended);
  EXPECT_TRUE(device.contents() == pool_of(one.owner));
}

TEST_P(Bounces, RefusesWhatGoesToTheDeviceAndElsewhere) {
  DevicePair pair(GetParam());
  std::vector<std::byte> host(kBlock);
  Scatter mixed;
  mixed.add(kPool, 0, {{pair.device.at(0), kBlock, kDeviceRegion}, {host.data(), kBlock, kHostRegion}});
  EXPECT_EQ(pair.reader.read(mixed).code(), Code::kConfig);
  Scatter short_of_it = whole(pair.device, kBlock);
  --short_of_it.segments[0].bytes;
  EXPECT_EQ(pair.reader.read(short_of_it).code(), Code::kConfig);
  EXPECT_EQ(pair.reader.read({}).code(), Code::kConfig);
}

TEST_P(Bounces, AReadOutOfBoundsLandsNothing) {
  DevicePair pair(GetParam());
  Scatter beyond;
  beyond.add(kPool, kPoolBytes - kBlock, {{pair.device.at(0), 2 * kBlock, kDeviceRegion}});
  EXPECT_EQ(pair.reader.read(beyond).code(), Code::kAccessDenied);
  EXPECT_TRUE(pair.reader.is_poisoned());
  EXPECT_EQ(pair.bounce->receiving()->ring().num_free(), kSlots);
  EXPECT_TRUE(pair.reader.read(whole(pair.device, kBlock), 8).ok());
}

TEST_P(Bounces, ManySlotsKeepWireAndCopiesBusyAtOnce) {
  DevicePair pair(GetParam(), {}, 64 << 20);
  pair.device.stall();
  const Window window = pair.reader.endpoint->traits().window;
  std::vector<Scatter> chunks;
  for (uint32_t token = 0; token < window.depth; ++token) {
    chunks.push_back(whole(pair.device, window.chunk_bytes, kBlock));
  }
  for (uint32_t token = 0; token < window.depth; ++token) {
    ASSERT_TRUE(pair.reader.endpoint->post_read(token, chunks[token].chunk()).ok());
  }
  for (int tries = 0; tries < 5000 && pair.device.num_under_way() < window.depth; ++tries) {
    pair.reader.poll_for(1'000'000);
  }
  EXPECT_EQ(pair.device.num_under_way(), window.depth) << "copies held the wire up";
  pair.device.go_on();
  EXPECT_TRUE(pair.reader.wait(window.depth - 1).ok());
}

INSTANTIATE_TEST_SUITE_P(Transports, Bounces, ::testing::Values("loopback", "shm", "cma", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

struct Cancels : ::testing::TestWithParam<const char*> {};

/// On the wire: it comes back at once. While being copied: it ends with the copy.
TEST_P(Cancels, LandNothingLater) {
  DevicePair pair(GetParam());
  const Scatter data = whole(pair.device, kPoolBytes);
  int called_back = 0, copied_on = 0;
  std::mt19937_64 random(3);
  for (uint64_t round = 1; round <= 60; ++round) {
    pair.device.fill(kPoison);
    pair.reader.ended.clear();
    ASSERT_TRUE(pair.reader.endpoint->post_read(round, data.chunk()).ok());
    if (round % 2 == 0) pair.device.stall();
    for (uint64_t polls = random() % 20; polls > 0; --polls) {
      ASSERT_TRUE(poll_once(*pair.reader.endpoint, pair.reader.ended).status.ok());
    }
    // Few polls seldom see a first byte over tcp: every fourth round waits until a copy is held.
    for (int tries = 0; round % 4 == 0 && pair.device.num_under_way() == 0 && tries < 5000; ++tries) {
      pair.reader.poll_for(1'000'000);
    }
    if (!pair.reader.ended.empty()) continue;  // the copies were faster than the polls
    const size_t under_way = pair.device.num_under_way();
    const bool back = pair.reader.endpoint->cancel(round);
    ASSERT_TRUE(back || round % 2 == 1 || under_way > 0);
    pair.device.go_on();
    ASSERT_TRUE(back || pair.reader.wait(round).code() == Code::kCancelled);
    ++(back ? called_back : copied_on);
    const std::vector<std::byte> then = pair.device.contents();
    ASSERT_EQ(pair.bounce->receiving()->ring().num_free(), kSlots);
    uint64_t word = 1;
    Scatter behind;
    behind.add(kTable, 0, {{reinterpret_cast<std::byte*>(&word), sizeof word, kHostRegion}});
    ASSERT_TRUE(pair.reader.read(behind, 1000).ok());  // so what was on the wire is over
    ASSERT_TRUE(pair.device.contents() == then);
    ASSERT_TRUE(!back || then.back() == kPoison);
  }
  EXPECT_GT(called_back, 0);
  EXPECT_GT(copied_on, 0);
}

TEST_P(Cancels, AmongOthersLeavesThemAlone) {
  DevicePair pair(GetParam());
  std::vector<Scatter> reads(3);
  for (uint32_t index = 0; index < 3; ++index) {
    const uint32_t at = index * (2 << 20);
    reads[index].add(kPool, at, {{pair.device.at(at), 2 << 20, kDeviceRegion}});
    ASSERT_TRUE(pair.reader.endpoint->post_read(index, reads[index].chunk()).ok());
  }
  ASSERT_TRUE(poll_once(*pair.reader.endpoint, pair.reader.ended).status.ok());
  EXPECT_TRUE(pair.reader.endpoint->cancel(1)) << "it was not asked for yet";
  ASSERT_TRUE(pair.reader.wait(2).ok());
  const std::vector<std::byte> now = pair.device.contents();
  const std::byte* const pool = pair.owner.pool->range().base;
  EXPECT_EQ(std::memcmp(now.data(), pool, 2 << 20), 0);
  EXPECT_EQ(now[2 << 20], kPoison);
  EXPECT_EQ(std::memcmp(&now[4 << 20], pool + (4 << 20), 2 << 20), 0);
}

INSTANTIATE_TEST_SUITE_P(Transports, Cancels, ::testing::Values("loopback", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Bounce, NothingLandsOnceTheOwnerIsDead) {
  RemoteOwner owner("tcp");
  FakeDevice device(kPoolBytes);
  const auto bounce = must_make(device);
  DeviceReader reader(device, bounce, "tcp", owner.card(),
                      [&](const std::string& hello) { return owner.accept(42, hello); });
  const Scatter data = whole(device, kPoolBytes);
  ASSERT_TRUE(reader.endpoint->post_read(1, data.chunk()).ok());
  while (device.num_copied() == 0) reader.poll_for(100'000);
  owner.kill(SIGKILL);
  EXPECT_EQ(reader.wait(1).code(), Code::kPeerUnreachable);
  reader.endpoint->close();
  const std::vector<std::byte> then = device.contents();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_TRUE(device.contents() == then);
  EXPECT_EQ(bounce->receiving()->ring().num_free(), kSlots);
}

TEST(Bounce, FaultsOfTheWireAreNoFaultsOfTheBuffer) {
  DevicePair pair("fault+tcp", "fail@3;delay=5ms@2;drop@5");
  EXPECT_EQ(pair.reader.read(whole(pair.device, 4 << 20), 1).code(), Code::kPeerUnreachable);
  EXPECT_EQ(pair.bounce->receiving()->ring().num_free(), kSlots);
  const uint64_t landed = pair.device.num_copied();
  const Scatter dropped = whole(pair.device, 2 << 20);
  ASSERT_TRUE(pair.reader.endpoint->post_read(2, dropped.chunk()).ok());
  // One part was dropped. What of a cancelled read is being copied ends with the copy: here the others have.
  const uint64_t others = landed + (2 << 20) - SlotRing::kSlotBytes;
  while (pair.device.num_copied() < others || pair.device.num_under_way() > 0) pair.reader.poll_for(100'000);
  ASSERT_TRUE(poll_once(*pair.reader.endpoint, pair.reader.ended).status.ok());
  EXPECT_TRUE(pair.reader.endpoint->cancel(2));
  EXPECT_EQ(pair.bounce->receiving()->ring().num_free(), kSlots);
  EXPECT_TRUE(pair.reader.read(whole(pair.device, 1 << 20), 3).ok());
}

TEST(Bounce, PinsNoMoreThanWasSetAndNoLessThanTwoSlotsEachWay) {
  FakeDevice device(1 << 20);
  const auto bounce = must_make(device, Bounce::kLeastBytes + SlotRing::kSlotBytes);
  EXPECT_EQ(device.pinned_bytes(), Bounce::kLeastBytes);
  EXPECT_EQ(bounce->receiving()->ring().num_free(), 2u);
  EXPECT_EQ(bounce->sending().num_free(), 2u);
  FakeDevice other(1 << 20);
  EXPECT_EQ(Bounce::make(other.range().base, Bounce::kLeastBytes - 1, other.maker()).status().code(),
            Code::kConfig);
}

}  // namespace
}  // namespace kvlink::testing

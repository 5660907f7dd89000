// SPDX-License-Identifier: Apache-2.0
// tcp sends from the memory of a device, through its half of the bounce buffer.
#include "cpp/staging/bounce_peers.h"

namespace kvlink::testing {
namespace {

/// An Owner whose pool is on a device.
struct DeviceOwner {
  DeviceOwner() : device(kPoolBytes), bounce(must_make(device)), table(allocate(kTableBytes)) {
    fill_random({.base = device.behind(device.at(0)), .bytes = kPoolBytes}, 1);
    transport = must_make("tcp");
    pool_region = std::move(*transport->register_memory(device.range(), Access::kRead, bounce));
    table_region = std::move(*transport->register_memory(table->range(), Access::kReadWords));
    server = std::make_unique<Server>(*transport);
  }
  ~DeviceOwner() { device.go_on(); }
  Card card() const {
    return {transport->address(), pool_region->remote_key(), table_region->remote_key(), {}};
  }
  Reader::Accept accept(uint64_t connection) {
    return [this, connection](const std::string& hello) { return *transport->accept(connection, hello); };
  }

  FakeDevice device;
  std::shared_ptr<Bounce> bounce;
  std::shared_ptr<HostMemory> table;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<MemoryRegion> pool_region, table_region;
  std::unique_ptr<Server> server;
};

Scatter whole_pool(Reader& reader) {
  Scatter scatter;
  scatter.add(kPool, 0, {{reader.destination.data(), kPoolBytes, 0}});
  return scatter;
}

void await_copies(FakeDevice& device, Reader& reader) {
  std::vector<Completion> ended;
  while (device.num_under_way() == 0) ASSERT_TRUE(poll_once(*reader.endpoint, ended).status.ok());
}

TEST(TcpDevice, SendsEveryByteInItsPlace) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1));
  std::mt19937_64 random(4);
  for (int round = 0; round < 5; ++round) {
    reader.poison();
    std::vector<Scatter> scatters(4);
    std::vector<std::byte> wanted(kPoolBytes, kPoison);
    const std::vector<std::byte> pool = owner.device.contents();
    for (uint64_t to = 0, turn = 0; to < kPoolBytes; ++turn) {
      const uint64_t most = random() % 32 == 0 ? 3 * SlotRing::kSlotBytes : 20'000;
      const auto size = static_cast<uint32_t>(std::min(1 + random() % most, kPoolBytes - to));
      const uint64_t from = random() % (kPoolBytes - size);
      if (scatters[turn % 4].ops.size() == 1000) break;
      scatters[turn % 4].add(kPool, from, {{&reader.destination[to], size, 0}});
      std::memcpy(&wanted[to], &pool[from], size);
      to += size + random() % 50;
    }
    for (size_t index = 0; index < scatters.size(); ++index) {
      ASSERT_TRUE(reader.endpoint->post_read(index, scatters[index].chunk()).ok());
    }
    const Status status = reader.wait(scatters.size() - 1);
    ASSERT_TRUE(status.ok()) << status.what();
    ASSERT_TRUE(reader.destination == wanted);
    ASSERT_EQ(owner.bounce->sending().num_free(), kSlots);
  }
}

TEST(TcpDevice, GoesFromDeviceToDevice) {
  DeviceOwner owner;
  FakeDevice device(kPoolBytes);
  DeviceReader reader(device, must_make(device), "tcp", owner.card(), owner.accept(1));
  ASSERT_TRUE(reader.read(whole(device, kPoolBytes)).ok());
  EXPECT_TRUE(device.contents() == owner.device.contents());
}

TEST(TcpDevice, AWordBehindDataIsLoadedOnceTheDataHasBeenSent) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1));
  auto& word = *reinterpret_cast<std::atomic<uint64_t>*>(owner.table->range().base + 64);
  word = 1;
  owner.device.stall();
  Scatter data, behind;
  uint64_t seen = 0;
  data.add(kPool, 0, {{reader.destination.data(), 1 << 20, 0}});
  behind.add(kTable, 64, {{reinterpret_cast<std::byte*>(&seen), sizeof seen, 0}});
  ASSERT_TRUE(reader.endpoint->post_read(1, data.chunk()).ok());
  ASSERT_TRUE(reader.endpoint->post_read(2, behind.chunk()).ok());
  await_copies(owner.device, reader);
  word = 2;
  owner.device.go_on();
  const Status status = reader.wait(2);
  ASSERT_TRUE(status.ok()) << status.what();
  EXPECT_EQ(seen, 2u);
}

TEST(TcpDevice, RefusesFramesThatMixAndRangesOutside) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1));
  for (const uint32_t first : {kPool, kTable}) {
    Scatter mixed;
    mixed.add(first, 0, {{reader.destination.data(), 4096, 0}});
    mixed.add(kPool + kTable - first, 0, {{&reader.destination[4096], 4096, 0}});
    const Status status = reader.read(mixed);
    EXPECT_EQ(status.code(), Code::kAccessDenied);
    EXPECT_NE(status.what().find("at once"), std::string::npos) << status.what();
  }
  EXPECT_TRUE(reader.is_poisoned());
  EXPECT_TRUE(reader.read_at(kPool, 0, 4096).ok()) << "the connection goes on";
  EXPECT_TRUE(reader.read_at(kTable, 0, 64).ok());
}

/// Ends the copies of an owner once `waits` waits for them under its lock.
void go_on_once(FakeDevice& device, const std::function<void()>& waits) {
  std::thread later([&] {
    device.await_drain();
    device.go_on();
  });
  waits();
  EXPECT_EQ(device.num_under_way(), 0u);
  later.join();
}

TEST(TcpDevice, FencesWhoIsBeingSentTo) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1)), other("tcp", owner.card(), owner.accept(2));
  owner.device.stall();
  const Scatter pool = whole_pool(reader);
  ASSERT_TRUE(reader.endpoint->post_read(1, pool.chunk()).ok());
  await_copies(owner.device, reader);
  go_on_once(owner.device, [&] { EXPECT_TRUE(owner.transport->fence(1)); });
  EXPECT_EQ(reader.wait(1).code(), Code::kPeerUnreachable);
  EXPECT_TRUE(reader.is_poisoned());
  EXPECT_TRUE(other.read_at(kPool, 0, 4096).ok());
}

TEST(TcpDevice, NothingIsCopiedFromMemoryThatWasTakenBack) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1));
  owner.device.stall();
  const Scatter pool = whole_pool(reader);
  ASSERT_TRUE(reader.endpoint->post_read(1, pool.chunk()).ok());
  await_copies(owner.device, reader);
  go_on_once(owner.device, [&] { owner.pool_region.reset(); });
  EXPECT_EQ(reader.wait(1).code(), Code::kPeerUnreachable);
}

TEST(TcpDevice, NorFromAClosedTransport) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1));
  owner.device.stall();
  const Scatter pool = whole_pool(reader);
  ASSERT_TRUE(reader.endpoint->post_read(1, pool.chunk()).ok());
  await_copies(owner.device, reader);
  owner.server.reset();
  go_on_once(owner.device, [&] { owner.transport->close(); });
  EXPECT_EQ(reader.wait(1).code(), Code::kPeerUnreachable);
  EXPECT_EQ(owner.bounce->sending().num_free(), kSlots);
}

TEST(TcpDevice, ReadersThatStallHoldSlotsUntilTheyAreFenced) {
  DeviceOwner owner;
  Reader other("tcp", owner.card(), owner.accept(1));
  // Each wants more than sockets take. A connection that stalls holds what is left of one response, a slot at
  // least, so that many stalled ones hold all slots, wherever in a response each of them stalls.
  std::vector<std::unique_ptr<Reader>> stalled;
  std::vector<Scatter> pools(kSlots);
  std::vector<Completion> ended;
  for (size_t index = 0; index < kSlots; ++index) {
    stalled.push_back(std::make_unique<Reader>("tcp", owner.card(), owner.accept(index + 2)));
    Reader& reader = *stalled.back();
    for (int i = 0; i < 16; ++i) pools[index].add(kPool, 0, {{reader.destination.data(), kPoolBytes, 0}});
    ASSERT_TRUE(reader.endpoint->post_read(1, pools[index].chunk()).ok());
    ASSERT_TRUE(poll_once(*reader.endpoint, ended).status.ok());
  }
  while (owner.bounce->sending().num_free() > 0) std::this_thread::yield();
  Scatter block;
  block.add(kPool, 0, {{other.destination.data(), 4096, 0}});
  ASSERT_TRUE(other.endpoint->post_read(1, block.chunk()).ok());
  for (size_t index = 0; index < kSlots; ++index) EXPECT_TRUE(owner.transport->fence(index + 2));
  EXPECT_TRUE(other.wait(1).ok());
  EXPECT_EQ(std::memcmp(other.destination.data(), owner.device.contents().data(), 4096), 0);
}

TEST(TcpDevice, ALostDeviceEndsTheConnectionsThatNeedIt) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1)), other("tcp", owner.card(), owner.accept(2));
  owner.device.break_down();
  EXPECT_EQ(reader.read_at(kPool, 0, 4096).code(), Code::kPeerUnreachable);
  EXPECT_TRUE(other.read_at(kTable, 0, 64).ok());
}

}  // namespace
}  // namespace kvlink::testing

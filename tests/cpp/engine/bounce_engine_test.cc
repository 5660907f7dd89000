// SPDX-License-Identifier: Apache-2.0
// Two engines whose pools are on devices: pulls by threads that sleep, over several lanes, with leases.
#include "cpp/device/fake_device.h"
#include "cpp/transports/copy_peers.h"
#include "engine/engine.h"

namespace kvlink::testing {
namespace {

constexpr uint32_t kBlockBytes = 16 << 10;
constexpr uint32_t kNumBlocks = kPoolBytes / kBlockBytes;

Layout layout() {
  return {kNumBlocks, 1, 0, 1, kBlockBytes, kBlockBytes, kBlockBytes, kBlockBytes, {{0, 0, 0}}};
}

/// A worker with its pool on a device, or in host memory.
struct Side {
  Side(uint64_t epoch, const std::string& transport, bool on_device, uint32_t lanes = 0)
      : device(kPoolBytes), host(allocate(kPoolBytes)), on_device(on_device) {
    EngineOptions options;
    options.epoch = epoch;
    options.transports = {transport};
    options.num_lanes = lanes;
    options.bounce_bytes = 4 << 20;
    options.make_copier = device.maker();
    if (const char* nics = std::getenv("KVLINK_NICS"))
      options.transport.nics = std::vector<NicOption>{{.port = nics}};
    engine = std::move(*Engine::make(options));
    if (transport == "verbs" && on_device) engine->force_bounce(transport, "no NIC reaches a fake device");
    EXPECT_TRUE(engine->add_pool_region(range()).ok());
    const Status started = engine->start();
    EXPECT_TRUE(started.ok()) << started.what();
  }
  MemoryRange range() const { return on_device ? device.range() : host->range(); }
  std::byte* bytes() { return on_device ? device.behind(device.at(0)) : host->range().base; }

  FakeDevice device;
  std::shared_ptr<HostMemory> host;
  const bool on_device;
  std::unique_ptr<Engine> engine;
};

struct Pair {
  Pair(const std::string& transport, bool owner_on_device, uint32_t lanes = 0)
      : owner(7, transport, owner_on_device), reader(8, transport, true, lanes) {
    fill_random({.base = owner.bytes(), .bytes = kPoolBytes}, 9);
    reader.device.fill(kPoison);
    const TransportAccess access = owner.engine->access().front();
    EXPECT_EQ(access.refused, "");
    EXPECT_EQ(access.bounces, owner_on_device);
    EXPECT_TRUE(reader.engine->access().front().bounces);
    connection = *reader.engine->open(transport, access.address);
    const Accepted accepted = *owner.engine->accept(transport, connection->hellos());
    const auto regions = connection->establish(accepted.connection_id, accepted.replies, access.pool_keys,
                                               access.lease_keys, 7, 5 * kSecondNs);
    EXPECT_TRUE(regions.ok()) << regions.status().what();
    planner = *Planner::make(layout(), layout(), {reader.range()}, {kPoolBytes}, *regions, {});
  }

  std::shared_ptr<Transfer> pull(const std::vector<uint32_t>& from, const std::vector<uint32_t>& into,
                                 int64_t timeout_ns = 60 * kSecondNs) {
    const LeaseSeat seat = (*owner.engine->grant(next_lease++, 1, 0, 60 * kSecondNs))[0];
    PullRequest request;
    request.planner = planner;
    request.owner_blocks = from;
    request.reader_blocks = into;
    request.tokens = {0, static_cast<uint32_t>(from.size())};
    request.seat = seat;
    request.deadline_ns = now_ns() + timeout_ns;
    return connection->pull(request);
  }

  Side owner, reader;
  std::shared_ptr<Connection> connection;
  std::shared_ptr<const Planner> planner;
  uint64_t next_lease = 1;
};

std::vector<uint32_t> shuffled(uint32_t count, uint32_t seed) {
  std::vector<uint32_t> ids(kNumBlocks);
  for (uint32_t id = 0; id < kNumBlocks; ++id) ids[id] = id;
  std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
  ids.resize(count);
  return ids;
}

struct BounceEngine : ::testing::TestWithParam<const char*> {
  void SetUp() override {
    const Status here = find_transport(GetParam())->probe();
    if (!here.ok()) GTEST_SKIP() << here.what() << ": " << here.fix();
  }
};

void pull_all_sizes(Pair& pair) {
  std::vector<std::byte> wanted(kPoolBytes, kPoison);
  for (const uint32_t count : {1u, 9u, kNumBlocks / 2}) {
    const auto from = shuffled(count, count), into = shuffled(count, count + 1);
    const auto transfer = pair.pull(from, into);
    ASSERT_TRUE(transfer && transfer->wait(60 * kSecondNs));
    ASSERT_TRUE(transfer->status().ok()) << transfer->status().what();
    EXPECT_EQ(transfer->stats().bytes, uint64_t{count} * kBlockBytes);
    for (uint32_t index = 0; index < count; ++index) {
      std::memcpy(&wanted[into[index] * kBlockBytes], pair.owner.bytes() + from[index] * kBlockBytes,
                  kBlockBytes);
    }
    ASSERT_TRUE(pair.reader.device.contents() == wanted);
  }
}

TEST_P(BounceEngine, PullsIntoADevice) {
  Pair pair(GetParam(), false);
  pull_all_sizes(pair);
}

TEST_P(BounceEngine, SeveralLanesShareTheSlots) {
  Pair pair(GetParam(), false, 3);
  pull_all_sizes(pair);
}

TEST_P(BounceEngine, ACancelledPullLandsNothingLater) {
  Pair pair(GetParam(), false);
  const auto all = shuffled(kNumBlocks, 1);
  for (int round = 0; round < 10; ++round) {
    const auto transfer = pair.pull(all, all);
    if (!transfer) break;  // the machine stalled: lanes give reads up that take long to end
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    transfer->cancel();
    ASSERT_TRUE(transfer->wait(60 * kSecondNs));
    pair.reader.device.fill(kPoison);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const std::vector<std::byte> now = pair.reader.device.contents();
    ASSERT_TRUE(std::all_of(now.begin(), now.end(), [](std::byte one) { return one == kPoison; }));
  }
}

TEST_P(BounceEngine, ACancelledPullEndsWithTheCopiesThatMayStillLand) {
  Pair pair(GetParam(), false);
  pair.reader.device.stall();
  const auto all = shuffled(kNumBlocks, 1);
  const auto transfer = pair.pull(all, all);
  ASSERT_TRUE(transfer);
  while (pair.reader.device.num_under_way() == 0) std::this_thread::yield();
  transfer->cancel();
  EXPECT_FALSE(transfer->wait(kSecondNs / 10));
  pair.reader.device.go_on();
  ASSERT_TRUE(transfer->wait(60 * kSecondNs));
  EXPECT_EQ(transfer->status().code(), Code::kCancelled);
  EXPECT_EQ(pair.reader.device.num_under_way(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Transports, BounceEngine,
                         ::testing::Values("loopback", "shm", "cma", "verbs", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST(TcpBounceEngine, PullsFromDeviceToDeviceOverTcp) {
  for (const uint32_t lanes : {1u, 2u}) {
    Pair pair("tcp", true, lanes);
    pull_all_sizes(pair);
  }
}

}  // namespace
}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// Two engines in one process over every transport: the whole data plane without Python.
#include "engine/engine.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include "base/clock.h"
#include "transports/registry.h"
#include "transports/tcp/socket.h"

namespace kvlink {
namespace {

constexpr uint32_t kBlockBytes = 4096;
constexpr uint32_t kNumBlocks = 512;
constexpr int64_t kSecond = 1'000'000'000;

struct Side {
  std::shared_ptr<HostMemory> memory;
  std::unique_ptr<Engine> engine;

  explicit Side(uint64_t epoch, const std::string& transport, const std::string& fault = {},
                uint32_t lanes = 0, uint32_t threads = 1) {
    memory = *HostMemory::allocate(uint64_t{kNumBlocks} * kBlockBytes, false);
    EngineOptions options;
    options.epoch = epoch;
    options.transports = {transport};
    options.transport.fault = fault;
    if (const char* nics = std::getenv("KVLINK_NICS"))
      options.transport.nics = std::vector<NicOption>{{.port = nics}};
    options.num_lanes = lanes;
    options.num_progress_threads = threads;
    auto made = Engine::make(options);
    EXPECT_TRUE(made.ok()) << made.status().what();
    engine = std::move(*made);
    EXPECT_TRUE(engine->add_pool_region(memory->range()).ok());
    const Status started = engine->start();
    EXPECT_TRUE(started.ok()) << started.what();
  }

  std::byte* block(uint32_t id) { return memory->range().base + uint64_t{id} * kBlockBytes; }
};

Layout layout() {
  return {kNumBlocks, 1, 0, 1, kBlockBytes, kBlockBytes, kBlockBytes, kBlockBytes, {{0, 0, 0}}};
}

std::vector<uint32_t> shuffled(uint32_t count, uint32_t seed) {
  std::vector<uint32_t> ids(kNumBlocks);
  for (uint32_t id = 0; id < kNumBlocks; ++id) ids[id] = id;
  std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
  ids.resize(count);
  return ids;
}

struct Pair {
  Side owner, reader;
  std::shared_ptr<Connection> connection;
  std::shared_ptr<const Planner> planner;
  uint64_t next_lease = 1;

  /// Plans of faults count reads: each lane begins with one of its own.
  explicit Pair(const std::string& transport, const std::string& fault = {}, uint32_t lanes = 1,
                uint32_t threads = 1)
      : owner(7, transport), reader(8, (fault.empty() ? "" : "fault+") + transport, fault, lanes, threads) {
    std::mt19937_64 random(1);
    for (uint64_t at = 0; at < uint64_t{kNumBlocks} * kBlockBytes; at += 8) {
      const uint64_t word = random();
      std::memcpy(owner.memory->range().base + at, &word, 8);
    }
    connect();
  }

  void connect() {
    const TransportAccess access = owner.engine->access().front();
    ASSERT_EQ(access.refused, "");
    auto opened = reader.engine->open(reader.engine->access().front().name, access.address);
    ASSERT_TRUE(opened.ok()) << opened.status().what();
    connection = *opened;
    const auto accepted = owner.engine->accept(access.name, connection->hellos());
    ASSERT_TRUE(accepted.ok()) << accepted.status().what();
    const auto regions = connection->establish((*accepted).connection_id, (*accepted).replies,
                                               access.pool_keys, access.lease_keys, 7, 5 * kSecond);
    ASSERT_TRUE(regions.ok()) << regions.status().what();
    auto made = Planner::make(layout(), layout(), {reader.memory->range()}, {owner.memory->range().bytes},
                              *regions, {});
    ASSERT_TRUE(made.ok()) << made.status().what();
    planner = *made;
  }

  LeaseSeat grant(int64_t ttl_ns = 60 * kSecond) {
    return (*owner.engine->grant(next_lease++, 1, 0, ttl_ns))[0];
  }

  std::shared_ptr<Transfer> pull(const LeaseSeat& seat, const std::vector<uint32_t>& from,
                                 const std::vector<uint32_t>& into, int64_t timeout_ns = 10 * kSecond) {
    for (const uint32_t id : into) std::memset(reader.block(id), 0xee, kBlockBytes);
    PullRequest request;
    request.planner = planner;
    request.owner_blocks = from;
    request.reader_blocks = into;
    request.tokens = {0, static_cast<uint32_t>(from.size())};
    request.seat = seat;
    request.deadline_ns = now_ns() + timeout_ns;
    return connection->pull(request);
  }

  bool equal(const std::vector<uint32_t>& from, const std::vector<uint32_t>& into) {
    for (size_t index = 0; index < from.size(); ++index) {
      if (std::memcmp(owner.block(from[index]), reader.block(into[index]), kBlockBytes) != 0) return false;
    }
    return true;
  }

  std::vector<EndedLease> await_ended() {
    for (int tries = 0; tries < 5000; ++tries) {
      auto ended = owner.engine->take_ended();
      if (!ended.empty()) return ended;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return {};
  }
};

struct EngineTest : ::testing::TestWithParam<const char*> {
  void SetUp() override {
    const Status here = find_transport(GetParam())->probe();
    if (!here.ok()) GTEST_SKIP() << here.what() << ": " << here.fix();
  }
};

TEST_P(EngineTest, PullsSettlesAndGivesTheBlocksBack) {
  Pair pair(GetParam());
  for (const uint32_t count : {1u, 7u, 300u}) {
    const auto from = shuffled(count, count), into = shuffled(count, count + 1);
    const auto transfer = pair.pull(pair.grant(), from, into);
    ASSERT_TRUE(transfer->wait(10 * kSecond));
    ASSERT_TRUE(transfer->status().ok()) << transfer->status().what();
    EXPECT_TRUE(pair.equal(from, into));
    EXPECT_EQ(transfer->stats().bytes, uint64_t{count} * kBlockBytes);
    EXPECT_TRUE(transfer->stats().settled);
    const auto ended = pair.await_ended();
    ASSERT_EQ(ended.size(), 1u);
    EXPECT_EQ(ended[0].how, LeaseEnd::kSettled);
  }
}

TEST_P(EngineTest, ManyLanesAndThreadsShareOnePull) {
  Pair pair(GetParam(), {}, 3, 2);
  std::vector<uint32_t> all = shuffled(kNumBlocks, 5), into = shuffled(kNumBlocks, 6);
  for (int round = 0; round < 5; ++round) {
    const auto transfer = pair.pull(pair.grant(), all, into);
    ASSERT_TRUE(transfer->wait(10 * kSecond));
    ASSERT_TRUE(transfer->status().ok()) << transfer->status().what();
    EXPECT_TRUE(pair.equal(all, into));
  }
}

TEST_P(EngineTest, ConcurrentPullsFromManyThreads) {
  Pair pair(GetParam());
  std::vector<LeaseSeat> seats;
  for (int index = 0; index < 32; ++index) seats.push_back(pair.grant());
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint32_t index = 0; index < 8; ++index) {
        std::vector<uint32_t> from = shuffled(16, 100 * thread + index), into;
        for (uint32_t id = 0; id < 16; ++id) into.push_back(thread * 16 + id);
        const auto transfer = pair.pull(seats[thread * 8 + index], from, into);
        good += transfer->wait(10 * kSecond) && transfer->status().ok() && pair.equal(from, into);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 32);
}

TEST_P(EngineTest, AnEndedLeaseIsStale) {
  Pair pair(GetParam());
  const LeaseSeat seat = pair.grant();
  pair.owner.engine->leases().abort(1);
  const auto transfer = pair.pull(seat, {3}, {4});
  ASSERT_TRUE(transfer->wait(10 * kSecond));
  EXPECT_EQ(transfer->status().code(), Code::kStaleBlocks);
}

TEST_P(EngineTest, ASoftLeaseIsReadByAllUntilItsBlocksAreRevoked) {
  Pair pair(GetParam());
  const std::vector<uint32_t> blocks{3, 9};
  const LeaseSeat seat = *pair.owner.engine->grant_soft(blocks, 2, kNoExpiryNs);
  const auto first = pair.pull(seat, blocks, {4, 5}), second = pair.pull(seat, blocks, {6, 7});
  for (const auto& transfer : {first, second}) {
    ASSERT_TRUE(transfer && transfer->wait(10 * kSecond));
    EXPECT_EQ(transfer->state(), TransferState::kValid) << transfer->status().what();
  }
  EXPECT_TRUE(pair.equal(blocks, {4, 5}) && pair.equal(blocks, {6, 7}));
  EXPECT_EQ(pair.owner.engine->revoke(std::vector<uint32_t>{8}), 0u);
  EXPECT_EQ(pair.owner.engine->revoke(std::vector<uint32_t>{8, 9}), 1u);
  const auto late = pair.pull(seat, blocks, {4, 5});
  ASSERT_TRUE(late && late->wait(10 * kSecond));
  EXPECT_EQ(late->status().stale(), StaleReason::kEvicted) << late->status().what();
  EXPECT_FALSE(pair.connection->broken());
  EXPECT_TRUE(pair.owner.engine->take_ended().empty());
}

TEST_P(EngineTest, WrongEpochIsNoticedWhenConnecting) {
  Pair pair(GetParam());
  const TransportAccess access = pair.owner.engine->access().front();
  auto connection = *pair.reader.engine->open(GetParam(), access.address);
  const auto accepted = pair.owner.engine->accept(GetParam(), connection->hellos());
  const auto regions = connection->establish((*accepted).connection_id, (*accepted).replies, access.pool_keys,
                                             access.lease_keys, 6, 5 * kSecond);
  EXPECT_EQ(regions.status().code(), Code::kStaleBlocks);
}

TEST_P(EngineTest, AfterTheOwnerClosedPullsFailAndNothingHangs) {
  Pair pair(GetParam());
  const LeaseSeat seat = pair.grant();
  pair.owner.engine->close();
  const auto transfer = pair.pull(seat, {3}, {4}, kSecond);
  if (transfer) {
    ASSERT_TRUE(transfer->wait(10 * kSecond));
    EXPECT_FALSE(transfer->status().ok());
  }
}

TEST_P(EngineTest, ClosingTheReaderFailsItsPulls) {
  Pair pair(GetParam(), "hang@2");
  const auto transfer = pair.pull(pair.grant(), shuffled(300, 1), shuffled(300, 2));
  pair.reader.engine->close();
  ASSERT_TRUE(transfer->wait(10 * kSecond));
  EXPECT_EQ(transfer->status().code(), Code::kPeerUnreachable);
}

TEST(Engine, ClosingAConnectionEndsItsWaitForASilentOwner) {
  const UniqueFd silent = std::move(*tcp::listen_on("127.0.0.1", 0));
  Side owner(7, "tcp"), reader(8, "tcp");
  const TransportAccess access = owner.engine->access().front();
  const auto connection = *reader.engine->open("tcp", std::move(*tcp::local_address(silent.get())).encode());
  const auto accepted = owner.engine->accept("tcp", connection->hellos());
  Status status;
  std::thread connecting([&] {
    status = connection
                 ->establish(accepted->connection_id, accepted->replies, access.pool_keys, access.lease_keys,
                             7, 3600 * kSecond)
                 .status();
  });
  pollfd waiting{silent.get(), POLLIN, 0};
  ::poll(&waiting, 1, -1);  // it has connected, and waits for an answer
  reader.engine->close();
  connecting.join();
  EXPECT_EQ(status.code(), Code::kCancelled) << status.what();
}

TEST_P(EngineTest, ATransferThatHangsTimesOutAndNoLateByteLands) {
  Pair pair(GetParam(), "hang@2");  // the first read is the lease table's header
  const auto into = shuffled(300, 2);
  const auto transfer = pair.pull(pair.grant(), shuffled(300, 1), into, kSecond);
  ASSERT_TRUE(transfer->wait(10 * kSecond));
  EXPECT_EQ(transfer->status().code(), Code::kTimeout);
  for (const uint32_t id : into) std::memset(pair.reader.block(id), 0x11, kBlockBytes);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  for (const uint32_t id : into) ASSERT_EQ(pair.reader.block(id)[100], std::byte{0x11});
  EXPECT_TRUE(pair.connection->broken());
}

TEST_P(EngineTest, ADroppedReadDoesNotPassAsValid) {
  Pair pair(GetParam(), "drop@2");
  const auto transfer = pair.pull(pair.grant(), {3}, {4}, kSecond / 5);
  ASSERT_TRUE(transfer->wait(10 * kSecond));
  EXPECT_EQ(transfer->status().code(), Code::kTimeout);
}

TEST_P(EngineTest, ACorruptSlotReadIsStale) {
  Pair pair(GetParam(), "corrupt-slot@2..9");
  const auto transfer = pair.pull(pair.grant(), {3}, {4});
  ASSERT_TRUE(transfer->wait(10 * kSecond));
  EXPECT_EQ(transfer->status().code(), Code::kStaleBlocks);
}

TEST_P(EngineTest, CancelEndsAHangingPull) {
  Pair pair(GetParam(), "hang@2");
  const auto transfer = pair.pull(pair.grant(), shuffled(300, 1), shuffled(300, 2));
  ASSERT_FALSE(transfer->done());
  transfer->cancel();
  ASSERT_TRUE(transfer->wait(10 * kSecond));
  EXPECT_EQ(transfer->status().code(), Code::kCancelled);
}

TEST_P(EngineTest, ADelayedReadArrives) {
  Pair pair(GetParam(), "delay=30ms@2..3");
  const auto transfer = pair.pull(pair.grant(), {3, 5}, {4, 6});
  ASSERT_TRUE(transfer->wait(10 * kSecond));
  EXPECT_TRUE(transfer->status().ok()) << transfer->status().what();
  EXPECT_TRUE(pair.equal({3, 5}, {4, 6}));
  EXPECT_GE(transfer->stats().total_ns, 20'000'000);
}

TEST_P(EngineTest, ExpiryIsReported) {
  Pair pair(GetParam());
  pair.grant(kSecond / 50);
  const auto ended = pair.await_ended();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].how, LeaseEnd::kExpired);
}

INSTANTIATE_TEST_SUITE_P(Transports, EngineTest, ::testing::Values("loopback", "shm", "cma", "verbs", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

struct EngineFenceTest : EngineTest {};

TEST_P(EngineFenceTest, ExpiryCutsOnlyTheLateReadersConnection) {
  Pair pair(GetParam());
  const LeaseSeat seat = pair.grant();
  // The reader checks the blocks but never settles: it announces itself and stays connected.
  PullRequest request;
  request.planner = pair.planner;
  const std::vector<uint32_t> from{3}, into{4};
  request.owner_blocks = from;
  request.reader_blocks = into;
  request.tokens = {0, 1};
  request.seat = {seat.slot, seat.nonce, 0};
  request.deadline_ns = now_ns() + 10 * kSecond;
  const auto first = pair.connection->pull(request);
  ASSERT_TRUE(first->wait(10 * kSecond));
  ASSERT_TRUE(first->status().ok()) << first->status().what();
  std::shared_ptr<Connection> late = pair.connection;
  pair.connect();
  ASSERT_TRUE(pair.owner.engine->leases().set_ttl(pair.next_lease - 1, 0, now_ns()));
  const auto ended = pair.await_ended();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].how, LeaseEnd::kExpired);
  EXPECT_EQ(pair.owner.engine->leases().counts(now_ns()).fenced_readers, 1u);
  // Null, or a transfer that fails: the cut may be noticed only while it runs.
  request.deadline_ns = now_ns() + 10 * kSecond;
  if (const auto cut = late->pull(request)) {
    ASSERT_TRUE(cut->wait(20 * kSecond));
    EXPECT_EQ(cut->status().code(), Code::kPeerUnreachable);
  }
  EXPECT_TRUE(late->broken());
  const auto other = pair.pull(pair.grant(), {5}, {6});
  ASSERT_TRUE(other && other->wait(10 * kSecond));
  EXPECT_TRUE(other->status().ok()) << other->status().what();
}

struct EngineGuardTest : EngineTest {};

TEST_P(EngineGuardTest, AbortAndExpiryEndTheReadAndKeepTheConnection) {
  Pair pair(GetParam());
  for (const bool expires : {false, true}) {
    const LeaseSeat seat = pair.grant();
    const uint64_t lease = pair.next_lease - 1;
    LeaseTable& leases = pair.owner.engine->leases();
    EXPECT_TRUE(expires ? leases.set_ttl(lease, 0, now_ns()) : leases.abort(lease));
    const auto ended = pair.await_ended();
    ASSERT_EQ(ended.size(), 1u);
    EXPECT_EQ(leases.counts(now_ns()).fenced_readers, 0u);
    const auto late = pair.pull(seat, {3}, {4});
    ASSERT_TRUE(late && late->wait(10 * kSecond));
    EXPECT_EQ(late->status().code(), Code::kStaleBlocks) << late->status().what();
    EXPECT_EQ(late->status().stale(), expires ? StaleReason::kExpired : StaleReason::kAborted);
    EXPECT_FALSE(pair.connection->broken());
    EXPECT_FALSE(pair.equal({3}, {4})) << "the bytes came all the same";
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, EngineGuardTest, ::testing::Values("loopback", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

INSTANTIATE_TEST_SUITE_P(Transports, EngineFenceTest, ::testing::Values("verbs"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Engine, RegistersNoRangeWithoutMemory) {
  Side side(7, "loopback");
  EngineOptions options;
  options.transports = {"loopback"};
  const auto engine = std::move(*Engine::make(options));
  const MemoryRange range = side.memory->range();
  EXPECT_EQ(engine->add_pool_region({.base = nullptr, .bytes = range.bytes}).status().code(), Code::kConfig);
  EXPECT_EQ(engine->add_pool_region({.base = range.base, .bytes = 0}).status().code(), Code::kConfig);
  EXPECT_EQ(*engine->add_pool_region(range), 0u);
  EXPECT_EQ(side.engine->add_pool_region(range).status().code(), Code::kConfig) << "it has started";
}

TEST(Engine, SaysWhyATransportIsNotHere) {
  int num_absent = 0;
  for (const TransportInfo& info : transports()) {
    EngineOptions options;
    options.transports = {info.name};
    const auto engine = Engine::make(options);
    ASSERT_TRUE(engine.ok()) << engine.status().what();
    const TransportAccess access = (*engine)->access().at(0);
    EXPECT_EQ(access.refused.empty(), info.probe().ok()) << info.name << ": " << access.refused;
    EXPECT_EQ(access.address.empty(), !info.probe().ok()) << info.name;
    num_absent += !info.probe().ok();
  }
  if (num_absent == 0) GTEST_SKIP() << "this machine has all";
}

TEST(Engine, RevokesWithoutATransportThatWasGivenUp) {
  const auto memory = *HostMemory::allocate(uint64_t{kNumBlocks} * kBlockBytes, false);
  EngineOptions options;
  options.transports = {"tcp", "loopback"};
  const auto engine = std::move(*Engine::make(options));
  engine->disable("tcp", "not today");
  ASSERT_TRUE(engine->add_pool_region(memory->range()).ok());
  ASSERT_TRUE(engine->start().ok());
  const std::vector<uint32_t> blocks{3};
  ASSERT_TRUE(engine->grant_soft(blocks, 1, kNoExpiryNs).ok());
  EXPECT_EQ(engine->revoke(blocks), 1u);
}

TEST(Engine, AClosedWorkerHoldsNoDescriptors) {
  const auto count = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); };
  const auto memory = *HostMemory::allocate(uint64_t{kNumBlocks} * kBlockBytes, false);
  const auto before = count();
  EngineOptions options;
  options.transports = {"tcp", "loopback"};
  const auto engine = std::move(*Engine::make(options));
  ASSERT_TRUE(engine->add_pool_region(memory->range()).ok());
  ASSERT_TRUE(engine->start().ok());
  EXPECT_GT(count(), before);
  engine->close();
  EXPECT_EQ(count(), before);
  EXPECT_EQ(engine->open("tcp", "127.0.0.1:1").status().code(), Code::kTransportUnavailable);
  EXPECT_EQ(engine->grant(1, 1, 0, kSecond).status().code(), Code::kConfig);
}

/// Nobody asks: the owner's thread wakes up, sees it, and says so.
TEST(Engine, TheEndOfALeaseIsTold) {
  Side side(7, "loopback");
  const auto ended = *CompletionQueue::make();
  side.engine->watch_ended(ended);
  const std::vector<uint32_t> blocks{3};
  for (const bool at_a_ticket : {false, true}) {
    if (at_a_ticket) {
      const LeaseSeat seat{2, 1ull << 40, 1ull << 41};
      ASSERT_TRUE(side.engine->grant_at(2, {{seat}}, 0, kSecond / 100).ok());
    } else {
      ASSERT_TRUE(side.engine->grant(1, 1, 0, kSecond / 100).ok());
    }
    pollfd waiting{ended->fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&waiting, 1, 20'000), 1);
    EXPECT_EQ(ended->drain(), std::vector<uint64_t>{at_a_ticket ? 2u : 1u});
  }
  ASSERT_TRUE(side.engine->grant_soft(blocks, 1, kSecond / 100).ok());
  const int64_t until = now_ns() + 20 * kSecond;
  while (side.engine->leases().num_active() > 0 && now_ns() < until) std::this_thread::yield();
  EXPECT_EQ(side.engine->leases().num_active(), 0u) << "a soft lease that expires is swept, too";
}

TEST(EngineOptionsTest, RefusesNonsense) {
  EngineOptions options;
  options.transports = {"carrier-pigeon"};
  EXPECT_EQ(Engine::make(options).status().code(), Code::kConfig);
  options.transports = {"tcp"};
  options.num_progress_threads = 0;
  EXPECT_EQ(Engine::make(options).status().code(), Code::kConfig);
}

}  // namespace
}  // namespace kvlink

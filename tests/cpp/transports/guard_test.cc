// SPDX-License-Identifier: Apache-2.0
// A read under a guard: once the word is another, not a byte of it is sent, and nothing else suffers.
#include "base/blob.h"
#include "cpp/staging/bounce_peers.h"
#include "cpp/transports/tcp/raw.h"
#include "lease/stale.h"
#include "transports/tcp/reader.h"
#include "transports/tcp/response_queue.h"

namespace kvlink::testing {
namespace {

constexpr uint64_t kNonce = 0x1234'5678'9abc'def0, kTombstone = 3;
constexpr uint64_t kSlotOffset = 128;
constexpr std::byte kBefore{0x11}, kAfter{0x22};
constexpr Guard kGuard{kSlotOffset, kNonce, kTable};

std::atomic_ref<uint64_t> slot_of(const std::shared_ptr<HostMemory>& table) {
  return std::atomic_ref(*reinterpret_cast<uint64_t*>(table->range().base + kSlotOffset));
}

void fill(const MemoryRange& range, std::byte value) {
  std::memset(range.base, static_cast<int>(value), range.bytes);
}

Chunk guarded(const Scatter& scatter, const Guard& guard = kGuard) {
  return {.ops = scatter.ops, .segments = scatter.segments.data(), .guard = guard};
}

size_t count(const std::vector<std::byte>& bytes, std::byte value) {
  return static_cast<size_t>(std::count(bytes.begin(), bytes.end(), value));
}

Status read_guarded(Reader& reader, const Scatter& scatter, const Guard& guard = kGuard) {
  Status status = reader.endpoint->post_read(1, guarded(scatter, guard));
  return status.ok() ? reader.wait(1) : status;
}

/// An owner whose pool is of one value, and that serves when the test says so.
struct GuardedOwner : Owner {
  explicit GuardedOwner(const std::string& name) : Owner(name) {
    fill(pool->range(), kBefore);
    slot() = kNonce;
  }
  std::atomic_ref<uint64_t> slot() const { return slot_of(table); }
  /// Ends the lease, and the next request writes its own bytes.
  void end() const {
    slot() = kTombstone;
    transport->fence(0);
    fill(pool->range(), kAfter);
  }
  Reader::Accept accept(uint64_t connection) const {
    return [this, connection](const std::string& hello) { return *transport->accept(connection, hello); };
  }
  /// Serves until there is nothing more that it can do.
  void serve_all() const {
    for (pollfd work{transport->capabilities().serve_fd, POLLIN, 0}; ::poll(&work, 1, 0) > 0;)
      transport->serve();
  }
};

class Guards : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transports, Guards, ::testing::Values("tcp", "loopback", "fault+tcp"));

TEST_P(Guards, EndTheReadAndNothingElse) {
  const std::string name = GetParam();
  GuardedOwner owner(name.substr(name.find('+') + 1));
  Server server(*owner.transport);
  EXPECT_TRUE(owner.transport->capabilities().guards);
  Reader reader(name, owner.card(), owner.accept(1));
  const Scatter pool = whole_pool(reader);
  ASSERT_TRUE(read_guarded(reader, pool).ok());
  EXPECT_EQ(count(reader.destination, kBefore), kPoolBytes);
  owner.end();
  reader.poison();
  const Status status = read_guarded(reader, pool);
  EXPECT_EQ(status.code(), Code::kStaleBlocks) << status.what();
  EXPECT_EQ(status.stale(), StaleReason::kAborted);
  EXPECT_EQ(count(reader.destination, kAfter), 0u);
  EXPECT_TRUE(reader.read(pool).ok()) << "the connection goes on";
  EXPECT_EQ(count(reader.destination, kAfter), kPoolBytes);
  owner.slot() = kNonce + 1;
  EXPECT_TRUE(read_guarded(reader, pool, {kSlotOffset, kNonce + 1, kTable}).ok());
}

TEST_P(Guards, OutsideWhatIsLentAreRefused) {
  const std::string name = GetParam();
  GuardedOwner owner(name.substr(name.find('+') + 1));
  Server server(*owner.transport);
  Reader reader(name, owner.card(), owner.accept(1));
  const Scatter pool = whole_pool(reader);
  for (const Guard& guard : {Guard{kTableBytes, kNonce, kTable}, Guard{kTableBytes - 4, kNonce, kTable},
                             Guard{UINT64_MAX - 7, kNonce, kTable}, Guard{kSlotOffset + 4, kNonce, kTable},
                             Guard{kSlotOffset, kNonce, 9}}) {
    EXPECT_FALSE(read_guarded(reader, pool, guard).ok()) << guard.offset << " of " << guard.region;
  }
  EXPECT_EQ(count(reader.destination, kBefore), 0u);
  EXPECT_TRUE(read_guarded(reader, pool).ok());
}

/// The answers that a raw reader gets, one per frame with its payload.
struct Answers {
  size_t num_ok = 0, num_stale = 0;
  std::vector<std::byte> payload;
  uint64_t told = 0;

  void hear(RawSocket& socket, size_t num_frames) {
    for (size_t frame = 0; frame < num_frames; ++frame) {
      tcp::ResponseHeader header{};
      const std::string head = socket.hear(sizeof header);
      ASSERT_EQ(head.size(), sizeof header) << "the connection was cut";
      std::memcpy(&header, head.data(), sizeof header);
      ASSERT_EQ(header.id, frame);
      if (header.status == tcp::ReadStatus::kStale) {
        ++num_stale;
        told = header.bytes;
        continue;
      }
      ASSERT_EQ(header.status, tcp::ReadStatus::kOk);
      ++num_ok;
      const std::string bytes = socket.hear(header.bytes);
      ASSERT_EQ(bytes.size(), header.bytes);
      const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
      payload.insert(payload.end(), begin, begin + bytes.size());
    }
  }
};

/// A raw reader that asked for more than the sockets hold, and has not listened yet.
struct StalledRead {
  static constexpr size_t kFrames = 64;

  explicit StalledRead(const GuardedOwner& owner) : socket(owner.card().address) {
    const std::string reply = *owner.transport->accept(1, tcp::encode_hello(0));
    {
      Server server(*owner.transport);
      EXPECT_EQ(socket.greet(owner.card().address, reply), tcp::Verdict::kAdmitted);
    }
    const auto key_of = [](const std::string& key) { return BlobReader(key).u64(); };
    const Card card = owner.card();
    for (uint64_t id = 0; id < kFrames; ++id) {
      const uint64_t offset = id * tcp::kMaxFrameBytes % kPoolBytes;
      EXPECT_TRUE(socket.say(guarded_frame({key_of(card.table_key), kSlotOffset, kNonce},
                                           {{key_of(card.pool_key), offset, tcp::kMaxFrameBytes}}, id)));
    }
    owner.serve_all();
  }
  RawSocket socket;
  Answers answers;
};

void expect_no_late_byte(const Answers& answers) {
  EXPECT_GT(answers.num_ok, 0u);
  EXPECT_GT(answers.num_stale, 0u);
  EXPECT_EQ(answers.told, kTombstone);
  const size_t before = count(answers.payload, kBefore);
  EXPECT_GT(before, 0u);
  EXPECT_EQ(count(answers.payload, kAfter), 0u) << "bytes of the next request";
  EXPECT_EQ(before + count(answers.payload, std::byte{}), answers.payload.size());
}

TEST(TcpGuard, NoByteOfTheNextRequestIsSentOnceTheGuardIsEnforced) {
  const GuardedOwner owner("tcp");
  StalledRead late(owner);
  owner.end();
  Server server(*owner.transport);
  late.answers.hear(late.socket, StalledRead::kFrames);
  expect_no_late_byte(late.answers);
}

/// The word is checked before each slice, too, whoever forgot to enforce it.
TEST(TcpGuard, IsLookedAtBeforeEachSlice) {
  const GuardedOwner owner("tcp");
  StalledRead late(owner);
  owner.slot() = kTombstone;
  fill(owner.pool->range(), kAfter);
  Server server(*owner.transport);
  late.answers.hear(late.socket, StalledRead::kFrames);
  expect_no_late_byte(late.answers);
}

TEST(TcpGuard, TellsNoWordThatMayBeANonce) {
  const GuardedOwner owner("tcp");
  StalledRead late(owner);
  owner.slot() = kNonce + 1;  // the slot is another lease's
  Server server(*owner.transport);
  late.answers.hear(late.socket, StalledRead::kFrames);
  EXPECT_GT(late.answers.num_stale, 0u);
  EXPECT_EQ(late.answers.told, kLargestToldWord);
}

TEST(TcpGuard, IsNotLookedAtOnceItsRegionIsTakenBack) {
  GuardedOwner owner("tcp");
  StalledRead late(owner);
  owner.table_region.reset();
  owner.table.reset();
  owner.transport->fence(0);
  Server server(*owner.transport);
  EXPECT_TRUE(late.socket.is_closed());
}

TEST(TcpGuard, LandsReadsLargerThanAFrame) {
  Owner owner("tcp");
  Server server(*owner.transport);
  Reader reader("tcp", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  const std::vector<std::byte> pool = expected_pool();
  std::mt19937_64 random(3);
  for (const uint32_t tail : {0u, 1u, 8u, 70'000u}) {
    reader.poison();
    Scatter scatter;
    std::vector<Segment> pieces;
    const uint32_t bytes = 3 * tcp::kMaxFrameBytes + tail;
    uint32_t left = bytes;
    for (std::byte* to = reader.destination.data(); left > 0;) {
      const auto size = std::min<uint32_t>(left, 1 + random() % 300'000);
      pieces.push_back({to, size, 0});
      to += size;
      left -= size;
    }
    scatter.add(kPool, 1000, pieces);
    scatter.add(kPool, 5, {{&reader.destination[bytes], 77'777, 0}});
    Scatter behind;
    behind.add(kPool, 99, {{&reader.destination[bytes + 77'777], 32, 0}});
    ASSERT_TRUE(reader.endpoint->post_read(1, scatter.chunk()).ok());
    ASSERT_TRUE(reader.endpoint->post_read(2, behind.chunk()).ok());
    const Status status = reader.wait(2);
    ASSERT_TRUE(status.ok()) << status.what();
    expect_landed(scatter, pool);
    expect_landed(behind, pool);
    const auto end = reader.destination.begin() + bytes + 77'777 + 32;
    EXPECT_TRUE(std::all_of(end, reader.destination.end(), [](std::byte one) { return one == kPoison; }));
  }
}

/// A read of three frames whose guard fails at the second, between two others.
TEST(TcpLanding, EndsAReadOnceWhenItsGuardFailsInTheMiddle) {
  std::vector<std::byte> memory(3 * tcp::kMaxFrameBytes), other(2000);
  Scatter large, small;
  large.add(0, 0, {{memory.data(), 3 * tcp::kMaxFrameBytes, 0}});
  small.add(0, 0, {{other.data(), 2000, 0}});
  for (const bool forgotten : {false, true}) {
    tcp::ResponseQueue landing("owner");
    landing.expect(1, 0, guarded(large), memory.size());
    landing.expect(2, 3, small.chunk(), other.size());
    if (forgotten) landing.forget(1);
    std::string stream =
        raw(tcp::ResponseHeader{tcp::kFrameMagic, tcp::ReadStatus::kOk, 0, tcp::kMaxFrameBytes}) +
        std::string(tcp::kMaxFrameBytes, 'a');
    for (const uint32_t id : {1u, 2u}) {
      stream += raw(tcp::ResponseHeader{tcp::kFrameMagic, tcp::ReadStatus::kStale, id, kTombstone});
    }
    stream +=
        raw(tcp::ResponseHeader{tcp::kFrameMagic, tcp::ReadStatus::kOk, 3, 2000}) + std::string(2000, 'b');
    std::vector<Completion> ended;
    const Status status = land_stream(landing, stream, ended);
    ASSERT_TRUE(status.ok()) << status.what();
    ASSERT_EQ(ended.size(), forgotten ? 1u : 2u);
    EXPECT_EQ(ended.back().token, 2u);
    EXPECT_EQ(count(other, std::byte{'b'}), other.size());
    EXPECT_TRUE(forgotten || ended.front().status.code() == Code::kStaleBlocks);
  }
}

/// Nobody may call blocks stale that were asked for without a guard, nor tell more than a tombstone.
TEST(TcpLanding, RefusesStaleAnswersThatDoNotFit) {
  std::vector<std::byte> memory(2000);
  Scatter scatter;
  scatter.add(0, 0, {{memory.data(), 2000, 0}});
  for (const auto& [chunk, told, code] : {std::tuple{guarded(scatter), uint64_t{2}, Code::kOk},
                                          {scatter.chunk(), 2, Code::kPeerUnreachable},
                                          {guarded(scatter), 256, Code::kPeerUnreachable}}) {
    tcp::ResponseQueue landing("owner");
    landing.expect(1, 0, chunk, 2000);
    std::vector<Completion> ended;
    const std::string answer = raw(tcp::ResponseHeader{tcp::kFrameMagic, tcp::ReadStatus::kStale, 0, told});
    EXPECT_EQ(land_stream(landing, answer, ended).code(), code);
  }
}

/// An owner of device memory that sends through the bounce buffer.
struct DeviceGuard : ::testing::Test {
  void SetUp() override {
    device.fill(kBefore);
    slot() = kNonce;
    pool_region = std::move(*transport->register_memory(device.range(), Access::kRead, bounce));
    table_region = std::move(*transport->register_memory(table->range(), Access::kReadWords));
    server = std::make_unique<Server>(*transport);
    const Card card{transport->address(), pool_region->remote_key(), table_region->remote_key(), {}};
    reader = std::make_unique<Reader>(
        "tcp", card, [this](const std::string& hello) { return *transport->accept(1, hello); });
  }
  void TearDown() override { device.go_on(); }
  std::atomic_ref<uint64_t> slot() const { return slot_of(table); }
  void post(const Scatter& scatter, uint64_t num = 1) const {
    std::vector<Completion> ended;
    for (uint64_t token = 1; token <= num; ++token) {
      ASSERT_TRUE(reader->endpoint->post_read(token, guarded(scatter)).ok());
    }
    ASSERT_TRUE(poll_once(*reader->endpoint, ended).status.ok());
  }

  FakeDevice device{kPoolBytes};
  std::shared_ptr<Bounce> bounce = must_make(device);
  std::shared_ptr<HostMemory> table = allocate(kTableBytes);
  std::unique_ptr<Transport> transport = must_make("tcp");
  std::unique_ptr<MemoryRegion> pool_region, table_region;
  std::unique_ptr<Server> server;
  std::unique_ptr<Reader> reader;
};

TEST_F(DeviceGuard, WhatWasCopiedAfterTheEndIsNotSent) {
  device.stall();
  const Scatter pool = whole_pool(*reader);
  post(pool);
  while (device.num_under_way() == 0) std::this_thread::yield();
  slot() = kTombstone;
  device.fill(kAfter);  // before the copies under way look
  device.go_on();
  const Status status = reader->wait(1);
  EXPECT_EQ(status.code(), Code::kStaleBlocks) << status.what();
  EXPECT_EQ(count(reader->destination, kAfter), 0u);
  EXPECT_EQ(bounce->sending().num_free(), kSlots);
  device.fill(kBefore);
  slot() = kNonce;
  EXPECT_TRUE(read_guarded(*reader, pool).ok()) << "the connection goes on";
}

TEST_F(DeviceGuard, AReaderThatStallsKeepsNoSlotOnceTheGuardIsEnforced) {
  const Scatter pool = whole_pool(*reader);
  post(pool, 16);  // more than the sockets take
  while (bounce->sending().num_free() == kSlots) std::this_thread::yield();
  slot() = kTombstone;
  transport->fence(0);
  // A copy of the device that is under way keeps its slot until it has ended.
  while (bounce->sending().num_free() != kSlots) std::this_thread::yield();
  device.fill(kAfter);
  EXPECT_EQ(reader->wait(16).code(), Code::kStaleBlocks);
  // A reader receives ahead into the next read's memory: frames, whose ids have any value, pass through it.
  EXPECT_EQ(std::search_n(reader->destination.begin(), reader->destination.end(), 64, kAfter),
            reader->destination.end());
}

/// The reader's own bounce buffer asks on the pull's behalf.
TEST(BounceGuard, GoesWithEachPart) {
  DevicePair pair("tcp");
  slot_of(pair.owner.table) = kNonce;
  const Scatter all = whole(pair.device, kPoolBytes);
  const auto read = [&] {
    const Status status = pair.reader.endpoint->post_read(1, guarded(all));
    return status.ok() ? pair.reader.wait(1) : status;
  };
  EXPECT_TRUE(read().ok());
  slot_of(pair.owner.table) = kTombstone;
  pair.reader.ended.clear();
  EXPECT_EQ(read().code(), Code::kStaleBlocks);
}

}  // namespace
}  // namespace kvlink::testing

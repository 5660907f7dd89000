// SPDX-License-Identifier: Apache-2.0
// Both ends over providers of libfabric that need no hardware. The transport suite in Python runs over one,
// too.
#include <signal.h>

#include <array>
#include <filesystem>
#include <stop_token>

#include "cpp/transports/copy_peers.h"
#include "transports/fabric/protocol.h"

namespace kvlink::testing {
namespace {

using fabric::RemoteRegion;

bool has_provider(const std::string& name) { return make_transport(name, {}, transports_and_toy()).ok(); }

class Fabric : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    // The threads of sockets move bytes as a NIC does: while others look. TSan takes that for a race.
    if (GetParam() == std::string("sockets")) GTEST_SKIP();
#endif
    if (!has_provider(GetParam())) GTEST_SKIP() << GetParam() << ": apt-get install libfabric1";
  }
};
INSTANTIATE_TEST_SUITE_P(All, Fabric, ::testing::Values("sockets", "rxm"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(Fabric, ReadsEveryByteOfScatteredPieces) {
  RemotePair pair(GetParam());
  const std::vector<std::byte> pool = expected_pool();
  std::mt19937_64 random(5);
  Scatter scatter;
  std::vector<std::byte> expected(kPoolBytes, kPoison);
  std::vector<uint32_t> from(kPoolBytes / kBlock);
  for (uint32_t i = 0; i < from.size(); ++i) from[i] = i;
  std::shuffle(from.begin(), from.end(), random);
  for (uint32_t to = 0; to + 1 < from.size(); ++to) {  // the last block stays as it is
    std::byte* at = pair.reader.destination.data() + uint64_t{to} * kBlock;
    std::vector<Segment> pieces;
    for (uint32_t left = kBlock; left > 0;) {
      const uint32_t bytes = to % 2 == 0 ? left : 1 + static_cast<uint32_t>(random() % left);
      pieces.push_back({at, bytes, 0});
      at += bytes;
      left -= bytes;
    }
    scatter.add(kPool, uint64_t{from[to]} * kBlock, pieces);
    std::memcpy(expected.data() + uint64_t{to} * kBlock, &pool[uint64_t{from[to]} * kBlock], kBlock);
  }
  const Status status = pair.reader.read(scatter);
  ASSERT_TRUE(status.ok()) << status.what();
  EXPECT_TRUE(pair.reader.destination == expected);
}

TEST_P(Fabric, StoresWordsBeforeWhatFollows) {
  RemotePair pair(GetParam());
  for (uint64_t i = 1; i <= 50; ++i) {
    ASSERT_TRUE(pair.reader.write_word(512, i).ok());
    EXPECT_EQ(pair.owner.peer_word(512), i);
  }
  EXPECT_EQ(pair.reader.endpoint->post_write(1, kTable, 128, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(kWords, 64, 8).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(kPool, kPoolBytes - 63, 64).code(), Code::kAccessDenied);
}

/// A reader that lies to itself about what a key allows: the provider has to refuse at the owner.
void expect_refused(const char* name, const std::function<void(RemoteRegion&)>& forge,
                    const std::function<Status(Reader&, uint32_t region)>& use) {
  RemotePair pair(name);
  auto key = fabric::parse_key(pair.owner.card().table_key);
  ASSERT_TRUE(key);
  forge(*key);
  const auto region = pair.reader.endpoint->import_region(fabric::format_key(*key));
  ASSERT_TRUE(region.ok());
  EXPECT_FALSE(use(pair.reader, *region).ok());
  EXPECT_TRUE(pair.reader.is_poisoned());
}

TEST_P(Fabric, OwnerRefusesForgedKeys) {
  const auto read = [](Reader& reader, uint32_t region) { return reader.read_at(region, 0, 64); };
  expect_refused(GetParam(), [](RemoteRegion& key) { key.key += 1; }, read);
  expect_refused(GetParam(), [](RemoteRegion& key) { key.base += kTableBytes; }, read);
  expect_refused(
      GetParam(), [](RemoteRegion& key) { key.access = Access::kWriteWords; },
      [](Reader& reader, uint32_t region) {
        const Status status = reader.endpoint->post_write(9, region, 0, 1);
        return status.ok() ? reader.wait(9) : status;
      });
}

TEST_P(Fabric, NamesItsProvider) {
  LocalPair pair(GetParam());
  EXPECT_NE(pair.reader.endpoint->traits().path.find(GetParam()), std::string::npos);
}

TEST_P(Fabric, NoticesAnOwnerThatIsKilled) {
  RemotePair pair(GetParam());
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, 4096).ok());
  pair.owner.kill(SIGKILL);
  pollfd wake{pair.reader.endpoint->traits().wake_fd, POLLIN, 0};
  EXPECT_EQ(::poll(&wake, 1, 20'000), 1);
  EXPECT_EQ(pair.reader.wait_broken().code(), Code::kPeerUnreachable);
  EXPECT_EQ(pair.reader.read_at(kPool, 0, 4096).code(), Code::kPeerUnreachable);
}

TEST_P(Fabric, NoticesAnOwnerThatIsKilledAmidReads) {
  for (int i = 0; i < 2; ++i) {
    RemotePair pair(GetParam());
    const Scatter large = whole_pool(pair.reader, 1 << 20);
    std::thread killer([&] { pair.owner.kill(SIGKILL); });
    Status status;
    for (const int64_t deadline = now_ns() + 20 * kSecondNs; status.ok() && now_ns() < deadline;)
      status = pair.reader.read(large);
    killer.join();
    EXPECT_EQ(status.code(), Code::kPeerUnreachable) << status.what();
  }
}

TEST_P(Fabric, NoticesAnOwnerThatCloses) {
  RemotePair pair(GetParam());
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, 4096).ok());
  pair.owner.close_transport();
  EXPECT_EQ(pair.reader.wait_broken().code(), Code::kPeerUnreachable);
}

/// Polls until bytes have landed.
void begin_reading(Reader& reader, const Scatter& large) {
  ASSERT_TRUE(reader.endpoint->post_read(1, large.chunk()).ok());
  std::vector<Completion> ended;
  for (const int64_t deadline = now_ns() + 20 * kSecondNs; reader.is_poisoned() && now_ns() < deadline;)
    ASSERT_TRUE(poll_once(*reader.endpoint, ended).status.ok());
}

TEST_P(Fabric, LandsNothingAfterItIsClosedAmidReads) {
  RemotePair pair(GetParam());
  for (int i = 0; i < 3; ++i) {
    Reader reader(GetParam(), pair.owner.card(),
                  [&](const std::string& hello) { return pair.owner.accept(42, hello); });
    const Scatter large = whole_pool(reader, 1 << 20);
    begin_reading(reader, large);
    reader.endpoint->close();
    reader.poison();
    ASSERT_TRUE(pair.reader.read_at(kPool, 0, 1 << 20).ok());  // the owner goes on meanwhile
    EXPECT_TRUE(reader.is_poisoned());
  }
}

TEST_P(Fabric, LandsNothingAfterItIsClosedWhileTheOwnerIsStopped) {
  RemotePair pair(GetParam());
  Reader reader(GetParam(), pair.owner.card(),
                [&](const std::string& hello) { return pair.owner.accept(42, hello); });
  const Scatter large = whole_pool(reader, 1 << 20);
  begin_reading(reader, large);
  pair.owner.stop();
  reader.endpoint->close();
  reader.poison();
  pair.owner.go_on();
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, 1 << 20).ok());
  EXPECT_TRUE(reader.is_poisoned());
}

TEST_P(Fabric, RefusesAnotherOwnerAtTheAddress) {
  RemoteOwner meant(GetParam()), other(GetParam());
  auto address = fabric::Address::parse(meant.card().address);
  ASSERT_TRUE(address);
  address->endpoint = fabric::Address::parse(other.card().address)->endpoint;
  auto transport = make_transport(GetParam(), {}, transports_and_toy());
  auto endpoint = open_one(**transport, address->format());
  ASSERT_TRUE(endpoint.ok());
  const std::string reply = meant.accept(1, (*endpoint)->hello());
  EXPECT_EQ((*endpoint)->establish(reply, 5 * kSecondNs).code(), Code::kPeerUnreachable);
}

TEST_P(Fabric, RefusesMalformedBlobs) {
  LocalPair pair(GetParam());
  const Card card = pair.owner.card();
  auto opened = open_one(*pair.reader.transport, card.address);
  ASSERT_TRUE(opened.ok());
  const std::string hello = (*opened)->hello(), reply = pair.accept(hello);
  for (const auto& blob : spoilt(card.address))
    EXPECT_EQ(open_one(*pair.reader.transport, blob).status().code(), Code::kTransportUnavailable);
  for (const auto& blob : spoilt(hello)) EXPECT_FALSE(pair.owner.transport->accept(1, blob).ok());
  for (const auto& blob : spoilt(reply)) EXPECT_FALSE((*opened)->establish(blob, kSecondNs).ok());
  for (const auto& blob : spoilt(card.pool_key)) EXPECT_FALSE(pair.reader.endpoint->import_region(blob).ok());
}

TEST_P(Fabric, LoadsWordsWholeWhileTheOwnerStores) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the kernel's load beside the owner's store is what is tested";
#endif
  LocalPair pair(GetParam());
  std::byte* const slot = pair.owner.table->range().base + 64;
  std::jthread storing([&](std::stop_token stop) {
    for (uint64_t i = 0; !stop.stop_requested(); ++i)
      __atomic_store_n(reinterpret_cast<uint64_t*>(slot), (i & 1) != 0 ? UINT64_MAX : 0, __ATOMIC_RELAXED);
  });
  for (int i = 0; i < 50; ++i) {
    const Status status = pair.reader.read_at(kTable, 64, 64);
    ASSERT_TRUE(status.ok()) << status.what();
    uint64_t word;
    std::memcpy(&word, pair.reader.destination.data(), sizeof word);
    ASSERT_TRUE(word == 0 || word == UINT64_MAX) << word;
  }
}

TEST_P(Fabric, ReconnectsWithoutLeavingDescriptors) {
  const auto count = [] {
    const std::filesystem::directory_iterator open_files("/proc/self/fd");
    return std::distance(begin(open_files), end(open_files));
  };
  RemoteOwner owner(GetParam());
  auto transport = make_transport(GetParam(), {}, transports_and_toy());
  const auto connect = [&] {
    auto endpoint = open_one(**transport, owner.card().address);
    ASSERT_TRUE(endpoint.ok());
    ASSERT_TRUE((*endpoint)->establish(owner.accept(1, (*endpoint)->hello()), 20 * kSecondNs).ok());
  };
  connect();
  const auto before = count();
  for (int i = 0; i < 20; ++i) connect();
  EXPECT_EQ(count(), before);
}

TEST(FabricProviders, AreRefusedByName) {
  if (!has_provider("sockets")) GTEST_SKIP() << "apt-get install libfabric1";
  TransportOptions options;
  options.fabric_provider = "shm";
  const std::string refused = fabric_make(options).status().what(), why = "does not compare keys";
  EXPECT_NE(refused.find(why), std::string::npos);
  EXPECT_EQ(refused.find(why), refused.rfind(why)) << "though libfabric lists shm twice";
  options.fabric_provider = "no-such";
  EXPECT_EQ(fabric_make(options).status().code(), Code::kTransportUnavailable);
  EXPECT_NE(fabric_make(options).status().what().find("no-such"), std::string::npos);
}

// Libraries that libfabric needs take SIGINT, SIGTERM and others when they are loaded.
TEST(FabricProviders, LeaveSignalsAlone) {
  has_provider("sockets");
  for (const int signal : {SIGINT, SIGTERM, SIGILL}) {  // sanitizers take the others
    struct sigaction action{};
    ::sigaction(signal, nullptr, &action);
    EXPECT_TRUE(action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN)
        << signal;  // as it was inherited
  }
}

TEST(FabricTransport, IsUsedOnlyWhereItIsNamed) {
  for (const TransportInfo& info : transports()) EXPECT_STRNE(info.name, "fabric");
  EXPECT_NE(find_transport("fabric"), nullptr);
  EXPECT_NE(find_transport("fault+fabric"), nullptr);
}

}  // namespace
}  // namespace kvlink::testing

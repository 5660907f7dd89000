// SPDX-License-Identifier: Apache-2.0
// The tcp transport between real sockets: every byte in its place, nothing late, nothing stale.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>

#include "cpp/transports/copy_peers.h"
#include "cpp/transports/tcp/raw.h"
#include "transports/factories.h"
#include "transports/tcp/reader.h"

namespace kvlink::testing {
namespace {

constexpr uint32_t kNumBlocks = kPoolBytes / kBlock;

/// Pieces of random sizes from random places, each to its own random place.
std::vector<Scatter> random_scatters(Reader& reader, size_t count, std::mt19937_64& random) {
  std::vector<Scatter> scatters(count);
  std::byte* to = reader.destination.data();
  std::byte* const end = to + reader.destination.size();
  for (size_t turn = 0; to < end; ++turn) {
    std::vector<Segment> pieces;
    uint64_t bytes = 0;
    for (size_t piece = 1 + random() % 4; piece > 0 && to < end; --piece) {
      const uint64_t size = random() % 8 == 0 ? 1 + random() % 200 : 1 + random() % 40'000;
      pieces.push_back(
          {to, static_cast<uint32_t>(std::min<uint64_t>(size, static_cast<uint64_t>(end - to))), 0});
      to += pieces.back().bytes;
      bytes += pieces.back().bytes;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    scatters[turn % count].add(kPool, random() % (kPoolBytes - bytes), pieces);
  }
  return scatters;
}

/// Several reads at once, of random shapes; half of all bytes through small pieces.
void read_everything(Reader& reader, uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::vector<std::byte> pool = expected_pool();
  for (int round = 0; round < 3; ++round) {
    std::fill(reader.destination.begin(), reader.destination.end(), kPoison);
    const std::vector<Scatter> scatters = random_scatters(reader, 7, random);
    for (size_t index = 0; index < scatters.size(); ++index) {
      ASSERT_TRUE(reader.endpoint->post_read(index, scatters[index].chunk()).ok());
    }
    ASSERT_TRUE(reader.wait(scatters.size() - 1).ok());
    for (const Scatter& scatter : scatters) expect_landed(scatter, pool);
  }
}

TEST(Tcp, LandsEveryByteWhereItBelongs) {
  LocalPair pair("tcp");
  read_everything(pair.reader, 11);
}

TEST(Tcp, LandsEveryByteOfAnotherProcess) {
  RemotePair pair("tcp");
  read_everything(pair.reader, 12);
}

TEST(Tcp, EndsPostsInOrder) {
  LocalPair pair("tcp");
  Scatter scatter;
  for (uint32_t block = 0; block < 64; ++block) {
    scatter.add(kPool, block * kBlock, {{&pair.reader.destination[block * kBlock], kBlock, 0}});
  }
  for (uint64_t token = 0; token < 20; ++token) {
    ASSERT_TRUE(pair.reader.endpoint->post_read(token, scatter.chunk()).ok());
  }
  std::vector<Completion> ended;
  while (ended.size() < 20) ASSERT_TRUE(poll_once(*pair.reader.endpoint, ended).status.ok());
  for (uint64_t token = 0; token < 20; ++token) EXPECT_EQ(ended[token].token, token);
}

TEST(Tcp, StoresWordsBeforeLaterReads) {
  RemotePair pair("tcp");
  for (uint64_t value = 1; value < 500; ++value) {
    uint64_t slot[2] = {};
    Scatter scatter;
    scatter.add(kTable, 128, {{reinterpret_cast<std::byte*>(slot), sizeof slot, 0}});
    ASSERT_TRUE(pair.reader.endpoint->post_write(1, kWords, 136, value).ok());
    ASSERT_TRUE(pair.reader.read(scatter, 2).ok());
    ASSERT_EQ(pair.owner.peer_word(136), value);
  }
}

/// A settle behind a slot read does not wake the owner, and yet arrives without anything behind it.
TEST(Tcp, DeliversASettleThatNothingFollows) {
  RemotePair pair("tcp");
  for (uint64_t value = 1; value < 20; ++value) {
    ASSERT_TRUE(pair.reader.read_at(kTable, 128, 16).ok());
    ASSERT_TRUE(pair.reader.write_word(144, value).ok());
    while (pair.owner.peer_word(144) != value) std::this_thread::yield();
    ASSERT_TRUE(pair.reader.write_word(152, value).ok());  // nor does it stay deaf
    while (pair.owner.peer_word(152) != value) std::this_thread::yield();
  }
}

TEST(Tcp, SleepsWhenThePullNeverSettles) {
  Owner owner("tcp");
  auto server = std::make_unique<Server>(*owner.transport);
  Reader reader("tcp", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  ASSERT_TRUE(reader.read_at(kTable, 128, 16).ok());
  server.reset();
  int rounds = 0;
  for (pollfd work{owner.transport->capabilities().serve_fd, POLLIN, 0};
       rounds < 100 && ::poll(&work, 1, 50) > 0; ++rounds) {
    owner.transport->serve();
  }
  EXPECT_LT(rounds, 100);
}

TEST(Tcp, SendsOnWhatTheKernelHadNoRoomFor) {
  RemotePair pair("tcp");
  Reader& reader = pair.reader;
  constexpr uint64_t kFrames = 200;  // 5 MB of requests
  std::vector<Scatter> scatters(kFrames);
  std::mt19937_64 random(6);
  for (Scatter& scatter : scatters) {
    for (uint32_t op = 0; op < tcp::kMaxFrameOps; ++op) {
      scatter.add(kPool, random() % (kPoolBytes - 8), {{&reader.destination[op * 8], 8, 0}});
    }
  }
  pair.owner.stop();
  std::vector<Completion> ended;
  for (uint64_t token = 0; token < kFrames; ++token) {
    ASSERT_TRUE(reader.endpoint->post_read(token, scatters[token].chunk()).ok());
    ASSERT_TRUE(poll_once(*reader.endpoint, ended).status.ok());
  }
  ASSERT_FALSE(poll_once(*reader.endpoint, ended).progressed) << "there was room after all";
  ::kill(pair.owner.pid(), SIGCONT);
  ASSERT_TRUE(reader.wait(kFrames - 1).ok());
  expect_landed(scatters.back(), expected_pool());
}

TEST(Tcp, LandsNothingAfterCancel) {
  Owner owner("tcp");
  std::unique_ptr<Server> server = std::make_unique<Server>(*owner.transport);
  Reader reader("tcp", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  server.reset();  // nobody answers until the cancel
  Scatter scatter;
  for (uint32_t block = 0; block < 256; ++block) {
    scatter.add(kPool, block * kBlock, {{&reader.destination[block * kBlock], kBlock, 0}});
  }
  std::vector<Completion> ended;
  for (uint64_t token = 1; token <= 3; ++token) {
    ASSERT_TRUE(reader.endpoint->post_read(token, scatter.chunk()).ok());
  }
  ASSERT_TRUE(poll_once(*reader.endpoint, ended).status.ok());
  reader.endpoint->cancel(1);
  reader.endpoint->cancel(2);
  reader.endpoint->cancel(3);
  server = std::make_unique<Server>(*owner.transport);
  uint64_t word = 1;
  Scatter last;
  last.add(kTable, 0, {{reinterpret_cast<std::byte*>(&word), sizeof word, 0}});
  EXPECT_TRUE(reader.read(last, 4).ok());  // so all earlier payload is over
  EXPECT_EQ(word, 0u);
  EXPECT_TRUE(reader.is_poisoned());
}

TEST(Tcp, LandsNothingAfterCancelInTheMiddle) {
  LocalPair pair("tcp");
  Reader& reader = pair.reader;
  Scatter scatter;
  for (uint32_t block = 0; block < kNumBlocks; ++block) {
    scatter.add(kPool, block * kBlock, {{&reader.destination[block * kBlock], kBlock, 0}});
  }
  std::vector<Completion> ended;
  int cut_short = 0;
  // By the clock: the owner may not run for a while on a loaded machine.
  const int64_t end = now_ns() + 10 * kSecondNs;
  for (int round = 0; round < 30 || (cut_short == 0 && now_ns() < end); ++round) {
    std::fill(reader.destination.begin(), reader.destination.end(), kPoison);
    ASSERT_TRUE(reader.endpoint->post_read(1, scatter.chunk()).ok());
    for (int polls = 0; polls < 200 && reader.destination[0] == kPoison; ++polls) {
      ASSERT_TRUE(poll_once(*reader.endpoint, ended).status.ok());
    }
    cut_short += reader.destination[0] != kPoison && reader.destination.back() == kPoison;
    reader.endpoint->cancel(1);
    const std::vector<std::byte> before = reader.destination;
    uint64_t word;
    Scatter last;
    last.add(kTable, 0, {{reinterpret_cast<std::byte*>(&word), sizeof word, 0}});
    ASSERT_TRUE(reader.read(last, 2).ok());
    ASSERT_EQ(std::memcmp(before.data(), reader.destination.data(), before.size()), 0);
  }
  EXPECT_GT(cut_short, 0) << "no cancel came in the middle of a payload";
}

TEST(Tcp, NoticesAnOwnerThatIsKilled) {
  RemotePair pair("tcp");
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, kBlock).ok());
  pair.owner.kill(SIGKILL);
  const Status status = pair.reader.wait_broken();
  EXPECT_EQ(status.code(), Code::kPeerUnreachable);
  EXPECT_NE(status.what().find("127.0.0.1:"), std::string::npos) << status.what();
  EXPECT_EQ(pair.reader.read_at(kPool, 0, kBlock).code(), Code::kPeerUnreachable);
}

TEST(Tcp, StopsConnectingToASilentOwnerWhenTheCallerGivesUp) {
  const UniqueFd listener = std::move(*tcp::listen_on("127.0.0.1", 0));
  const auto endpoint = tcp::make_reader(*tcp::local_address(listener.get()), 0);
  Atomic<bool> given_up{false};
  Status status;
  std::thread connecting(
      [&] { status = endpoint->establish(uninvited(), Patience(3600 * kSecondNs, given_up)); });
  pollfd waiting{listener.get(), POLLIN, 0};
  ::poll(&waiting, 1, -1);
  RawSocket accepted(UniqueFd(::accept(listener.get(), nullptr, nullptr)));
  given_up = true;
  connecting.join();
  EXPECT_EQ(status.code(), Code::kCancelled) << status.what();
}

TEST(Tcp, WaitsForAStoppedOwnerOnlyAsLongAsTheCallerWants) {
  RemotePair pair("tcp");
  Reader& reader = pair.reader;
  pair.owner.stop();
  Scatter scatter;
  scatter.add(kPool, 0, {{reader.destination.data(), kBlock, 0}});
  ASSERT_TRUE(reader.endpoint->post_read(1, scatter.chunk()).ok());
  std::vector<Completion> ended;
  ASSERT_TRUE(poll_once(*reader.endpoint, ended).progressed);  // the request left
  for (int polls = 0; polls < 100; ++polls) {
    const PollResult result = poll_once(*reader.endpoint, ended);
    ASSERT_TRUE(result.status.ok());
    ASSERT_FALSE(result.progressed);
  }
  auto late = std::move(*open_one(*reader.transport, pair.owner.card().address));
  EXPECT_EQ(late->establish(uninvited(), kSecondNs / 10).code(), Code::kPeerUnreachable);
  reader.endpoint->cancel(1);
  reader.endpoint->close();
  reader.endpoint->close();
  ::kill(pair.owner.pid(), SIGCONT);
  EXPECT_TRUE(ended.empty());
  EXPECT_TRUE(reader.is_poisoned());
}

/// A writer process recycles a block under its lease; a read that its slot vouches for never mixes two
/// contents.
TEST(Tcp, NeverTakesARecycledBlockForAGoodOne) {
  constexpr uint32_t kBytes = 256 << 10;
  constexpr int kWanted = 300;
  Owner owner("tcp");
  auto& nonce = *reinterpret_cast<std::atomic<uint64_t>*>(owner.table->range().base + 64);
  std::byte* const block = owner.pool->range().base;
  const pid_t writer = ::fork();
  if (writer == 0) {
    std::mt19937_64 random(3);
    for (uint64_t generation = 1;; ++generation) {
      nonce.store(0, std::memory_order_release);
      std::memset(block, static_cast<int>(generation & 0xff), kBytes);
      nonce.store(generation, std::memory_order_release);
      for (const int64_t until = now_ns() + static_cast<int64_t>(random() % 600'000); now_ns() < until;) {
      }
    }
  }
  Server server(*owner.transport);
  Reader reader("tcp", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  uint64_t before[2], after[2];
  Scatter slot_before, data, slot_after;
  slot_before.add(kTable, 64, {{reinterpret_cast<std::byte*>(before), sizeof before, 0}});
  data.add(kPool, 0, {{reader.destination.data(), kBytes, 0}});
  slot_after.add(kTable, 64, {{reinterpret_cast<std::byte*>(after), sizeof after, 0}});
  int good = 0, stale = 0, mixed = 0;
  for (int turn = 0; turn < 200'000 && (good < kWanted || stale < kWanted); ++turn) {
    EXPECT_TRUE(reader.endpoint->post_read(1, slot_before.chunk()).ok());
    EXPECT_TRUE(reader.endpoint->post_read(2, data.chunk()).ok());
    if (!reader.read(slot_after, 3).ok()) break;
    if (before[0] == 0 || before[0] != after[0]) {
      ++stale;
      continue;
    }
    ++good;
    const auto* bytes = reader.destination.data();
    mixed += bytes[0] != static_cast<std::byte>(after[0]) || std::memcmp(bytes, bytes + 1, kBytes - 1) != 0;
  }
  ::kill(writer, SIGKILL);
  ::waitpid(writer, nullptr, 0);
  EXPECT_GE(good, kWanted);
  EXPECT_GE(stale, kWanted);
  EXPECT_EQ(mixed, 0);
}

TEST(Tcp, GoesOverIpv6) {
  TransportOptions options;
  options.host = "::1";
  auto owner = tcp_make(options);
  if (!owner.ok()) GTEST_SKIP() << owner.status().what() << ": enable IPv6 on lo";
  std::vector<std::byte> memory(kBlock, std::byte{7}), destination(kBlock);
  auto region = (*owner)->register_memory({memory.data(), memory.size()}, Access::kRead);
  Server server(**owner);
  auto endpoint = std::move(*open_one(**owner, (*owner)->address()));
  ASSERT_TRUE(endpoint->establish(*(*owner)->accept(1, endpoint->hello()), 20 * kSecondNs).ok());
  ASSERT_TRUE(endpoint->import_region((*region)->remote_key()).ok());
  Scatter scatter;
  scatter.add(0, 0, {{destination.data(), kBlock, 0}});
  ASSERT_TRUE(endpoint->post_read(1, scatter.chunk()).ok());
  std::vector<Completion> ended;
  while (ended.empty()) ASSERT_TRUE(poll_once(*endpoint, ended).status.ok());
  EXPECT_TRUE(ended[0].status.ok());
  EXPECT_EQ(memory, destination);
}

/// A connection from one address of this host to another, the accepted end, and how it shares a queue.
struct Accepted {
  UniqueFd dialling, socket;

  std::string congestion() const {
    char name[16] = {};
    socklen_t bytes = sizeof name;
    ::getsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name, &bytes);
    return name;
  }
};

Accepted accept_from(const char* host) {
  const UniqueFd listener = std::move(*tcp::listen_on("127.0.0.1", 0));
  const tcp::Address at = std::move(*tcp::local_address(listener.get()));
  sockaddr_in from{}, to{};
  from.sin_family = to.sin_family = AF_INET;
  to.sin_port = htons(at.port);
  ::inet_pton(AF_INET, host, &from.sin_addr);
  ::inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  Accepted accepted{UniqueFd(::socket(AF_INET, SOCK_STREAM, 0)), {}};
  const int dialling = accepted.dialling.get();
  EXPECT_EQ(::bind(dialling, reinterpret_cast<const sockaddr*>(&from), sizeof from), 0);
  EXPECT_EQ(::connect(dialling, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  accepted.socket = UniqueFd(::accept(listener.get(), nullptr, nullptr));
  return accepted;
}

TEST(Tcp, PacesOnlyWhatLeavesTheAddress) {
  const Accepted inside = accept_from("127.0.0.1"), elsewhere = accept_from("127.0.0.2");
  const std::string usual = elsewhere.congestion();
  tcp::leave_unpaced_in_host(inside.socket.get());
  tcp::leave_unpaced_in_host(elsewhere.socket.get());
  EXPECT_EQ(inside.congestion(), "reno");
  EXPECT_EQ(elsewhere.congestion(), usual);
}

TEST(Tcp, ClosesTwiceAndOutlivesItsRegions) {
  auto owner = std::make_unique<Owner>("tcp");
  auto server = std::make_unique<Server>(*owner->transport);
  Reader reader("tcp", owner->card(),
                [&](const std::string& hello) { return *owner->transport->accept(1, hello); });
  server.reset();
  owner->transport->close();
  owner->transport->close();
  EXPECT_EQ(reader.wait_broken().code(), Code::kPeerUnreachable);
  const auto region = std::move(owner->pool_region);
  owner.reset();
}

}  // namespace
}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// The tcp transport between real sockets: every byte right, every refusal made, nothing late, nothing leaked.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <numeric>

#include "copy_peers.h"
#include "tcp_raw.h"
#include "tcp_reader.h"
#include "transports.h"
#include "wire.h"

namespace kvlink::testing {
namespace {

constexpr uint32_t kBlock = 16 << 10;
constexpr uint32_t kNumBlocks = kPoolBytes / kBlock;

std::string forged_key(const std::string& key, uint64_t flip, uint64_t bytes, Access access) {
  BlobReader reader(key);
  return BlobWriter().u64(reader.u64() ^ flip).u64(bytes).u32(static_cast<uint32_t>(access)).take();
}

uint64_t key_of(const std::string& key) { return BlobReader(key).u64(); }

std::vector<std::byte> expected_pool(uint64_t seed = 1) {
  std::vector<std::byte> bytes(kPoolBytes);
  fill_random({bytes.data(), bytes.size()}, seed);
  return bytes;
}

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

void expect_landed(const Scatter& scatter, const std::vector<std::byte>& pool) {
  for (const ReadOp& op : scatter.ops) {
    uint64_t offset = op.offset;
    for (uint32_t index = 0; index < op.num_segments; ++index) {
      const Segment& piece = scatter.segments[op.first_segment + index];
      ASSERT_EQ(std::memcmp(piece.local, &pool[offset], piece.bytes), 0);
      offset += piece.bytes;
    }
  }
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
  while (ended.size() < 20) ASSERT_TRUE(pair.reader.endpoint->poll(ended).status.ok());
  for (uint64_t token = 0; token < 20; ++token) EXPECT_EQ(ended[token].token, token);
}

TEST(Tcp, StoresWordsBeforeLaterReads) {
  RemotePair pair("tcp");
  for (uint64_t value = 1; value < 500; ++value) {
    uint64_t slot[2] = {};
    Scatter scatter;
    scatter.add(kTable, 128, {{reinterpret_cast<std::byte*>(slot), sizeof slot, 0}});
    ASSERT_TRUE(pair.reader.endpoint->post_write(1, kTable, 136, value).ok());
    ASSERT_TRUE(pair.reader.read(scatter, 2).ok());
    ASSERT_EQ(slot[1], value);
  }
}

TEST(Tcp, RefusesLocallyWhatNoOwnerGranted) {
  LocalPair pair("tcp");
  Endpoint& endpoint = *pair.reader.endpoint;
  EXPECT_EQ(pair.reader.read_at(kPool, kPoolBytes - 8, 16).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(kPool, UINT64_MAX - 4, 16).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(9, 0, 16).code(), Code::kAccessDenied);
  EXPECT_EQ(endpoint.post_write(1, kPool, 0, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(endpoint.post_write(1, kTable, 12, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(endpoint.post_write(1, kTable, kTableBytes, 1).code(), Code::kAccessDenied);
  Scatter short_by_one;
  short_by_one.add(kPool, 0, {{pair.reader.destination.data(), 64, 0}});
  short_by_one.ops[0].bytes = 65;
  EXPECT_EQ(pair.reader.read(short_by_one).code(), Code::kConfig);
  Scatter too_many;
  for (uint32_t op = 0; op <= tcp::kMaxFrameOps; ++op) {
    too_many.add(kPool, op * 8, {{&pair.reader.destination[op * 8], 8, 0}});
  }
  EXPECT_EQ(pair.reader.read(too_many).code(), Code::kConfig);
  EXPECT_TRUE(pair.reader.is_poisoned());
  EXPECT_TRUE(pair.reader.read_at(kPool, kPoolBytes - 16, 16).ok());
}

/// Refusals between good reads: what had landed ahead of a refusal is put where it belongs.
TEST(Tcp, OwnerRefusesForgedKeysAndServesOn) {
  LocalPair pair("tcp");
  Reader& reader = pair.reader;
  const Card card = pair.owner.card();
  const auto wrong_key =
      reader.endpoint->import_region(forged_key(card.pool_key, 1, kPoolBytes, Access::kRead));
  const auto too_long =
      reader.endpoint->import_region(forged_key(card.pool_key, 0, 2 * kPoolBytes, Access::kRead));
  const std::vector<std::byte> pool = expected_pool();
  std::mt19937_64 random(5);
  for (int round = 0; round < 50; ++round) {
    std::vector<Scatter> scatters(12);
    std::vector<Code> expected;
    for (size_t index = 0; index < scatters.size(); ++index) {
      const uint32_t bytes = random() % 3 == 0 ? 16 : 1 + random() % 100'000;
      const uint64_t kind = random() % 4;
      const uint32_t region = kind == 0 ? *wrong_key : kind == 1 ? *too_long : kPool;
      const uint64_t offset = kind == 1 ? kPoolBytes - bytes + 1 : random() % (kPoolBytes - bytes);
      scatters[index].add(region, offset, {{&reader.destination[index * 100'000], bytes, 0}});
      ASSERT_TRUE(reader.endpoint->post_read(index, scatters[index].chunk()).ok());
      expected.push_back(kind < 2 ? Code::kAccessDenied : Code::kOk);
    }
    std::vector<Completion> ended;
    while (ended.size() < scatters.size()) ASSERT_TRUE(reader.endpoint->poll(ended).status.ok());
    for (size_t index = 0; index < scatters.size(); ++index) {
      ASSERT_EQ(ended[index].token, index);
      ASSERT_EQ(ended[index].status.code(), expected[index]) << ended[index].status.what();
      if (expected[index] == Code::kOk) expect_landed(scatters[index], pool);
    }
  }
}

TEST(Tcp, OwnerCutsOffForgedWrites) {
  const struct {
    const char* what;
    bool table;
    uint64_t flip, offset;
  } forgeries[] = {{"read-only", false, 0, 0},
                   {"no such key", true, 1, 0},
                   {"outside", true, 0, kTableBytes},
                   {"half outside", true, 0, kTableBytes - 4},
                   {"overflow", true, 0, UINT64_MAX - 7},
                   {"unaligned", true, 0, 4}};
  for (const auto& forgery : forgeries) {
    Owner owner("tcp");
    Server server(*owner.transport);
    const Card card = owner.card();
    RawSocket socket(card.address);
    const auto reply = owner.transport->accept(1, tcp::encode_hello(0));
    ASSERT_EQ(socket.greet(card.address, *reply), tcp::Verdict::kAdmitted);
    const uint64_t key = key_of(forgery.table ? card.table_key : card.pool_key) ^ forgery.flip;
    socket.say(write_frame({key, forgery.offset}, 0xdead));
    EXPECT_TRUE(socket.is_closed()) << forgery.what;
    EXPECT_EQ(std::memcmp(owner.pool->range().base, expected_pool().data(), kPoolBytes), 0) << forgery.what;
    const auto* words = reinterpret_cast<const uint64_t*>(owner.table->range().base);
    EXPECT_EQ(std::accumulate(words, words + kTableBytes / 8, uint64_t{0}), 0u) << forgery.what;
  }
}

TEST(Tcp, AdmitsEachSecretOnceAndNoOther) {
  Owner owner("tcp");
  Server server(*owner.transport);
  const std::string address = owner.card().address;
  const auto open = [&] { return std::move(*owner.transport->open(address, 0)); };
  const std::string reply = *owner.transport->accept(1, tcp::encode_hello(0));
  for (size_t byte = 0; byte < reply.size(); ++byte) {
    std::string wrong = reply;
    wrong[byte] = static_cast<char>(wrong[byte] ^ 1);
    EXPECT_FALSE(open()->establish(wrong, 20 * kSecondNs).ok()) << byte;
  }
  auto first = open(), second = open();
  EXPECT_TRUE(first->establish(reply, 20 * kSecondNs).ok());
  EXPECT_EQ(second->establish(reply, 20 * kSecondNs).code(), Code::kAccessDenied);
  EXPECT_FALSE(owner.transport->accept(1, "nonsense").ok());
}

TEST(Tcp, RefusesAnOwnerThatIsAnotherProcessNow) {
  Owner owner("tcp");
  Server server(*owner.transport);
  tcp::Address address = *tcp::Address::parse(owner.card().address);
  address.instance ^= 1;
  auto endpoint = std::move(*owner.transport->open(address.encode(), 0));
  const Status status = endpoint->establish(*owner.transport->accept(1, endpoint->hello()), 20 * kSecondNs);
  EXPECT_EQ(status.code(), Code::kPeerUnreachable);
  EXPECT_NE(status.what().find("another process"), std::string::npos) << status.what();
}

TEST(Tcp, SaysThatNobodyListens) {
  std::string address;
  {
    address = Owner("tcp").card().address;
  }
  Owner owner("tcp");
  auto endpoint = std::move(*owner.transport->open(address, 0));
  const Status status = endpoint->establish(*owner.transport->accept(1, endpoint->hello()), 20 * kSecondNs);
  EXPECT_EQ(status.code(), Code::kPeerUnreachable);
  EXPECT_NE(status.what().find("127.0.0.1:"), std::string::npos) << status.what();
  std::vector<Completion> ended;
  EXPECT_EQ(endpoint->poll(ended).status.code(), Code::kPeerUnreachable);
}

TEST(Tcp, LetsReadersInPastSilentAndNoisySockets) {
  Owner owner("tcp");
  Server server(*owner.transport);
  const Card card = owner.card();
  std::vector<RawSocket> crowd;
  for (int index = 0; index < 200; ++index) {
    crowd.emplace_back(card.address);
    if (index % 3 == 1) crowd.back().say(raw(tcp::kHelloMagic));  // and then nothing
    if (index % 3 == 2) crowd.back().say("GET / HTTP/1.1\r\n\r\n");
  }
  Reader reader("tcp", card, [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  EXPECT_TRUE(reader.read_at(kPool, 0, kBlock).ok());
  EXPECT_TRUE(crowd[0].is_closed());  // silent, and the oldest
  EXPECT_TRUE(crowd[2].is_closed());
  for (int index = 190; index < 200; ++index)
    EXPECT_EQ(crowd[index].is_closed(), true) << index;  // within 5 s
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
  ASSERT_TRUE(reader.endpoint->poll(ended).status.ok());
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
  for (int round = 0; round < 30; ++round) {
    std::fill(reader.destination.begin(), reader.destination.end(), kPoison);
    ASSERT_TRUE(reader.endpoint->post_read(1, scatter.chunk()).ok());
    for (int polls = 0; polls < 200 && reader.destination[0] == kPoison; ++polls) {
      ASSERT_TRUE(reader.endpoint->poll(ended).status.ok());
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

TEST(Tcp, WaitsForAStoppedOwnerOnlyAsLongAsTheCallerWants) {
  RemotePair pair("tcp");
  Reader& reader = pair.reader;
  pair.owner.stop();
  Scatter scatter;
  scatter.add(kPool, 0, {{reader.destination.data(), kBlock, 0}});
  ASSERT_TRUE(reader.endpoint->post_read(1, scatter.chunk()).ok());
  std::vector<Completion> ended;
  ASSERT_TRUE(reader.endpoint->poll(ended).progressed);  // the request left
  for (int polls = 0; polls < 100; ++polls) {
    const PollResult result = reader.endpoint->poll(ended);
    ASSERT_TRUE(result.status.ok());
    ASSERT_FALSE(result.progressed);
  }
  auto late = std::move(*reader.transport->open(pair.owner.card().address, 1));
  EXPECT_EQ(late->establish(tcp::Invitation{}.encode(), kSecondNs / 10).code(), Code::kPeerUnreachable);
  reader.endpoint->cancel(1);
  reader.endpoint->close();
  reader.endpoint->close();
  ::kill(pair.owner.pid(), SIGCONT);
  EXPECT_TRUE(ended.empty());
  EXPECT_TRUE(reader.is_poisoned());
}

TEST(Tcp, FencesOneConnectionWhileAnotherGoesOn) {
  Owner owner("tcp");
  Server server(*owner.transport);
  const auto admit = [&](uint64_t id) {
    return [&owner, id](const std::string& hello) { return *owner.transport->accept(id, hello); };
  };
  Reader first("tcp", owner.card(), admit(1)), lane("tcp", owner.card(), admit(1));
  Reader other("tcp", owner.card(), admit(2));
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> reads = 0;
  std::thread busy([&] {
    for (; !stop; ++reads) EXPECT_TRUE(other.read_at(kPool, 0, 1 << 20).ok());
  });
  const std::string unused = *owner.transport->accept(1, first.endpoint->hello());
  EXPECT_TRUE(owner.transport->can_fence());
  EXPECT_TRUE(owner.transport->fence(1));
  EXPECT_FALSE(owner.transport->fence(1));
  EXPECT_FALSE(owner.transport->fence(3));
  EXPECT_EQ(first.wait_broken().code(), Code::kPeerUnreachable);
  EXPECT_EQ(lane.wait_broken().code(), Code::kPeerUnreachable);
  auto late = std::move(*owner.transport->open(owner.card().address, 2));
  EXPECT_EQ(late->establish(unused, 20 * kSecondNs).code(), Code::kAccessDenied);
  for (const uint64_t before = reads; reads < before + 3;) std::this_thread::yield();
  stop = true;
  busy.join();
}

/// The mapping goes away right behind the region: only a cut connection can explain what the reader sees.
TEST(Tcp, RevokesMemoryThatIsBeingSent) {
  constexpr size_t kBytes = 64 << 20, kOps = 64;
  void* mapping = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  Owner owner("tcp");
  auto lent = owner.transport->register_memory({static_cast<std::byte*>(mapping), kBytes}, Access::kRead);
  auto server = std::make_unique<Server>(*owner.transport);
  const auto admit = [&](const std::string& hello) { return *owner.transport->accept(1, hello); };
  Reader reader("tcp", owner.card(), admit), other("tcp", owner.card(), admit);
  const uint32_t region = *reader.endpoint->import_region((*lent)->remote_key());
  std::vector<std::byte> destination(kBytes / kOps);
  Scatter scatter;
  for (size_t op = 0; op < kOps; ++op) {
    scatter.add(region, op * destination.size(),
                {{destination.data(), static_cast<uint32_t>(destination.size()), 0}});
  }
  ASSERT_TRUE(reader.endpoint->post_read(1, scatter.chunk()).ok());
  std::vector<Completion> ended;
  while (destination[0] == std::byte{} && !reader.endpoint->poll(ended).progressed) {
  }
  EXPECT_TRUE(other.read_at(kPool, 0, kBlock).ok());
  (*lent).reset();
  ASSERT_EQ(::munmap(mapping, kBytes), 0);
  const Status status = reader.wait(1);
  EXPECT_EQ(status.code(), Code::kPeerUnreachable) << status.what();
  EXPECT_TRUE(other.read_at(kPool, 0, kBlock).ok());
}

TEST(Tcp, RefusesRegionsThatWereRevoked) {
  LocalPair pair("tcp");
  pair.owner.pool_region.reset();
  EXPECT_EQ(pair.reader.read_at(kPool, 0, kBlock).code(), Code::kAccessDenied);
  EXPECT_TRUE(pair.reader.read_at(kTable, 0, 64).ok());
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
  auto endpoint = std::move(*(*owner)->open((*owner)->address(), 0));
  ASSERT_TRUE(endpoint->establish(*(*owner)->accept(1, endpoint->hello()), 20 * kSecondNs).ok());
  ASSERT_TRUE(endpoint->import_region((*region)->remote_key()).ok());
  Scatter scatter;
  scatter.add(0, 0, {{destination.data(), kBlock, 0}});
  ASSERT_TRUE(endpoint->post_read(1, scatter.chunk()).ok());
  std::vector<Completion> ended;
  while (ended.empty()) ASSERT_TRUE(endpoint->poll(ended).status.ok());
  EXPECT_TRUE(ended[0].status.ok());
  EXPECT_EQ(memory, destination);
}

TEST(Tcp, RefusesHostsThatPeersCannotDial) {
  for (const char* host : {"0.0.0.0", "::", "no such host", ""}) {
    TransportOptions options;
    options.host = host;
    EXPECT_EQ(tcp_make(options).status().code(), Code::kConfig) << host;
  }
  auto first = tcp_make({});
  TransportOptions taken;
  taken.port = (*tcp::Address::parse((*first)->address())).port;
  EXPECT_EQ(tcp_make(taken).status().code(), Code::kConfig);
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

TEST(TcpInvitations, ExpireAndAreBounded) {
  tcp::Invitations invitations;
  const tcp::Invitation early = *invitations.issue(1, 0);
  EXPECT_FALSE(invitations.redeem(early, tcp::Invitations::kLifetimeNs));
  for (size_t count = 0; count < tcp::Invitations::kMaxUnused; ++count) {
    ASSERT_TRUE(invitations.issue(count, 0).ok());
  }
  EXPECT_EQ(invitations.issue(1, 1).status().code(), Code::kTransportUnavailable);
  EXPECT_TRUE(invitations.issue(1, tcp::Invitations::kLifetimeNs).ok());  // the expired ones make room
  EXPECT_TRUE(invitations.withdraw(1));
  EXPECT_FALSE(invitations.withdraw(1));
}

}  // namespace
}  // namespace kvlink::testing

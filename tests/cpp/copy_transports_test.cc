// SPDX-License-Identifier: Apache-2.0
// What loopback, shm and cma must all do, and what each does of its own.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/un.h>

#include <fstream>
#include <map>
#include <set>

#include "copy.h"
#include "copy_peers.h"
#include "shm_wire.h"

namespace kvlink::testing {
namespace {

/// Blocks in random order, every second one cut in random pieces; returns block -> place in the destination.
Scatter scattered_blocks(Reader& reader, uint32_t block_bytes, uint32_t num_blocks,
                         std::map<uint64_t, uint64_t>& places) {
  std::mt19937_64 random(block_bytes + num_blocks);
  std::vector<uint32_t> from(kPoolBytes / block_bytes), to(from.size());
  for (uint32_t i = 0; i < from.size(); ++i) from[i] = to[i] = i;
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  Scatter scatter;
  for (uint32_t i = 0; i < num_blocks; ++i) {
    std::byte* at = reader.destination.data() + uint64_t{to[i]} * block_bytes;
    std::vector<Segment> pieces;
    for (uint32_t left = block_bytes; left > 0;) {
      const uint32_t bytes = i % 2 == 0 ? left : 1 + static_cast<uint32_t>(random() % left);
      pieces.push_back({at, bytes, 0});
      at += bytes;
      left -= bytes;
    }
    scatter.add(kPool, uint64_t{from[i]} * block_bytes, pieces);
    places[uint64_t{from[i]} * block_bytes] = uint64_t{to[i]} * block_bytes;
  }
  return scatter;
}

/// Every byte: the blocks where they belong, poison everywhere else.
void expect_landed(const Reader& reader, const std::byte* pool, uint32_t block_bytes,
                   const std::map<uint64_t, uint64_t>& places) {
  std::vector<std::byte> expected(reader.destination.size(), kPoison);
  for (const auto& [from, to] : places) std::memcpy(expected.data() + to, pool + from, block_bytes);
  EXPECT_TRUE(reader.destination == expected);
}

/// The pool of every Owner with the default seed.
const std::byte* expected_pool() {
  static const auto pool = [] {
    auto memory = allocate(kPoolBytes);
    fill_random(memory->range(), 1);
    return memory;
  }();
  return pool->range().base;
}

class CopyTransport : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, CopyTransport, ::testing::Values("loopback", "shm", "cma"),
                         [](const auto& param) { return std::string(param.param); });

class RemoteCopyTransport : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, RemoteCopyTransport, ::testing::Values("shm", "cma"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(CopyTransport, ReadsEveryByteOfScatteredBlocks) {
  for (const auto& [block_bytes, num_blocks] : std::vector<std::pair<uint32_t, uint32_t>>{{24, 1},
                                                                                          {64, 16},
                                                                                          {576, 700},
                                                                                          {1000, 3},
                                                                                          {4096, 1},
                                                                                          {4096, 900},
                                                                                          {16384, 1},
                                                                                          {16384, 8},
                                                                                          {16384, 200},
                                                                                          {65536, 100},
                                                                                          {1 << 20, 6},
                                                                                          {5 << 20, 1}}) {
    LocalPair pair(GetParam());
    std::map<uint64_t, uint64_t> places;
    const Scatter scatter = scattered_blocks(pair.reader, block_bytes, num_blocks, places);
    const Status status = pair.reader.read(scatter);
    ASSERT_TRUE(status.ok()) << status.what();
    expect_landed(pair.reader, pair.owner.pool->range().base, block_bytes, places);
  }
}

TEST_P(RemoteCopyTransport, ReadsEveryByteOfAnotherProcess) {
  RemotePair pair(GetParam());
  std::map<uint64_t, uint64_t> places;
  const Scatter scatter = scattered_blocks(pair.reader, 16384, 300, places);
  const Status status = pair.reader.read(scatter);
  ASSERT_TRUE(status.ok()) << status.what();
  expect_landed(pair.reader, expected_pool(), 16384, places);
}

TEST_P(CopyTransport, CompletesInOrderOfPosts) {
  LocalPair pair(GetParam());
  std::vector<Scatter> scatters(20);
  for (uint32_t i = 0; i < scatters.size(); ++i) {
    const uint32_t bytes = i % 3 == 0 ? 700'000 : 64;
    scatters[i].add(kPool, 0, {{pair.reader.destination.data(), bytes, 0}});
    ASSERT_TRUE(pair.reader.endpoint->post_read(i, scatters[i].chunk()).ok());
  }
  std::vector<Completion> ended;
  while (ended.size() < scatters.size()) ASSERT_TRUE(pair.reader.endpoint->poll(ended).status.ok());
  for (uint32_t i = 0; i < scatters.size(); ++i) EXPECT_EQ(ended[i].token, i);
}

TEST_P(CopyTransport, WritesWordsIntoTheTable) {
  LocalPair pair(GetParam());
  ASSERT_TRUE(pair.reader.write_word(128, 0x0123'4567'89ab'cdef).ok());
  ASSERT_TRUE(pair.reader.read_at(kTable, 128, 64).ok());
  uint64_t here, there;
  std::memcpy(&here, pair.reader.destination.data(), sizeof here);
  std::memcpy(&there, pair.owner.table->range().base + 128, sizeof there);
  EXPECT_EQ(here, 0x0123'4567'89ab'cdef);
  EXPECT_EQ(there, 0x0123'4567'89ab'cdef);
}

TEST_P(RemoteCopyTransport, WritesWordsIntoAnotherProcess) {
  RemotePair pair(GetParam());
  ASSERT_TRUE(pair.reader.write_word(512, 77).ok());
  EXPECT_EQ(pair.owner.table_word(512), 77);
}

TEST_P(CopyTransport, RefusesWhatLeavesTheRegion) {
  LocalPair pair(GetParam());
  EXPECT_EQ(pair.reader.read_at(kPool, kPoolBytes, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(kPool, kPoolBytes - 63, 64).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(kPool, UINT64_MAX - 10, 64).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(2, 0, 64).code(), Code::kAccessDenied);
  EXPECT_TRUE(pair.reader.is_poisoned());
  EXPECT_EQ(pair.reader.write_word(kTableBytes, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.write_word(kTableBytes - 4, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.write_word(UINT64_MAX - 3, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.write_word(4, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.endpoint->post_write(1, kPool, 0, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.endpoint->post_write(1, 2, 0, 1).code(), Code::kAccessDenied);
  EXPECT_TRUE(pair.reader.read_at(kPool, kPoolBytes - 64, 64).ok());
}

TEST_P(CopyTransport, RefusesSegmentsThatDoNotAddUp) {
  LocalPair pair(GetParam());
  Scatter scatter;
  scatter.add(kPool, 0,
              {{pair.reader.destination.data(), 100, 0}, {pair.reader.destination.data() + 200, 28, 0}});
  scatter.ops[0].bytes = 129;
  EXPECT_EQ(pair.reader.read(scatter).code(), Code::kConfig);
  scatter.ops[0].bytes = 127;
  EXPECT_EQ(pair.reader.read(scatter).code(), Code::kConfig);
  scatter.ops[0].num_segments = 0;
  EXPECT_EQ(pair.reader.read(scatter).code(), Code::kConfig);
  EXPECT_EQ(pair.reader.read(Scatter{}).code(), Code::kConfig);
  EXPECT_TRUE(pair.reader.is_poisoned());
}

TEST_P(CopyTransport, LandsNothingAfterCancel) {
  LocalPair pair(GetParam());
  Scatter large, small;
  large.add(kPool, 0, {{pair.reader.destination.data(), 5 << 20, 0}});
  small.add(kPool, 0, {{pair.reader.destination.data() + (6 << 20), 4096, 0}});
  ASSERT_TRUE(pair.reader.endpoint->post_read(1, large.chunk()).ok());
  ASSERT_TRUE(pair.reader.endpoint->post_read(2, small.chunk()).ok());
  std::vector<Completion> ended;
  ASSERT_TRUE(pair.reader.endpoint->poll(ended).progressed);
  ASSERT_TRUE(ended.empty()) << "the test means to cancel in the middle";
  pair.reader.endpoint->cancel(1);
  std::fill(pair.reader.destination.begin(), pair.reader.destination.end(), kPoison);
  ASSERT_TRUE(pair.reader.wait(2).ok());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(pair.reader.endpoint->poll(ended).status.ok());
  EXPECT_TRUE(ended.empty());
  EXPECT_TRUE(std::all_of(pair.reader.destination.begin(), pair.reader.destination.begin() + (5 << 20),
                          [](std::byte byte) { return byte == kPoison; }));
  pair.reader.endpoint->cancel(99);
}

TEST_P(CopyTransport, LandsNothingAfterClose) {
  LocalPair pair(GetParam());
  Scatter large;
  large.add(kPool, 0, {{pair.reader.destination.data(), 5 << 20, 0}});
  ASSERT_TRUE(pair.reader.endpoint->post_read(1, large.chunk()).ok());
  pair.reader.endpoint->close();
  pair.reader.endpoint->close();
  std::vector<Completion> ended;
  EXPECT_EQ(pair.reader.endpoint->poll(ended).status.code(), Code::kPeerUnreachable);
  EXPECT_EQ(pair.reader.endpoint->post_read(2, large.chunk()).code(), Code::kPeerUnreachable);
  EXPECT_TRUE(ended.empty());
  EXPECT_TRUE(pair.reader.is_poisoned());
}

// The slot of a lease: the words that a reader sees must be values that were stored.
TEST_P(CopyTransport, LoadsWordsWholeWhileTheOwnerStores) {
  LocalPair pair(GetParam());
  std::byte* const slot = pair.owner.table->range().base + 64;
  std::atomic<bool> stop{false};
  std::thread storing([&] {
    for (uint64_t i = 0; !stop; ++i) store_word(slot, (i & 1) != 0 ? UINT64_MAX : 0);
  });
  for (int i = 0; i < 2000; ++i) {
    const Status status = pair.reader.read_at(kTable, 64, 64);
    ASSERT_TRUE(status.ok()) << status.what();
    uint64_t word;
    std::memcpy(&word, pair.reader.destination.data(), sizeof word);
    ASSERT_TRUE(word == 0 || word == UINT64_MAX) << word;
  }
  stop = true;
  storing.join();
}

// The writer's side of a lease, in small: while the nonce stands, the block holds only its own generation.
TEST_P(CopyTransport, NeverTakesARecycledBlockForAGoodOne) {
  constexpr uint32_t kBlockBytes = 32 << 10;
  LocalPair pair(GetParam());
  std::byte* const slot = pair.owner.table->range().base + 64;
  auto* const block = reinterpret_cast<uint64_t*>(pair.owner.pool->range().base);
  std::atomic<bool> stop{false};
  const auto fill = [&](uint64_t generation) {
    for (uint32_t i = 0; i < kBlockBytes / 8; ++i) __atomic_store_n(block + i, generation, __ATOMIC_RELAXED);
  };
  fill(1);
  store_word(slot, 1);
  std::thread recycling([&] {
    for (uint64_t generation = 2; !stop; ++generation) {
      store_word(slot, 0);
      std::atomic_ref(*reinterpret_cast<uint64_t*>(slot))
          .exchange(0);  // a full barrier: the store before the refill
      fill(generation);
      store_word(slot, generation);
      for (int i = 0; i < 2000; ++i) __builtin_ia32_pause();
    }
  });
  int num_valid = 0;
  for (int i = 0; i < 3000; ++i) {
    uint64_t before, after;
    ASSERT_TRUE(pair.reader.read_at(kTable, 64, 64).ok());
    std::memcpy(&before, pair.reader.destination.data(), sizeof before);
    ASSERT_TRUE(pair.reader.read_at(kPool, 0, kBlockBytes).ok());
    std::vector<uint64_t> words(kBlockBytes / 8);
    std::memcpy(words.data(), pair.reader.destination.data(), kBlockBytes);
    ASSERT_TRUE(pair.reader.read_at(kTable, 64, 64).ok());
    std::memcpy(&after, pair.reader.destination.data(), sizeof after);
    if (before == 0 || before != after) continue;
    ++num_valid;
    for (const uint64_t word : words) ASSERT_EQ(word, before);
  }
  stop = true;
  recycling.join();
  EXPECT_GT(num_valid, 0);
}

TEST_P(RemoteCopyTransport, NoticesAnOwnerThatIsKilled) {
  RemotePair pair(GetParam());
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, 4096).ok());
  const int wake_fd = pair.reader.endpoint->wake_fd();
  pollfd wake{wake_fd, POLLIN, 0};
  ASSERT_GE(wake_fd, 0);
  EXPECT_EQ(::poll(&wake, 1, 0), 0);
  pair.owner.kill(SIGKILL);
  EXPECT_EQ(::poll(&wake, 1, 20'000), 1);
  EXPECT_EQ(pair.reader.wait_broken().code(), Code::kPeerUnreachable);
  EXPECT_EQ(pair.reader.read_at(kPool, 0, 4096).code(), Code::kPeerUnreachable);
  pair.reader.endpoint->close();
}

TEST_P(RemoteCopyTransport, NoticesAnOwnerThatIsKilledAmidReads) {
  RemotePair pair(GetParam());
  Scatter large;
  large.add(kPool, 0, {{pair.reader.destination.data(), 8 << 20, 0}});
  std::thread killer([&] { pair.owner.kill(SIGKILL); });
  Status status;
  for (const int64_t deadline = now_ns() + 20 * kSecondNs; status.ok() && now_ns() < deadline;) {
    status = pair.reader.read(large);
  }
  killer.join();
  EXPECT_EQ(status.code(), Code::kPeerUnreachable) << status.what();
}

TEST_P(CopyTransport, NoticesAnOwnerThatCloses) {
  LocalPair pair(GetParam());
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, 4096).ok());
  pair.owner.transport->close();
  EXPECT_EQ(pair.reader.wait_broken().code(), Code::kPeerUnreachable);
}

TEST_P(RemoteCopyTransport, ReadsFromAStoppedOwner) {
  RemotePair pair(GetParam());
  pair.owner.stop();
  ASSERT_TRUE(pair.reader.read_at(kPool, 4096, 1 << 20).ok());
  EXPECT_EQ(std::memcmp(pair.reader.destination.data(), expected_pool() + 4096, 1 << 20), 0);
}

TEST_P(CopyTransport, RefusesMalformedBlobs) {
  LocalPair pair(GetParam());
  const Card card = pair.owner.card();
  auto opened = pair.reader.transport->open(card.address, 0);
  ASSERT_TRUE(opened.ok());
  const std::string hello = (*opened)->hello();
  const std::string reply = pair.accept(hello);
  const auto spoilt = [](const std::string& blob) {
    std::vector<std::string> all{"", blob + "x"};
    for (size_t i = 0; i < blob.size(); ++i) all.push_back(blob.substr(0, i));
    std::string other_magic = blob;
    other_magic[0] ^= 1;
    all.push_back(other_magic);
    return all;
  };
  for (const auto& blob : spoilt(card.address)) {
    EXPECT_EQ(pair.reader.transport->open(blob, 0).status().code(), Code::kTransportUnavailable);
  }
  for (const auto& blob : spoilt(hello)) EXPECT_FALSE(pair.owner.transport->accept(1, blob).ok());
  for (const auto& blob : spoilt(reply)) EXPECT_FALSE((*opened)->establish(blob, kSecondNs).ok());
  for (const auto& blob : spoilt(card.pool_key)) EXPECT_FALSE(pair.reader.endpoint->import_region(blob).ok());
}

TEST_P(CopyTransport, SurvivesRandomBlobs) {
  LocalPair pair(GetParam());
  const Card card = pair.owner.card();
  std::mt19937_64 random(3);
  for (int i = 0; i < 3000; ++i) {
    std::string address = card.address, key = card.pool_key;
    for (std::string* blob : {&address, &key})
      (*blob)[random() % blob->size()] ^= static_cast<char>(1 + random() % 255);
    if (auto opened = pair.reader.transport->open(address, 0); opened.ok()) (*opened)->close();
    if (GetParam() != std::string("cma")) (void)pair.reader.endpoint->import_region(key).ok();
  }
}

TEST_P(CopyTransport, ProbesWell) {
  const TransportInfo* const info = find_transport(GetParam());
  ASSERT_NE(info, nullptr);
  EXPECT_TRUE(info->probe().ok());
  EXPECT_NE(find_transport("fault+" + std::string(GetParam())), nullptr);
}

TEST(Transports, AreFoundByName) {
  std::set<std::string> names;
  for (const TransportInfo& info : transports()) names.insert(info.name);
  EXPECT_EQ(names, (std::set<std::string>{"loopback", "shm", "cma", "tcp"}));
  EXPECT_EQ(find_transport("fault"), nullptr);
  EXPECT_EQ(find_transport("fault+fault+shm"), nullptr);
  EXPECT_EQ(make_transport("smh", {}).status().code(), Code::kConfig);
}

TEST(Loopback, RevokesDestroyedRegions) {
  LocalPair pair("loopback");
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, 64).ok());
  pair.owner.pool_region.reset();
  pair.owner.pool.reset();
  EXPECT_EQ(pair.reader.read_at(kPool, 0, 64).code(), Code::kAccessDenied);
  EXPECT_TRUE(pair.reader.read_at(kTable, 0, 64).ok());
  EXPECT_FALSE(pair.reader.endpoint->import_region(LocalPair("loopback").owner.card().address).ok());
}

TEST(Loopback, RevokesUnderAReadInProgress) {
  for (int i = 0; i < 50; ++i) {
    LocalPair pair("loopback");
    std::thread revoking([&] {
      pair.owner.pool_region.reset();
      pair.owner.pool.reset();
    });
    Status status;
    while (status.ok()) status = pair.reader.read_at(kPool, 0, 4 << 20);
    revoking.join();
    ASSERT_EQ(status.code(), Code::kAccessDenied);
  }
}

TEST(Loopback, FencesOneConnection) {
  LocalPair pair("loopback");
  Reader other("loopback", pair.owner.card(),
               [&](const std::string& hello) { return *pair.owner.transport->accept(43, hello); });
  EXPECT_TRUE(pair.owner.transport->can_fence());
  EXPECT_FALSE(pair.owner.transport->fence(41));
  EXPECT_TRUE(pair.owner.transport->fence(42));
  EXPECT_EQ(pair.reader.read_at(kPool, 0, 64).code(), Code::kPeerUnreachable);
  EXPECT_TRUE(other.read_at(kPool, 0, 64).ok());
}

TEST(Loopback, RefusesOtherProcesses) {
  RemoteOwner owner("loopback");
  auto transport = make_transport("loopback", {});
  const Status status = (*transport)->open(owner.card().address, 0).status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_FALSE(status.fix().empty());
}

TEST(Shm, RefusesMemoryOfOthers) {
  auto transport = make_transport("shm", {});
  std::vector<std::byte> memory(4096);
  const Status status = (*transport)->register_memory({memory.data(), 4096, -1, 0}, Access::kRead).status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_NE(status.fix().find("BlockPool.allocate"), std::string::npos);
  const int unsealed = ::memfd_create("unsealed", MFD_CLOEXEC);
  EXPECT_FALSE((*transport)->register_memory({memory.data(), 4096, unsealed, 0}, Access::kRead).ok());
  ::close(unsealed);
}

TEST(Shm, LendsPartsThatDoNotStartOnAPage) {
  Owner owner("shm");
  Server server(*owner.transport);
  MemoryRange part = owner.pool->range();
  part.base += 5000;
  part.memfd_offset += 5000;
  part.bytes = 70'000;
  auto region = owner.transport->register_memory(part, Access::kRead);
  ASSERT_TRUE(region.ok());
  Reader reader("shm", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  auto index = reader.endpoint->import_region((*region)->remote_key());
  ASSERT_TRUE(index.ok()) << index.status().what();
  ASSERT_TRUE(reader.read_at(*index, 1, 69'999).ok());
  EXPECT_EQ(std::memcmp(reader.destination.data(), part.base + 1, 69'999), 0);
  EXPECT_EQ(reader.read_at(*index, 1, 70'000).code(), Code::kAccessDenied);
}

TEST(Shm, LendsManyRegions) {
  Owner owner("shm");
  Server server(*owner.transport);
  std::vector<std::unique_ptr<MemoryRegion>> regions;
  for (uint64_t i = 0; i < 300; ++i) {
    MemoryRange part = owner.pool->range();
    part.base += i * 4096;
    part.memfd_offset = i * 4096;
    part.bytes = 4096;
    regions.push_back(std::move(*owner.transport->register_memory(part, Access::kRead)));
  }
  Reader reader("shm", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  for (uint64_t i = 0; i < regions.size(); ++i) {
    auto index = reader.endpoint->import_region(regions[i]->remote_key());
    ASSERT_TRUE(index.ok()) << index.status().what();
    ASSERT_TRUE(reader.read_at(*index, 0, 4096).ok());
    ASSERT_EQ(std::memcmp(reader.destination.data(), owner.pool->range().base + i * 4096, 4096), 0);
  }
}

TEST(Shm, GivesPoolsReadOnly) {
  LocalPair pair("shm");
  std::ifstream maps("/proc/self/maps");
  int num_read_only = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:kvlink") != std::string::npos && line.find(" r--s ") != std::string::npos)
      ++num_read_only;
  }
  EXPECT_EQ(num_read_only,
            1);  // the reader's mapping of the pool; the owner's own and the tables are writable
}

TEST(Shm, AdmitsEachInvitationOnce) {
  LocalPair pair("shm");
  const Card card = pair.owner.card();
  auto first = pair.reader.transport->open(card.address, 0);
  auto second = pair.reader.transport->open(card.address, 0);
  const std::string reply = pair.accept((*first)->hello());
  EXPECT_TRUE((*first)->establish(reply, kSecondNs).ok());
  EXPECT_EQ((*second)->establish(reply, kSecondNs).code(), Code::kAccessDenied);
  std::string guessed = pair.accept((*second)->hello());
  guessed.back() ^= 1;
  EXPECT_EQ((*second)->establish(guessed, kSecondNs).code(), Code::kAccessDenied);
}

int connect_raw(const Card& card) {
  const std::string name = ShmAddress::parse(card.address)->socket;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  for (int tries = 0; tries < 2000; ++tries) {
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), size) == 0) break;
    ::usleep(1000);
  }
  return fd;
}

TEST(Shm, ServesReadersDespiteSilentAndNoisyClients) {
  LocalPair pair("shm");
  std::vector<int> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(connect_raw(pair.owner.card()));
    if (i % 3 == 0) ::send(strangers.back(), "noise", 5, MSG_NOSIGNAL);
  }
  Reader reader("shm", pair.owner.card(), [&](const std::string& hello) { return pair.accept(hello); });
  EXPECT_TRUE(reader.read_at(kPool, 0, 4096).ok());
  for (const int fd : strangers) ::close(fd);
}

TEST(Shm, TimesOutOnAStoppedOwner) {
  RemoteOwner owner("shm");
  auto transport = make_transport("shm", {});
  auto endpoint = (*transport)->open(owner.card().address, 0);
  const std::string reply = owner.accept(1, (*endpoint)->hello());
  owner.stop();
  EXPECT_EQ((*endpoint)->establish(reply, kSecondNs / 10).code(), Code::kTimeout);
}

TEST(Shm, RefusesAnOwnerThatHasEnded) {
  RemoteOwner owner("shm");
  auto transport = make_transport("shm", {});
  auto endpoint = (*transport)->open(owner.card().address, 0);
  const std::string reply = owner.accept(1, (*endpoint)->hello());
  owner.kill(SIGKILL);
  EXPECT_EQ((*endpoint)->establish(reply, kSecondNs).code(), Code::kPeerUnreachable);
}

/// A process that lives as long as this object and does nothing but hold what it inherited.
void fork_idle_child() {
  const pid_t parent = ::getpid();
  if (::fork() != 0) return;
  ::prctl(PR_SET_PDEATHSIG, 0);
  while (::getppid() == parent) ::usleep(10'000);
  ::usleep(3'000'000);
  ::_exit(0);
}

TEST(Shm, NoticesAnOwnerWhoseChildLivesOn) {
  Owner here("shm");
  std::array<int, 2> ends;
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    Owner owner("shm");
    const Card card = owner.card();
    auto reply = owner.transport->accept(1, BlobWriter().u32(kShmMagic).take());
    for (const auto& blob : {card.address, card.pool_key, card.table_key, *reply}) {
      (void)!::write(ends[1], blob.data(), blob.size());
    }
    for (int i = 0;; ++i) {
      pollfd work{owner.transport->serve_fd(), POLLIN, 0};
      ::poll(&work, 1, 10);
      owner.transport->serve();
      char byte;
      if (::recv(ends[1], &byte, 1, MSG_DONTWAIT) == 1) break;
    }
    fork_idle_child();  // holds the socket
    (void)!::write(ends[1], "f", 1);
    ::pause();
  }
  const auto hear = [&] {
    std::array<char, 512> bytes;
    return std::string(bytes.data(), static_cast<size_t>(::read(ends[0], bytes.data(), bytes.size())));
  };
  const Card card{hear(), hear(), hear()};
  const std::string reply = hear();
  Reader reader("shm", card, [&](const std::string&) { return reply; });
  ASSERT_TRUE(reader.read_at(kPool, 0, 4096).ok());
  (void)!::write(ends[0], "x", 1);
  hear();
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const int64_t killed_ns = now_ns();
  EXPECT_EQ(reader.wait_broken().code(), Code::kPeerUnreachable);
  EXPECT_LT(now_ns() - killed_ns, 3 * kSecondNs) << "only the socket told";
  ::close(ends[0]);
  ::close(ends[1]);
}

void become_nobody() {
  if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(9);
}

/// Runs `body` in a child and returns what it says.
std::string said_in_child(const std::function<std::string()>& body) {
  std::array<int, 2> pipe;
  EXPECT_EQ(::pipe(pipe.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string said = body();
    (void)!::write(pipe[1], said.data(), said.size());
    ::_exit(0);
  }
  ::close(pipe[1]);
  std::array<char, 1024> bytes;
  const ssize_t size = ::read(pipe[0], bytes.data(), bytes.size());
  ::close(pipe[0]);
  ::waitpid(child, nullptr, 0);
  return {bytes.data(), static_cast<size_t>(std::max<ssize_t>(size, 0))};
}

std::string why_not(const std::string& transport_name, const Card& card) {
  auto transport = make_transport(transport_name, {});
  const Status status = (*transport)->open(card.address, 0).status();
  return status.code() == Code::kTransportUnavailable && !status.fix().empty() ? status.what()
                                                                               : "not refused";
}

TEST(Cma, SaysThatTheUserDiffers) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user: run as root";
  RemoteOwner owner("cma");
  const std::string said = said_in_child([&] {
    become_nobody();
    return why_not("cma", owner.card());
  });
  EXPECT_NE(said.find("runs as uid 0, this process as uid 65534"), std::string::npos) << said;
}

TEST(Cma, SaysThatTheOwnerIsNotDumpable) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user: run as root";
  RemoteOwner owner("cma", [] {
    become_nobody();
    ::prctl(PR_SET_DUMPABLE, 0);
  });
  const std::string said = said_in_child([&] {
    become_nobody();
    return why_not("cma", owner.card());
  });
  const bool told = said.find("not dumpable") != std::string::npos || said.find("yama") != std::string::npos;
  EXPECT_TRUE(told) << said;
}

TEST(Cma, RefusesAnOwnerThatHasEndedOrClosed) {
  auto transport = make_transport("cma", {});
  RemoteOwner ended("cma"), closed("cma");
  ended.kill(SIGKILL);
  closed.close_transport();
  EXPECT_EQ((*transport)->open(ended.card().address, 0).status().code(), Code::kPeerUnreachable);
  EXPECT_EQ((*transport)->open(closed.card().address, 0).status().code(), Code::kPeerUnreachable);
}

TEST(Cma, DeniesMemoryThatIsNotThere) {
  Owner owner("cma");
  void* const hole = ::mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto region =
      owner.transport->register_memory({static_cast<std::byte*>(hole), 1 << 20, -1, 0}, Access::kRead);
  Reader reader("cma", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  auto index = reader.endpoint->import_region((*region)->remote_key());
  ASSERT_TRUE(index.ok());
  EXPECT_EQ(reader.read_at(*index, 0, 4096).code(), Code::kAccessDenied);
  EXPECT_EQ(reader.read_at(*index, 0, 64).code(), Code::kAccessDenied);
  EXPECT_TRUE(reader.is_poisoned());
  EXPECT_TRUE(reader.read_at(kPool, 0, 4096).ok()) << "one denied read must not break the endpoint";
  ::munmap(hole, 1 << 20);
}

TEST(HostMemory, IsZeroAndSealed) {
  auto memory = allocate(3 << 20);
  const MemoryRange range = memory->range();
  EXPECT_TRUE(
      std::all_of(range.base, range.base + range.bytes, [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_NE(::ftruncate(range.memfd, 4096), 0);
  EXPECT_NE(::ftruncate(range.memfd, 4 << 20), 0);
}

TEST(HostMemory, SaysWhatItCouldNotAllocate) {
  EXPECT_EQ(HostMemory::allocate(0, true).status().code(), Code::kConfig);
  const Status status = HostMemory::allocate(uint64_t{1} << 50, false).status();
  EXPECT_EQ(status.code(), Code::kConfig);
  EXPECT_NE(status.what().find("1125899906842624 bytes"), std::string::npos) << status.what();
  EXPECT_NE(status.what().find("available"), std::string::npos);
}

TEST(StreamCopy, CopiesEverySizeAndAlignment) {
  std::mt19937_64 random(5);
  std::vector<std::byte> from(1 << 18), to(1 << 18);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  for (int round = 0; round < 300; ++round) {
    std::fill(to.begin(), to.end(), kPoison);
    std::vector<std::byte> expected = to;
    StreamCopy copy;
    for (size_t at = random() % 70; at < to.size();) {
      const size_t bytes = std::min<size_t>(random() % (round % 2 == 0 ? 300 : 20'000), to.size() - at);
      const size_t source = random() % (from.size() - bytes + 1);
      copy.add(to.data() + at, from.data() + source, bytes);
      std::copy_n(from.begin() + static_cast<ptrdiff_t>(source), bytes,
                  expected.begin() + static_cast<ptrdiff_t>(at));
      at += bytes + random() % 3;
    }
    copy.finish();
    ASSERT_TRUE(to == expected);
  }
}

}  // namespace
}  // namespace kvlink::testing

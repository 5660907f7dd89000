// SPDX-License-Identifier: Apache-2.0
// What loopback, shm, cma and the toy must all do. What each does of its own is in its own test.
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <stop_token>

#include "cpp/transports/copy_peers.h"
#include "memory/streaming_copy.h"

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

class CopyTransport : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, CopyTransport, ::testing::Values("loopback", "shm", "cma", "toy"),
                         [](const auto& param) { return std::string(param.param); });

class RemoteCopyTransport : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, RemoteCopyTransport, ::testing::Values("shm", "cma", "toy"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(CopyTransport, ReadsEveryByteOfScatteredBlocks) {
  LocalPair pair(GetParam());
  const std::vector<std::pair<uint32_t, uint32_t>> shapes{
      {24, 1},    {64, 16},   {136, 900},   {576, 700},   {1000, 3},    {4096, 1},   {4096, 900},
      {16384, 1}, {16384, 8}, {16384, 200}, {65536, 100}, {1 << 20, 6}, {5 << 20, 1}};
  for (const auto& [block_bytes, num_blocks] : shapes) {
    pair.reader.poison();
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
  expect_landed(pair.reader, expected_pool().data(), 16384, places);
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
  while (ended.size() < scatters.size()) ASSERT_TRUE(poll_once(*pair.reader.endpoint, ended).status.ok());
  for (uint32_t i = 0; i < scatters.size(); ++i) EXPECT_EQ(ended[i].token, i);
}

TEST_P(CopyTransport, ReadsLeaseSlotsAndWritesPeerWordsAlone) {
  LocalPair pair(GetParam());
  const uint64_t word = 0x0123'4567'89ab'cdef;
  std::memcpy(pair.owner.table->range().base + 128, &word, sizeof word);
  ASSERT_TRUE(pair.reader.write_word(64, word).ok());
  ASSERT_TRUE(pair.reader.read_at(kTable, 128, 64).ok());
  EXPECT_EQ(std::memcmp(pair.reader.destination.data(), &word, sizeof word), 0);
  EXPECT_EQ(std::memcmp(pair.owner.words->range().base + 64, &word, sizeof word), 0);
  EXPECT_EQ(pair.reader.endpoint->post_write(1, kTable, 128, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(kWords, 64, 8).code(), Code::kAccessDenied);
}

TEST_P(RemoteCopyTransport, WritesWordsIntoAnotherProcess) {
  RemotePair pair(GetParam());
  ASSERT_TRUE(pair.reader.write_word(512, 77).ok());
  EXPECT_EQ(pair.owner.peer_word(512), 77);
}

TEST_P(CopyTransport, RefusesWhatLeavesTheRegion) {
  LocalPair pair(GetParam());
  EXPECT_EQ(pair.reader.read_at(kPool, kPoolBytes, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(kPool, kPoolBytes - 63, 64).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(kPool, UINT64_MAX - 10, 64).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(3, 0, 64).code(), Code::kAccessDenied);
  EXPECT_TRUE(pair.reader.is_poisoned());
  EXPECT_EQ(pair.reader.write_word(kTableBytes, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.write_word(kTableBytes - 4, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.write_word(UINT64_MAX - 3, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.write_word(4, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.endpoint->post_write(1, kPool, 0, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.endpoint->post_write(1, 3, 0, 1).code(), Code::kAccessDenied);
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
  ASSERT_TRUE(poll_once(*pair.reader.endpoint, ended).progressed);
  ASSERT_TRUE(ended.empty()) << "the test means to cancel in the middle";
  pair.reader.endpoint->cancel(1);
  pair.reader.poison();
  ASSERT_TRUE(pair.reader.wait(2).ok());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(poll_once(*pair.reader.endpoint, ended).status.ok());
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
  EXPECT_EQ(poll_once(*pair.reader.endpoint, ended).status.code(), Code::kPeerUnreachable);
  EXPECT_EQ(pair.reader.endpoint->post_read(2, large.chunk()).code(), Code::kPeerUnreachable);
  EXPECT_TRUE(ended.empty());
  EXPECT_TRUE(pair.reader.is_poisoned());
}

// The slot of a lease: the words that a reader sees must be values that were stored.
TEST_P(CopyTransport, LoadsWordsWholeWhileTheOwnerStores) {
  LocalPair pair(GetParam());
  std::byte* const slot = pair.owner.table->range().base + 64;
  std::jthread storing([&](std::stop_token stop) {
    for (uint64_t i = 0; !stop.stop_requested(); ++i) store_word(slot, (i & 1) != 0 ? UINT64_MAX : 0);
  });
  for (int i = 0; i < 2000; ++i) {
    const Status status = pair.reader.read_at(kTable, 64, 64);
    ASSERT_TRUE(status.ok()) << status.what();
    uint64_t word;
    std::memcpy(&word, pair.reader.destination.data(), sizeof word);
    ASSERT_TRUE(word == 0 || word == UINT64_MAX) << word;
  }
}

/// An owner that keeps giving one block to the next lease: nonce 0, refill, next nonce; all words of a
/// generation alike.
class Recycler {
 public:
  Recycler(std::byte* slot, std::byte* block, uint32_t block_bytes)
      : slot_(reinterpret_cast<uint64_t*>(slot)),
        block_(reinterpret_cast<uint64_t*>(block), block_bytes / sizeof(uint64_t)),
        thread_([this](std::stop_token stop) { run(stop); }) {}

 private:
  void run(std::stop_token stop) {
    for (uint64_t generation = 1; !stop.stop_requested(); ++generation) {
      __atomic_exchange_n(slot_, 0, __ATOMIC_SEQ_CST);  // the end of the lease comes before the refill
      for (uint64_t& word : block_) __atomic_store_n(&word, generation, __ATOMIC_RELAXED);
      __atomic_store_n(slot_, generation, __ATOMIC_RELEASE);
      std::this_thread::sleep_for(std::chrono::microseconds(generation * 37 % 200));
    }
  }
  uint64_t* slot_;
  std::span<uint64_t> block_;
  std::jthread thread_;
};

TEST_P(CopyTransport, NeverTakesARecycledBlockForAGoodOne) {
  constexpr uint64_t kSlotOffset = 64, kBefore = 1 << 20, kAfter = 2 << 20;
  for (const uint32_t block_bytes : {16u << 10, 256u << 10}) {
    LocalPair pair(GetParam());
    Reader& reader = pair.reader;
    const auto word = [&](uint64_t at) {
      uint64_t value;
      std::memcpy(&value, reader.destination.data() + at, sizeof value);
      return value;
    };
    Scatter before, data, after;
    before.add(kTable, kSlotOffset, {{reader.destination.data() + kBefore, 64, 0}});
    data.add(kPool, 0, {{reader.destination.data(), block_bytes, 0}});
    after.add(kTable, kSlotOffset, {{reader.destination.data() + kAfter, 64, 0}});
    Recycler recycler(pair.owner.table->range().base + kSlotOffset, pair.owner.pool->range().base,
                      block_bytes);
    int num_valid = 0, num_stale = 0;
    // By the clock: the recycler may not run for a while on a loaded machine.
    for (const int64_t end = now_ns() + 10'000'000'000;
         now_ns() < end && (num_valid < 500 || num_stale < 500);) {
      ASSERT_TRUE(reader.read(before, 1).ok());
      // Both at once, as the engine does on an ordered endpoint.
      ASSERT_TRUE(reader.endpoint->post_read(2, data.chunk()).ok());
      ASSERT_TRUE(reader.endpoint->post_read(3, after.chunk()).ok());
      ASSERT_TRUE(reader.wait(3).ok());
      const bool valid = word(kBefore) != 0 && word(kBefore) == word(kAfter);
      ++(valid ? num_valid : num_stale);
      for (uint32_t at = 0; valid && at < block_bytes; at += sizeof(uint64_t))
        ASSERT_EQ(word(at), word(kAfter));
    }
    EXPECT_GT(num_valid, 0);
    EXPECT_GT(num_stale, 0) << "the race was not provoked";
  }
}

TEST_P(RemoteCopyTransport, NoticesAnOwnerThatIsKilled) {
  RemotePair pair(GetParam());
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, 4096).ok());
  const int wake_fd = pair.reader.endpoint->traits().wake_fd;
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
  EXPECT_EQ(std::memcmp(pair.reader.destination.data(), &expected_pool()[4096], 1 << 20), 0);
}

TEST_P(CopyTransport, RefusesMalformedBlobs) {
  LocalPair pair(GetParam());
  const Card card = pair.owner.card();
  auto opened = open_one(*pair.reader.transport, card.address);
  ASSERT_TRUE(opened.ok());
  const std::string hello = (*opened)->hello();
  const std::string reply = pair.accept(hello);
  for (const auto& blob : spoilt(card.address)) {
    EXPECT_EQ(open_one(*pair.reader.transport, blob).status().code(), Code::kTransportUnavailable);
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
    if (auto opened = open_one(*pair.reader.transport, address); opened.ok()) (*opened)->close();
    if (GetParam() != std::string("cma")) (void)pair.reader.endpoint->import_region(key).ok();
  }
}

TEST_P(CopyTransport, ProbesWell) {
  const TransportInfo* const info = find_transport(GetParam(), transports_and_toy());
  ASSERT_NE(info, nullptr);
  EXPECT_TRUE(info->probe().ok());
  EXPECT_EQ(find_transport("fault+" + std::string(GetParam()), transports_and_toy()), info);
}

TEST(Transports, AreFoundByName) {
  std::set<std::string> names;
  for (const TransportInfo& info : transports()) names.insert(info.name);
  EXPECT_EQ(names, (std::set<std::string>{"loopback", "shm", "cma", "cuda", "verbs", "tcp"}));
  EXPECT_EQ(find_transport("fault"), nullptr);
  EXPECT_EQ(find_transport("fault+fault+shm"), nullptr);
  EXPECT_EQ(make_transport("smh", {}).status().code(), Code::kConfig);
}

TEST_P(CopyTransport, ClosesEveryDescriptor) {
  const auto count = [] {
    const std::filesystem::directory_iterator open_files("/proc/self/fd");
    return std::distance(begin(open_files), end(open_files));
  };
  {
    const LocalPair pair(GetParam());
  }  // opens what is opened once and for all
  const auto before = count();
  {
    LocalPair pair("fault+" + std::string(GetParam()), "drop@2");
    EXPECT_TRUE(pair.reader.read_at(kPool, 0, 64).ok());
    const Reader second(GetParam(), pair.owner.card(),
                        [&](const std::string& hello) { return pair.accept(hello); });
    second.endpoint->close();
  }
  EXPECT_EQ(count(), before);
}

}  // namespace
}  // namespace kvlink::testing

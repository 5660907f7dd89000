// SPDX-License-Identifier: Apache-2.0
// The cuda transport over tests/fake_cuda, which is found in place of the driver.
#include <cstdlib>
#include <fstream>

#include "cuda_gather.h"
#include "cuda_peers.h"
#include "cuda_wire.h"
#include "floor_cuda.h"

namespace kvlink::testing {
namespace {

using Kind = GpuPool::Kind;

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override { live_ = from_fake_cuda<int()>("fake_cuda_live")(); }
  void TearDown() override {
    EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_live")(), live_) << "something was not given back";
    EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_contexts")(), 0)
        << "the thread's own context did not come back";
  }

 private:
  int live_ = 0;
};

/// Owner, server thread and reader in this process.
struct GpuPair {
  explicit GpuPair(Kind kind = Kind::kKvlink, const std::string& image = "fake image")
      : owner(kind), server(*owner.transport), reader(image) {
    const Status status =
        reader.connect(owner.card(), [this](const std::string& hello) { return accept(hello); });
    EXPECT_TRUE(status.ok()) << status.what();
  }
  std::string accept(const std::string& hello) { return *owner.transport->accept(42, hello); }

  GpuOwner owner;
  Server server;
  GpuReader reader;
};

/// Blocks of one size in random order, at random places.
struct Blocks {
  Blocks(const GpuReader& reader, uint32_t bytes, uint32_t count) : bytes(bytes) {
    std::mt19937_64 random(bytes);
    from.resize(kPoolBytes / bytes);
    for (uint32_t i = 0; i < from.size(); ++i) from[i] = i;
    to = from;
    std::shuffle(from.begin(), from.end(), random);
    std::shuffle(to.begin(), to.end(), random);
    from.resize(count);
    to.resize(count);
    for (uint32_t i = 0; i < count; ++i) {
      scatter.add(kPool, uint64_t{from[i]} * bytes, {{reader.at(uint64_t{to[i]} * bytes), bytes, 0}});
    }
  }
  /// All of them are there, and nothing else.
  void expect_landed(const GpuOwner& owner, const GpuReader& reader) const {
    std::vector<std::byte> expected(kPoolBytes, kPoison);
    for (size_t i = 0; i < from.size(); ++i) {
      std::memcpy(expected.data() + uint64_t{to[i]} * bytes, owner.pool.bytes() + uint64_t{from[i]} * bytes,
                  bytes);
    }
    EXPECT_EQ(std::memcmp(reader.pool.bytes(), expected.data(), kPoolBytes), 0);
  }

  const uint32_t bytes;
  std::vector<uint32_t> from, to;
  Scatter scatter;
};

TEST_F(Cuda, GathersScatteredBlocksWhateverCopiesThem) {
  for (const char* image : {"fake image", ""}) {
    for (const Kind kind : {Kind::kKvlink, Kind::kMalloc}) {
      GpuPair pair(kind, image);
      for (const auto& [bytes, count] :
           {std::pair{4096u, 1500u}, {16384u, 1u}, {100u, 3000u}, {1u << 20, 7u}}) {
        pair.reader.poison();
        const Blocks blocks(pair.reader, bytes, count);
        const Status status = pair.reader.read(blocks.scatter);
        ASSERT_TRUE(status.ok()) << status.what();
        blocks.expect_landed(pair.owner, pair.reader);
      }
    }
  }
}

TEST_F(Cuda, CutsWhatFillsATable) {
  GpuPair pair;
  Scatter scatter;
  constexpr uint32_t kPieces = 100'000;  // more than one table
  for (uint32_t i = 0; i < kPieces; ++i) {
    scatter.add(kPool, uint64_t{i} * 48,
                {{pair.reader.at(uint64_t{i} * 64), 16, 0}, {pair.reader.at(uint64_t{i} * 64 + 32), 8, 0}});
  }
  ASSERT_TRUE(pair.reader.read(scatter).ok());
  for (uint32_t i = 0; i < kPieces; ++i) {
    const std::byte* const from = pair.owner.pool.bytes() + uint64_t{i} * 48;
    const std::byte* const to = pair.reader.pool.bytes() + uint64_t{i} * 64;
    ASSERT_EQ(std::memcmp(from, to, 16), 0) << i;
    ASSERT_EQ(std::memcmp(from + 16, to + 32, 8), 0) << i;
    ASSERT_EQ(to[16], kPoison) << i;
  }
}

/// A block of each of 8 planes, and then each of them elsewhere.
TEST_F(Cuda, RepeatsReadsWhateverCopiesThem) {
  constexpr uint64_t kPlane = kPoolBytes / 8;
  for (const char* image : {"fake image", ""}) {
    GpuPair pair(Kind::kKvlink, image);
    Scatter scatter;
    for (const uint64_t at : {3u, 17u, 4u, 90u, 31u}) {
      scatter.add(kPool, at * 1000,
                  {{pair.reader.at(at * 900), 400, 0}, {pair.reader.at(at * 900 + 450), 300, 0}});
    }
    std::vector<Repeat> repeats;
    for (uint64_t plane = 1; plane < 8; ++plane) {
      const uint64_t to = plane % 2 == 0 ? plane : 8 - plane;  // not in their order
      repeats.push_back({plane * kPlane, static_cast<int64_t>(to * kPlane), kPool, 0});
    }
    Chunk chunk = scatter.chunk();
    chunk.repeats = repeats;
    ASSERT_TRUE(pair.reader.endpoint->post_read(1, chunk).ok());
    ASSERT_TRUE(pair.reader.wait(1).ok());
    std::vector<std::byte> wanted(kPoolBytes, kPoison);
    for (uint64_t plane = 0; plane < 8; ++plane) {
      const uint64_t to = plane % 2 == 0 ? plane : 8 - plane;
      for (const uint64_t at : {3u, 17u, 4u, 90u, 31u}) {
        const std::byte* const from = pair.owner.pool.bytes() + plane * kPlane + at * 1000;
        std::memcpy(&wanted[to * kPlane + at * 900], from, 400);
        std::memcpy(&wanted[to * kPlane + at * 900 + 450], from + 400, 300);
      }
    }
    EXPECT_EQ(std::memcmp(pair.reader.pool.bytes(), wanted.data(), kPoolBytes), 0);
  }
}

TEST_F(Cuda, TriesBothWaysAndGivesEverythingBack) {
  const auto device = *cuda::Device::at(0);
  const auto kernel = *CudaGather::make(device, "fake image"), none = *CudaGather::make(device, "");
  EXPECT_EQ(kernel->by(4096), GatherBy::kKernel) << "until it is measured";
  EXPECT_EQ(none->by(4096), GatherBy::kBatch);
  for (const auto& gather : {kernel, none}) {
    gather->measure();
    for (const uint64_t bytes : {256, 4096, 16384, 1 << 20}) {
      EXPECT_NE(gather->by(bytes), GatherBy::kCopies);
    }
  }
  EXPECT_EQ(none->by(1 << 20), GatherBy::kBatch);
}

TEST_F(Cuda, RefusesRepeatsOutOfBounds) {
  GpuPair pair;
  Scatter scatter;
  scatter.add(kPool, 4096, {{pair.reader.at(0), 64, 0}});
  scatter.add(kPool, 0, {{pair.reader.at(64), 64, 0}});
  const auto code_of = [&](const Repeat& repeat) {
    Chunk chunk = scatter.chunk();
    chunk.repeats = {&repeat, 1};
    return pair.reader.endpoint->post_read(1, chunk).code();
  };
  EXPECT_EQ(code_of({kPoolBytes - 4096 - 63, 0, kPool, 0}), Code::kAccessDenied);
  EXPECT_EQ(code_of({uint64_t(-1), 0, kPool, 0}), Code::kAccessDenied) << "before the region";
  EXPECT_EQ(code_of({0, 0, 9, 0}), Code::kAccessDenied);
  EXPECT_EQ(code_of({0, 0, kTable, 0}), Code::kConfig) << "in host memory";
  EXPECT_EQ(code_of({0, 0, kPool, kScratch}), Code::kConfig);
  const std::vector<Repeat> many(1 << 17, Repeat{0, 0, kPool, 0});
  Chunk chunk = scatter.chunk();
  chunk.repeats = many;
  EXPECT_EQ(pair.reader.endpoint->post_read(1, chunk).code(), Code::kConfig);
  scatter.add(kTable, 0, {{pair.reader.at(128), 64, 0}});
  EXPECT_EQ(code_of({4096, 0, kPool, 0}), Code::kConfig) << "of one region alone";
}

TEST_F(Cuda, LooksAtTheTableOnceTheDataHasLanded) {
  GpuPair pair;
  const uint64_t nonce = 0x1234'5678'9abc'def0;
  std::memcpy(pair.owner.table->range().base + 64, &nonce, sizeof nonce);
  for (int turn = 0; turn < 50; ++turn) {
    pair.reader.poison();
    const Blocks blocks(pair.reader, 8192, 200);
    alignas(64) std::array<std::byte, 64> slot{};
    Scatter look;
    look.add(kTable, 64, {{slot.data(), 64, kScratch}});
    ASSERT_TRUE(pair.reader.endpoint->post_read(1, blocks.scatter.chunk()).ok());
    ASSERT_TRUE(pair.reader.endpoint->post_read(2, look.chunk()).ok());
    ASSERT_TRUE(pair.reader.wait(2).ok());
    blocks.expect_landed(pair.owner, pair.reader);
    ASSERT_EQ(std::memcmp(slot.data(), &nonce, sizeof nonce), 0);
  }
}

TEST_F(Cuda, WritesToTheTableAndNowhereElse) {
  GpuPair pair;
  ASSERT_TRUE(pair.reader.endpoint->post_write(3, kTable, 72, 77).ok());
  ASSERT_TRUE(pair.reader.wait(3).ok());
  uint64_t word = 0;
  std::memcpy(&word, pair.owner.table->range().base + 72, sizeof word);
  EXPECT_EQ(word, 77u);
  EXPECT_EQ(pair.reader.endpoint->post_write(4, kPool, 0, 1).code(), Code::kAccessDenied);
}

TEST_F(Cuda, RefusesReadsOutOfBoundsAndBetweenHostAndGpu) {
  GpuPair pair;
  const auto code_of = [&](uint32_t region, uint64_t offset, Segment to) {
    Scatter scatter;
    scatter.add(region, offset, {to});
    return pair.reader.read(scatter).code();
  };
  std::array<std::byte, 64> host{};
  EXPECT_EQ(code_of(kPool, kPoolBytes - 63, {pair.reader.at(0), 64, 0}), Code::kAccessDenied);
  EXPECT_EQ(code_of(9, 0, {pair.reader.at(0), 64, 0}), Code::kAccessDenied);
  EXPECT_EQ(code_of(kPool, 0, {host.data(), 64, kScratch}), Code::kConfig);
  EXPECT_EQ(code_of(kTable, 0, {pair.reader.at(0), 64, 0}), Code::kConfig);
  EXPECT_EQ(code_of(kPool, 0, {pair.reader.at(0), 64, 0}), Code::kOk);
}

TEST_F(Cuda, TakesBackWhatHasNotStarted) {
  GpuPair pair;
  const Blocks blocks(pair.reader, 4096, 100);
  alignas(64) std::array<std::byte, 64> slot{};
  Scatter look;
  look.add(kTable, 0, {{slot.data(), 64, kScratch}});
  Endpoint& endpoint = *pair.reader.endpoint;
  ASSERT_TRUE(endpoint.post_read(1, blocks.scatter.chunk()).ok());
  EXPECT_TRUE(endpoint.cancel(1));
  EXPECT_TRUE(std::all_of(pair.reader.pool.bytes(), pair.reader.pool.bytes() + kPoolBytes,
                          [](std::byte byte) { return byte == kPoison; }));
  ASSERT_TRUE(endpoint.post_read(2, blocks.scatter.chunk()).ok());
  std::vector<Completion> ended;
  ASSERT_TRUE(endpoint.poll(ended).status.ok());
  if (ended.empty()) {  // on its way: the stand-in's streams are slow
    EXPECT_FALSE(endpoint.cancel(2));
    EXPECT_TRUE(pair.reader.wait(2).ok());
  }
  EXPECT_TRUE(endpoint.cancel(99));
}

/// A GpuOwner in a forked process, over pipes of messages; killed with the test.
class RemoteGpuOwner {
 public:
  explicit RemoteGpuOwner(Kind kind) {
    std::array<int, 2> ends;
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      run(kind, ends[1]);
      ::_exit(0);
    }
    ::close(ends[1]);
    control_ = ends[0];
    card = {hear(), hear(), hear()};
  }
  ~RemoteGpuOwner() {
    kill();
    ::close(control_);
  }
  std::string accept(const std::string& hello) {
    ::send(control_, hello.data(), hello.size(), MSG_NOSIGNAL);
    return hear();
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  Card card;

 private:
  static void run(Kind kind, int control) {
    GpuOwner owner(kind);
    Server server(*owner.transport);
    const Card card = owner.card();
    for (const auto* blob : {&card.address, &card.pool_key, &card.table_key}) {
      ::send(control, blob->data(), blob->size(), MSG_NOSIGNAL);
    }
    std::array<char, 4096> hello;
    for (ssize_t size = 0; (size = ::recv(control, hello.data(), hello.size(), 0)) > 0;) {
      const std::string reply = *owner.transport->accept(1, {hello.data(), static_cast<size_t>(size)});
      ::send(control, reply.data(), reply.size(), MSG_NOSIGNAL);
    }
  }
  std::string hear() const {
    std::string message(4096, '\0');
    const ssize_t size = ::recv(control_, message.data(), message.size(), 0);
    message.resize(size > 0 ? static_cast<size_t>(size) : 0);
    return message;
  }

  pid_t pid_ = -1;
  int control_ = -1;
};

TEST_F(Cuda, ReadsAnotherProcessUntilThatEnds) {
  GpuOwner same;  // has the same bytes
  for (const Kind kind : {Kind::kKvlink, Kind::kMalloc}) {
    RemoteGpuOwner owner(kind);
    GpuReader reader;
    const Status status =
        reader.connect(owner.card, [&](const std::string& hello) { return owner.accept(hello); });
    ASSERT_TRUE(status.ok()) << status.what();
    const Blocks blocks(reader, 4096, 1000);
    ASSERT_TRUE(reader.read(blocks.scatter).ok());
    blocks.expect_landed(same, reader);
    owner.kill();
    EXPECT_EQ(reader.wait(UINT64_MAX).code(), Code::kPeerUnreachable);
    EXPECT_EQ(reader.read(blocks.scatter).code(), Code::kPeerUnreachable);
  }
}

TEST_F(Cuda, MapsPoolsForReadingAloneWhereTheGpuCan) {
  const auto writable = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) {
      count += line.find("fake-cuda") != std::string::npos && line.find(" rw-s ") != std::string::npos;
    }
    return count;
  };
  int before = 0;
  {
    GpuPair pair;
    before = writable();
  }
  ::setenv("FAKE_CUDA_NO_READ_ONLY", "1", 1);
  GpuPair pair;
  ::unsetenv("FAKE_CUDA_NO_READ_ONLY");
  EXPECT_EQ(writable(), before + 1);
  const Blocks blocks(pair.reader, 4096, 10);
  EXPECT_TRUE(pair.reader.read(blocks.scatter).ok());
}

TEST_F(Cuda, RefusesAGpuThatThisProcessDoesNotSee) {
  ::setenv("FAKE_CUDA_UUID", "another", 1);
  GpuOwner owner;
  ::unsetenv("FAKE_CUDA_UUID");
  Server server(*owner.transport);
  GpuReader reader;
  const Status status = reader.connect(
      owner.card(), [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_NE(status.fix().find("CUDA_VISIBLE_DEVICES"), std::string::npos);
}

TEST_F(Cuda, RefusesMemoryThatCudaDoesNotShare) {
  auto transport = make_transport("cuda", {});
  auto host = allocate(kPoolBytes);
  EXPECT_EQ((*transport)->register_memory(host->range(), Access::kRead).status().code(),
            Code::kTransportUnavailable);
  std::vector<std::byte> unknown(4096);
  auto* const on_gpu = reinterpret_cast<std::byte*>(reinterpret_cast<uint64_t>(unknown.data()) | kGpuBit);
  const Status status =
      (*transport)->register_memory({.base = on_gpu, .bytes = 4096, .device = true}, Access::kRead).status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_NE(status.fix().find("gpu="), std::string::npos);
}

TEST_F(Cuda, LendsAPieceOfAnAllocation) {
  GpuPair pair;
  MemoryRange piece = pair.owner.pool.range();
  piece.base += 12'345;
  piece.bytes = 70'000;
  auto region = pair.owner.transport->register_memory(piece, Access::kRead);
  ASSERT_TRUE(region.ok()) << region.status().what();
  GpuReader reader;
  ASSERT_TRUE(
      reader.connect(pair.owner.card(), [&](const std::string& hello) { return pair.accept(hello); }).ok());
  auto index = reader.endpoint->import_region((*region)->remote_key());
  ASSERT_TRUE(index.ok()) << index.status().what();
  Scatter scatter;
  scatter.add(*index, 5, {{reader.at(3), 69'995, 0}});
  ASSERT_TRUE(reader.read(scatter).ok());
  EXPECT_EQ(std::memcmp(reader.pool.bytes() + 3, behind(piece.base) + 5, 69'995), 0);
  scatter.add(*index, 5, {{reader.at(3), 69'996, 0}});
  EXPECT_EQ(reader.read(scatter).code(), Code::kAccessDenied);
}

TEST_F(Cuda, FloorsCopyByTheDriverAlone) {
  GpuPool from, to;
  from.fill(3);
  const auto at = [](const GpuPool& pool, uint64_t offset) {
    return cuda::address_of(pool.range().base + offset);
  };
  const std::array<FloorPiece, 2> pieces{
      {{at(from, 0), at(to, 4096), 4096}, {at(from, 8192), at(to, 0), 100}}};
  const Result<int64_t> took = floor_cuda_copies(pieces);
  ASSERT_TRUE(took.ok()) << took.status().what();
  EXPECT_GT(*took, 0);
  EXPECT_EQ(std::memcmp(to.bytes() + 4096, from.bytes(), 4096), 0);
  EXPECT_EQ(std::memcmp(to.bytes(), from.bytes() + 8192, 100), 0);
  EXPECT_EQ(floor_cuda_copies({}).status().code(), Code::kConfig);
}

TEST_F(Cuda, ReadsNoKeyThatNoOwnerWrote) {
  GpuOwner owner;
  const std::string key = owner.pool_region->remote_key();
  ASSERT_TRUE(CudaKey::parse(key).ok());
  EXPECT_EQ(CudaKey::parse(key)->blob(), key);
  for (size_t size = 0; size < key.size(); ++size) EXPECT_FALSE(CudaKey::parse(key.substr(0, size)).ok());
  std::mt19937_64 random(5);
  int whole = 0;
  for (int turn = 0; turn < 20'000; ++turn) {
    std::string changed = key;
    for (int flips = 0; flips < 3; ++flips)
      changed[random() % changed.size()] ^= static_cast<char>(1 << random() % 8);
    const Result<CudaKey> parsed = CudaKey::parse(changed);
    if (!parsed.ok()) continue;
    ++whole;
    const bool whole_parts = (*parsed).offset + (*parsed).bytes <= (*parsed).span();
    EXPECT_TRUE((*parsed).kind == CudaKey::Kind::kIpc || whole_parts);
  }
  EXPECT_GT(whole, 0);
}

}  // namespace
}  // namespace kvlink::testing

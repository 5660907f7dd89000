// SPDX-License-Identifier: Apache-2.0
// Reads of the cuda transport over tests/fake_cuda, which is found in place of the driver.
#include <array>
#include <thread>

#include "cpp/transports/cuda/pair.h"
#include "device/cuda_memory.h"
#include "device/gather.h"

namespace kvlink::testing {
namespace {

using Kind = GpuPool::Kind;

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

/// The engine's kernels need the rest of the GPU.
TEST_F(Cuda, LaunchesTakeNoMoreOfTheGpuThanTheyNeed) {
  for (const auto& [set, most] : {std::pair{0u, 216}, {5u, 5}}) {
    GpuPair pair(Kind::kKvlink, "fake image", set);
    const Blocks blocks(pair.reader, 4096, 1500);
    from_fake_cuda<int()>("fake_cuda_most_blocks")();
    ASSERT_TRUE(pair.reader.read(blocks.scatter).ok());
    EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_most_blocks")(), most);
    blocks.expect_landed(pair.owner, pair.reader);
  }
}

TEST_F(Cuda, AFewPiecesAreOneLaunchWithoutACopy) {
  GpuPair pair;
  const Blocks blocks(pair.reader, 4096, GatherList::kFewPieces);
  const int copied = from_fake_cuda<int()>("fake_cuda_copies")();
  const int launched = from_fake_cuda<int()>("fake_cuda_launches")();
  ASSERT_TRUE(pair.reader.read(blocks.scatter).ok());
  EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_copies")(), copied);
  EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_launches")(), launched + 1);
  blocks.expect_landed(pair.owner, pair.reader);
}

TEST_F(Cuda, MemoryIsZeroBeforeAnybodyMayWriteIt) {
  const auto memory = *CudaMemory::allocate(1 << 20, 0);
  EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_unfinished")(), 0)
      << "zeros that come later erase what is written now";
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
  const auto kernel = std::make_shared<CudaGather>(device, fake_kernel(), 0),
             none = std::make_shared<CudaGather>(device, nullptr, 0);
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

TEST_F(Cuda, BatchesAreThoseOfCuda12WhereTheDriverIs) {
  const auto device = *cuda::Device::at(0);
  cuda::Api old = device->api;
  old.copy_batch = nullptr;
  cuda::Context context = nullptr;
  ASSERT_EQ(old.primary_context_retain(&context, device->device), 0);
  const auto older =
      std::make_shared<const cuda::Device>(old, device->ordinal, device->device, context, device->uuid);
  const auto gather = std::make_shared<CudaGather>(older, nullptr, 0);
  EXPECT_EQ(gather->by(4096), GatherBy::kBatch);
  GpuPool pool;
  pool.fill(4);
  std::array<GatherPiece, 3> pieces;
  const uint64_t base = cuda::address_of(pool.range().base);
  for (uint64_t i = 0; i < pieces.size(); ++i) pieces[i] = {base + i * 4096, base + (i + 8) * 4096, 4096, 0};
  const auto stream = *cuda::MarkedStream::open(older);
  const cuda::Current current(*older);
  ASSERT_TRUE(gather->start({pieces.data(), 0}, {.num_pieces = 3, .bytes = 3 * 4096}, stream->get()).ok());
  stream->drain();
  EXPECT_EQ(std::memcmp(pool.bytes() + 8 * 4096, pool.bytes(), 3 * 4096), 0);
}

/// As an engine does at its start, on a thread of its own, while kvlink starts and its peers pull.
TEST_F(Cuda, NoCallBreaksACaptureOfTheEngine) {
  const auto device = *cuda::Device::at(0);
  const auto stream = *cuda::MarkedStream::open(device);
  const auto begin = from_fake_cuda<int(cuda::Stream, int)>("cuStreamBeginCapture_v2");
  const auto end = from_fake_cuda<int(cuda::Stream, void**)>("cuStreamEndCapture");
  constexpr int kGlobal = 0;
  std::thread([&] { ASSERT_EQ(begin(stream->get(), kGlobal), 0); }).join();
  for (const Kind kind : {Kind::kKvlink, Kind::kMalloc}) {
    GpuPair pair(kind);
    const Blocks blocks(pair.reader, 4096, 100);
    EXPECT_TRUE(pair.reader.read(blocks.scatter).ok());
  }
  void* graph = nullptr;
  std::thread([&] { EXPECT_EQ(end(stream->get(), &graph), 0) << "the capture is broken"; }).join();
}

TEST_F(Cuda, PreparesWhenThePoolIsRegisteredAndNotInTheFirstPull) {
  const auto launches = from_fake_cuda<int()>("fake_cuda_launches");
  const int before = launches();
  GpuReader reader;
  const int prepared = launches();
  EXPECT_GT(prepared, before) << "to measure";
  GpuOwner owner;
  Server server(*owner.transport);
  const auto accept = [&](const std::string& hello) { return *owner.transport->accept(1, hello); };
  ASSERT_TRUE(reader.connect(owner.card(), accept).ok());
  EXPECT_EQ(launches(), prepared);
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
  ASSERT_TRUE(pair.reader.endpoint->post_write(3, kWords, 72, 77).ok());
  ASSERT_TRUE(pair.reader.wait(3).ok());
  uint64_t word = 0;
  std::memcpy(&word, pair.owner.words->range().base + 72, sizeof word);
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
  ASSERT_TRUE(poll_once(endpoint, ended).status.ok());
  if (ended.empty()) {  // on its way: the stand-in's streams are slow
    EXPECT_FALSE(endpoint.cancel(2));
    EXPECT_TRUE(pair.reader.wait(2).ok());
  }
  EXPECT_TRUE(endpoint.cancel(99));
}

}  // namespace
}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// The transport over CUDA: handles, fabric handles, visible devices and owners.

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "bench/baselines.h"
#include "cpp/transports/cuda/pair.h"
#include "cpp/transports/cuda/remote_owner.h"
#include "device/cuda_memory.h"
#include "device/gather.h"
#include "transports/cuda/fabric.h"
#include "transports/cuda/protocol.h"

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

TEST_F(Cuda, ReadsTheTableOnceTheDataHasLanded) {
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

using CudaVisible = Cuda;

/// A machine of two GPUs, of which this process sees the first, with a reader.
struct TwoGpus {
  /// Connects a reader here to an owner whose process sees only the second GPU.
  Status connect(Kind kind) {
    owner = std::make_unique<RemoteGpuOwner>(kind, [] { ::setenv("CUDA_VISIBLE_DEVICES", "1", 1); });
    return reader.connect(owner->card, [&](const std::string& hello) { return owner->accept(hello); });
  }

  const Variable gpus{"FAKE_CUDA_GPUS", "2"};
  const Variable visible{"CUDA_VISIBLE_DEVICES", "0"};
  std::unique_ptr<RemoteGpuOwner> owner = nullptr;
  GpuReader reader{};
};

bool mentions(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

TEST_F(CudaVisible, ReadsMallocedMemoryOfAHiddenGpu) {
  TwoGpus machine;
  GpuOwner same(Kind::kMalloc);  // has the same bytes
  const Status status = machine.connect(Kind::kMalloc);
  ASSERT_TRUE(status.ok()) << status.what();
  const Blocks blocks(machine.reader, 4096, 1000);
  from_fake_cuda<int()>("fake_cuda_most_blocks")();
  ASSERT_TRUE(machine.reader.read(blocks.scatter).ok());
  EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_most_blocks")(), 128) << "what NVLink needs";
  blocks.expect_landed(same, machine.reader);
}

TEST_F(CudaVisible, SaysWhatToChangeForAllocationsOfAHiddenGpu) {
  TwoGpus machine;
  const Status status = machine.connect(Kind::kKvlink);
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_TRUE(mentions(status.what(), "CUDA_ERROR_INVALID_DEVICE")) << status.what();
  EXPECT_TRUE(mentions(status.fix(), "CUDA_VISIBLE_DEVICES")) << status.fix();
  EXPECT_TRUE(mentions(status.fix(), "cudaMalloc")) << status.fix();
}

TEST_F(CudaVisible, ReadsAllocationsOnceBothGpusAreVisible) {
  TwoGpus machine;
  const Variable both("CUDA_VISIBLE_DEVICES", "0,1");
  const Status status = machine.connect(Kind::kKvlink);
  ASSERT_TRUE(status.ok()) << status.what();
  const Blocks blocks(machine.reader, 4096, 1000);
  EXPECT_TRUE(machine.reader.read(blocks.scatter).ok());
}

/// As the instances of a GPU in MIG mode, each with an id of its own.
TEST_F(CudaVisible, SaysWhyTheDriverRefusesAHiddenGpu) {
  TwoGpus machine;
  const Variable no_peers("FAKE_CUDA_NO_PEERS", "1");
  const Status status = machine.connect(Kind::kMalloc);
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_TRUE(mentions(status.what(), "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")) << status.what();
  EXPECT_TRUE(mentions(status.fix(), "MIG")) << status.fix();
  EXPECT_FALSE(mentions(status.fix(), "cudaMalloc")) << "it is";
}

TEST_F(CudaVisible, NamesTwoVisibleGpusThatDoNotReachEachOther) {
  for (const Kind kind : {Kind::kMalloc, Kind::kKvlink}) {
    TwoGpus machine;
    const Variable both("CUDA_VISIBLE_DEVICES", "0,1"), no_peers("FAKE_CUDA_NO_PEERS", "1");
    const Status status = machine.connect(kind);
    EXPECT_TRUE(mentions(status.what(), "GPU 0 does not reach GPU 1")) << status.what();
  }
}

using CudaFabric = Cuda;

const char* const kVariable = "FAKE_CUDA_FABRIC";

/// Returns the types of handles that the allocation at `base` was made for.
int types_of(const std::byte* base) {
  const auto device = *cuda::Device::at(0);
  cuda::Allocation allocation = 0;
  cuda::AllocationProperties made{};
  EXPECT_EQ(device->api.allocation_retain(&allocation, const_cast<std::byte*>(base)), 0);
  EXPECT_EQ(device->api.allocation_properties(&made, allocation), 0);
  device->api.allocation_release(allocation);
  return made.handle_types;
}

CudaKey::Kind kind_of(const std::string& key) { return CudaKey::parse(key)->kind; }

TEST_F(CudaFabric, ReadsMemoryThatTheFabricAloneShares) {
  const Variable fabric(kVariable, "1");
  GpuOwner same;  // has the same bytes
  RemoteGpuOwner owner(Kind::kFabric);
  EXPECT_EQ(kind_of(owner.card.pool_key), CudaKey::Kind::kFabric);
  GpuReader reader;
  const auto accept = [&](const std::string& hello) { return owner.accept(hello); };
  const Status status = reader.connect(owner.card, accept);
  ASSERT_TRUE(status.ok()) << status.what();
  const Blocks blocks(reader, 4096, 1500);
  ASSERT_TRUE(reader.read(blocks.scatter).ok());
  blocks.expect_landed(same, reader);
}

TEST_F(CudaFabric, ReadsItInTheOwnersProcessToo) {
  const Variable fabric(kVariable, "1");
  GpuPair pair(Kind::kFabric);
  const Blocks blocks(pair.reader, 4096, 1500);
  ASSERT_TRUE(pair.reader.read(blocks.scatter).ok());
  blocks.expect_landed(pair.owner, pair.reader);
}

TEST_F(CudaFabric, PoolsAskForBothAndGoWithoutTheFabric) {
  for (const auto& [value, types] : {std::pair<const char*, int>{nullptr, cuda::kPosixFd},
                                     {"no-imex", cuda::kPosixFd},
                                     {"1", cuda::kPosixFd | cuda::kFabric}}) {
    const Variable fabric(kVariable, value);
    GpuPair pair;
    EXPECT_EQ(types_of(pair.owner.pool.range().base), types) << (value ? value : "no fabric");
    EXPECT_EQ(kind_of(pair.owner.pool_region->remote_key()), CudaKey::Kind::kAllocations)
        << "readers on this host need no IMEX";
    const Blocks blocks(pair.reader, 4096, 100);
    EXPECT_TRUE(pair.reader.read(blocks.scatter).ok());
  }
}

TEST_F(CudaFabric, SaysThatThereIsNoChannel) {
  const Variable fabric(kVariable, "1");
  RemoteGpuOwner owner(Kind::kFabric);
  const GpuPool pool(Kind::kFabric);
  GpuReader reader;
  const Variable no_channel(kVariable, "no-imex");
  const auto accept = [&](const std::string& hello) { return owner.accept(hello); };
  const Status read = reader.connect(owner.card, accept);
  const auto transport = *make_transport("cuda", {});
  const Status shared = transport->register_memory(pool.range(), Access::kRead).status();
  for (const Status& status : {read, shared}) {
    EXPECT_EQ(status.code(), Code::kTransportUnavailable);
    EXPECT_NE(status.what().find("no IMEX channel: cuMem"), std::string::npos) << status.what();
    EXPECT_NE(status.what().find("CUDA_ERROR_NOT_PERMITTED"), std::string::npos) << status.what();
    EXPECT_NE(status.fix().find("nvidia-imex"), std::string::npos) << status.fix();
  }
}

TEST_F(CudaFabric, TakesNoHandleThatIsNone) {
  const Variable fabric(kVariable, "1");
  const cuda::Api& api = **cuda::api();
  const UniqueFd memfd(::memfd_create("short", MFD_CLOEXEC));
  EXPECT_EQ(import_fabric(api, memfd.get()).status().code(), Code::kAccessDenied);
  ASSERT_EQ(::ftruncate(memfd.get(), 63), 0);
  EXPECT_EQ(import_fabric(api, memfd.get()).status().code(), Code::kAccessDenied);
  ASSERT_EQ(::ftruncate(memfd.get(), 64), 0);
  EXPECT_EQ(import_fabric(api, memfd.get()).status().code(), Code::kTransportUnavailable);
}

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

/// The stand-in ends this process if it touches memory that its owner has freed.
TEST_F(Cuda, TouchesNothingThatItsOwnerFreedAfterClosing) {
  RemoteGpuOwner owner(Kind::kMalloc);
  GpuReader reader;
  const auto accept = [&](const std::string& hello) { return owner.accept(hello); };
  ASSERT_TRUE(reader.connect(owner.card, accept).ok());
  const Blocks blocks(reader, 4096, 1000);
  ASSERT_TRUE(reader.read(blocks.scatter).ok());
  owner.close();
  ASSERT_TRUE(reader.endpoint->post_read(1, blocks.scatter.chunk()).ok());
  std::vector<Completion> ended;
  constexpr int64_t kNotYetDue = 0;  // the next check of the owner, which is made every 2 ms
  EXPECT_EQ(reader.endpoint->poll(kNotYetDue, false, ended).status.code(), Code::kPeerUnreachable);
}

/// As containers of one pod: they share the network, and have their own processes.
TEST_F(Cuda, SaysThatMallocedMemoryNeedsOnePidNamespace) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to make a pid namespace: run as root";
  const auto enter = [] {
    if (::unshare(CLONE_NEWPID) != 0) ::_exit(1);
    if (const pid_t inside = ::fork(); inside != 0) ::_exit(::waitpid(inside, nullptr, 0) > 0 ? 0 : 1);
  };
  for (const Kind kind : {Kind::kMalloc, Kind::kKvlink}) {
    RemoteGpuOwner owner(kind, enter);
    GpuReader reader;
    const auto accept = [&](const std::string& hello) { return owner.accept(hello); };
    const Status status = reader.connect(owner.card, accept);
    if (kind == Kind::kKvlink) {
      EXPECT_TRUE(status.ok()) << status.what();
      continue;
    }
    EXPECT_EQ(status.code(), Code::kTransportUnavailable);
    EXPECT_NE(status.what().find("in another pid namespace"), std::string::npos) << status.what();
    EXPECT_NE(status.fix().find("shareProcessNamespace"), std::string::npos) << status.fix();
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
  for (const char* error : {"801", "1"}) {  // CUDA_ERROR_NOT_SUPPORTED, and what other drivers may say
    const Variable refused("FAKE_CUDA_NO_READ_ONLY", error);
    GpuPair pair;
    EXPECT_EQ(writable(), before + 1);
    const Blocks blocks(pair.reader, 4096, 10);
    EXPECT_TRUE(pair.reader.read(blocks.scatter).ok());
  }
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

TEST_F(Cuda, ExportsAPieceOfAnAllocation) {
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
  const std::array<BaselinePiece, 2> pieces{
      {{at(from, 0), at(to, 4096), 4096}, {at(from, 8192), at(to, 0), 100}}};
  const Result<int64_t> took = baseline_cuda_copies(pieces);
  ASSERT_TRUE(took.ok()) << took.status().what();
  EXPECT_GT(*took, 0);
  EXPECT_EQ(std::memcmp(to.bytes() + 4096, from.bytes(), 4096), 0);
  EXPECT_EQ(std::memcmp(to.bytes(), from.bytes() + 8192, 100), 0);
  EXPECT_EQ(baseline_cuda_copies({}).status().code(), Code::kConfig);
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

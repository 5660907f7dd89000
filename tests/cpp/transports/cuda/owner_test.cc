// SPDX-License-Identifier: Apache-2.0
// Owners of GPU memory export it, and readers map it, over tests/fake_cuda in place of the driver.
#include <sched.h>

#include <cstdlib>
#include <fstream>

#include "bench/baselines.h"
#include "cpp/transports/cuda/pair.h"
#include "cpp/transports/cuda/remote_owner.h"
#include "transports/cuda/protocol.h"

namespace kvlink::testing {
namespace {

using Kind = GpuPool::Kind;

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
  constexpr int64_t kNotYetDue = 0;  // the next look at the owner, which is taken every 2 ms
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

// SPDX-License-Identifier: Apache-2.0
// Workers on one host that see different GPUs, as servers with a CUDA_VISIBLE_DEVICES each do.
#include <cstdlib>

#include "cpp/transports/cuda/remote_owner.h"

namespace kvlink::testing {
namespace {

using Kind = GpuPool::Kind;

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
  TwoGpus machine;
  const Variable both("CUDA_VISIBLE_DEVICES", "0,1"), no_peers("FAKE_CUDA_NO_PEERS", "1");
  for (const Kind kind : {Kind::kMalloc, Kind::kKvlink}) {
    const Status status = machine.connect(kind);
    EXPECT_TRUE(mentions(status.what(), "GPU 0 does not reach GPU 1")) << status.what();
  }
}

}  // namespace
}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// Memory that CUDA shares by handles of the fabric, over tests/fake_cuda.
#include "transports/cuda/fabric.h"

#include <sys/mman.h>
#include <unistd.h>

#include "cpp/transports/cuda/remote_owner.h"
#include "transports/cuda/protocol.h"

namespace kvlink::testing {
namespace {

using Kind = GpuPool::Kind;
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

}  // namespace
}  // namespace kvlink::testing

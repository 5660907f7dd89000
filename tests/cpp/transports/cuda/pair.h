// SPDX-License-Identifier: Apache-2.0
// An owner and a reader of GPU memory in one process, and blocks to move between them.
#pragma once

#include <random>

#include "cpp/transports/cuda/peers.h"

namespace kvlink::testing {

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override { live_ = from_fake_cuda<int()>("fake_cuda_live")(); }
  void TearDown() override {
    EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_live")(), live_) << "something was not freed";
    EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_contexts")(), 0)
        << "the thread's own context did not come back";
    EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_capture_mode")(), 0) << "nor its mode of captures";
  }

 private:
  int live_ = 0;
};

/// Owner, server thread and reader in this process.
struct GpuPair {
  explicit GpuPair(GpuPool::Kind kind = GpuPool::Kind::kKvlink, const std::string& image = "fake image",
                   uint32_t gpu_blocks = 0)
      : owner(kind), server(*owner.transport), reader(image, gpu_blocks) {
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

}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// Copies by libcuda's calls, over tests/fake_cuda/libcuda.cc, which is found in place of the driver's.
#include "cuda_copy.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "clock.h"
#include "memory.h"

namespace kvlink {
namespace {

constexpr uint64_t kBytes = 1 << 20;

/// The stand-in, opened before the copier looks for "libcuda.so.1": that name is its own.
class CudaCopy : public testing::Test {
 protected:
  void SetUp() override {
    void* const library = ::dlopen(KVLINK_FAKE_CUDA, RTLD_NOW);
    ASSERT_NE(library, nullptr) << ::dlerror();
    live = reinterpret_cast<int (*)()>(::dlsym(library, "fake_cuda_live"));
    contexts = reinterpret_cast<int (*)()>(::dlsym(library, "fake_cuda_contexts"));
    host = *HostMemory::allocate(kBytes, false);
    std::mt19937_64 random(1);
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  }
  void TearDown() override {
    EXPECT_EQ(live(), 0) << "something was not given back";
    EXPECT_EQ(contexts(), 0) << "the thread's own context did not come back";
  }

  std::byte* device(uint64_t offset = 0) {
    return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(memory.data() + offset) | uint64_t{1}
                                                                                                  << 60);
  }
  std::shared_ptr<DeviceCopier> copier() {
    auto made = make_cuda_copier(device());
    EXPECT_TRUE(made.ok()) << made.status().what();
    EXPECT_TRUE((*made)->pin(host->range().base, kBytes).ok());
    return *made;
  }

  int (*live)() = nullptr;
  int (*contexts)() = nullptr;
  std::shared_ptr<HostMemory> host;
  std::vector<std::byte> memory = std::vector<std::byte>(kBytes);
};

TEST_F(CudaCopy, GoesBothWaysInPieces) {
  const auto copies = copier();
  const auto queue = *copies->open_queue();
  std::byte* const pinned = host->range().base;
  std::vector<CopyPiece> pieces;
  for (uint64_t at = 0; at < kBytes; at += 64 << 10) pieces.push_back({device(at), pinned + at, 64 << 10});
  for (const CopyTo to : {CopyTo::kHost, CopyTo::kDevice}) {
    const std::vector<std::byte> wanted = memory;
    if (to == CopyTo::kDevice) std::fill(memory.begin(), memory.end(), std::byte{0xa5});
    const Result<uint64_t> number = queue->start(to, pieces);
    ASSERT_TRUE(number.ok()) << number.status().what();
    for (const int64_t end = now_ns() + 20'000'000'000; !*queue->done(*number) && now_ns() < end;) {
      std::this_thread::yield();
    }
    ASSERT_TRUE(*queue->done(*number));
    EXPECT_TRUE(memory == wanted);
    EXPECT_EQ(std::memcmp(pinned, wanted.data(), kBytes), 0);
  }
}

TEST_F(CudaCopy, KnowsEachStartByItsNumber) {
  const auto copies = copier();
  const auto queue = *copies->open_queue();
  std::byte* const pinned = host->range().base;
  const CopyPiece piece{device(), pinned, 4096};
  std::vector<uint64_t> numbers;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 10; ++i) numbers.push_back(*queue->start(CopyTo::kHost, std::span(&piece, 1)));
    EXPECT_FALSE(*queue->done(numbers.back())) << "nothing is that fast";
    queue->drain();
    for (const uint64_t number : numbers) EXPECT_TRUE(*queue->done(number));
  }
}

TEST_F(CudaCopy, SaysWhatTheDriverSays) {
  EXPECT_EQ(make_cuda_copier(memory.data()).status().what(),
            "cuPointerGetAttribute: CUDA_ERROR_INVALID_VALUE (1)");
  const auto copies = copier();
  const auto queue = *copies->open_queue();
  const CopyPiece pageable{device(), memory.data(), 4096};
  const Status refused = queue->start(CopyTo::kDevice, std::span(&pageable, 1)).status();
  EXPECT_EQ(refused.code(), Code::kTransportUnavailable);
  EXPECT_EQ(refused.what(), "cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE (1)");
  EXPECT_FALSE(copies->pin(host->range().base + 1, 4096).ok());
}

}  // namespace
}  // namespace kvlink

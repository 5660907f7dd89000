// SPDX-License-Identifier: Apache-2.0
// Copies by libcuda's calls, over tests/fake_cuda/libcuda.cc, which is found in place of the driver's.
#include "device/cuda_copier.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "cpp/device/fake_kernel.h"
#include "cpp/transports/cuda/peers.h"
#include "memory/host_memory.h"
#include "memory/slot_ring.h"

namespace kvlink::testing {
namespace {

constexpr uint64_t kHostBytes = 1 << 20;
constexpr const char* kImage = "fake image";  // with it the kernel copies

class CudaCopy : public ::testing::Test {
 protected:
  void SetUp() override {
    live = from_fake_cuda<int()>("fake_cuda_live");
    contexts = from_fake_cuda<int()>("fake_cuda_contexts");
    host = *HostMemory::allocate(kHostBytes, false);
    std::mt19937_64 random(1);
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  }
  void TearDown() override {
    EXPECT_EQ(live(), 0) << "something was not freed";
    EXPECT_EQ(contexts(), 0) << "the thread's own context did not come back";
  }

  std::byte* device(uint64_t offset = 0) {
    return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(memory.data() + offset) | uint64_t{1}
                                                                                                  << 60);
  }
  std::shared_ptr<DeviceCopier> copier(const std::string& image = {}) {
    auto made = make_cuda_copier(device(), testing::fake_kernel(image), 0);
    EXPECT_TRUE(made.ok()) << made.status().what();
    EXPECT_TRUE((*made)->pin(host->range().base, kHostBytes).ok());
    return *made;
  }

  int (*live)() = nullptr;
  int (*contexts)() = nullptr;
  std::shared_ptr<HostMemory> host;
  std::vector<std::byte> memory = std::vector<std::byte>(kHostBytes);
};

TEST_F(CudaCopy, GoesBothWaysInPieces) {
  std::byte* const pinned = host->range().base;
  for (const char* image : {kImage, ""}) {
    for (const uint64_t bytes : {1000, 4096, 64 << 10, 300'000}) {  // some a table lists, some are cut
      const auto copies = copier(image);
      const auto queue = *copies->open_queue();
      std::vector<CopyPiece> pieces;
      for (uint64_t at = 0; at + bytes <= kHostBytes / 2; at += bytes) {
        pieces.push_back({device(at), pinned + kHostBytes / 2 - at - bytes, bytes});
      }
      for (const CopyTo to : {CopyTo::kSlot, CopyTo::kDevice}) {
        const std::vector<std::byte> wanted = memory;
        if (to == CopyTo::kDevice) std::fill_n(memory.begin(), pieces.size() * bytes, std::byte{0xa5});
        const Result<uint64_t> number = queue->start(to, pieces);
        ASSERT_TRUE(number.ok()) << number.status().what();
        for (const int64_t end = now_ns() + 20'000'000'000; !*queue->done(*number) && now_ns() < end;) {
          std::this_thread::yield();
        }
        ASSERT_TRUE(*queue->done(*number));
        EXPECT_TRUE(memory == wanted);
        for (const CopyPiece& piece : pieces) {
          EXPECT_EQ(std::memcmp(piece.slot, &wanted[static_cast<size_t>(piece.device - device())], bytes), 0);
        }
      }
    }
  }
}

/// A short list travels as parameters of the launch, and a longer one is copied before it.
TEST_F(CudaCopy, ASlotIsOneLaunch) {
  const auto count = [](const char* name) { return from_fake_cuda<int()>(name)(); };
  const auto copies = copier(kImage);
  const auto queue = *copies->open_queue();
  count("fake_cuda_most_blocks");  // of tests before this one
  for (const auto& [bytes, lists] : {std::pair{4096u, 0}, {2048u, 1}, {256u, 1}}) {
    std::vector<CopyPiece> pieces;
    for (uint64_t i = 0; i < SlotRing::kSlotBytes / bytes; ++i) {
      pieces.push_back({device(kHostBytes - (i + 1) * bytes), host->range().base + i * bytes, bytes});
    }
    ASSERT_LE(pieces.size(), copies->most_pieces());
    const int copied = count("fake_cuda_copies"), launched = count("fake_cuda_launches");
    const Result<uint64_t> number = queue->start(CopyTo::kSlot, pieces);
    ASSERT_TRUE(number.ok());
    queue->drain();
    EXPECT_TRUE(*queue->done(*number));
    EXPECT_EQ(count("fake_cuda_copies") - copied, lists) << bytes;
    EXPECT_EQ(count("fake_cuda_launches") - launched, 1) << bytes;
    for (const CopyPiece& piece : pieces) {
      ASSERT_EQ(std::memcmp(piece.slot, &memory[static_cast<size_t>(piece.device - device())], bytes), 0);
    }
  }
  EXPECT_LE(count("fake_cuda_most_blocks"), 64);
}

TEST_F(CudaCopy, LongListsThatFindNoTableAreSeveralLaunches) {
  const auto launched = [] { return from_fake_cuda<int()>("fake_cuda_launches")(); };
  const auto copies = copier(kImage);
  const auto queue = *copies->open_queue();
  std::array<std::vector<CopyPiece>, 2> halves;  // one for each stream of the queue, which take turns
  for (uint64_t at = 0; at < kHostBytes; at += 256)
    halves[at / (kHostBytes / 2)].push_back({device(at), host->range().base + at, 256});
  std::vector<int> each;
  std::vector<uint64_t> numbers;
  for (size_t i = 0; i < 17; ++i) {
    const int before = launched();
    numbers.push_back(*queue->start(CopyTo::kSlot, halves[i % 2]));
    each.push_back(launched() - before);
  }
  EXPECT_EQ(each, (std::vector<int>{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 13}));
  queue->drain();
  for (const uint64_t number : numbers) EXPECT_TRUE(*queue->done(number));
  const int before = launched();
  ASSERT_TRUE(queue->start(CopyTo::kSlot, halves[0]).ok());
  EXPECT_EQ(launched() - before, 1) << "the tables came back";
}

TEST_F(CudaCopy, KnowsEachStartByItsNumber) {
  const auto copies = copier();
  const auto queue = *copies->open_queue();
  std::byte* const pinned = host->range().base;
  const std::array<CopyPiece, 2> pieces{{{device(), pinned, 4096}, {device(), pinned + 4096, 4096}}};
  std::vector<uint64_t> numbers;
  const auto hold = from_fake_cuda<void(int)>("fake_cuda_hold");
  for (int round = 0; round < 3; ++round) {
    hold(1);
    for (size_t i = 0; i < 10; ++i)  // one piece for each stream of the queue, which take turns
      numbers.push_back(*queue->start(CopyTo::kSlot, std::span(&pieces[i % 2], 1)));
    EXPECT_FALSE(*queue->done(numbers.back()));
    hold(0);
    queue->drain();
    for (const uint64_t number : numbers) EXPECT_TRUE(*queue->done(number));
  }
}

TEST_F(CudaCopy, SaysWhatTheDriverSays) {
  EXPECT_EQ(make_cuda_copier(memory.data(), {}, 0).status().what(),
            "cuPointerGetAttribute: CUDA_ERROR_INVALID_VALUE (1)");
  const auto copies = copier();
  const auto queue = *copies->open_queue();
  const CopyPiece pageable{device(), memory.data(), 4096};
  const Status refused = queue->start(CopyTo::kDevice, std::span(&pageable, 1)).status();
  EXPECT_EQ(refused.code(), Code::kTransportUnavailable);
  EXPECT_EQ(refused.what(), "cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE (1)");
  EXPECT_FALSE(copies->pin(host->range().base + 1, 4096).ok());
}

}  // namespace
}  // namespace kvlink::testing

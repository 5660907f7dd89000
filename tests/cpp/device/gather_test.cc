// SPDX-License-Identifier: Apache-2.0
// gather.cu itself: tests/fake_cuda compiles it for the CPU and runs every thread of a grid.
#include "device/gather.h"

#include <random>

#include "cpp/transports/cuda/pair.h"

namespace kvlink::testing {
namespace {

using CudaKernel = Cuda;

constexpr uint64_t kHalf = 1 << 20;

/// Pieces of all sizes and alignments in one half of a pool go to other places of the other half, and again
/// so for each repeat; the bytes between them stay as they are.
struct RandomLaunch {
  explicit RandomLaunch(std::mt19937_64& random) {
    const uint64_t turns = 1 + random() % 4, span = kHalf / turns / 4096 * 4096;
    const uint64_t alignment = uint64_t{1} << random() % 5;
    const uint64_t most = random() % 4 == 0 ? 20'000 : 600;
    uint64_t at = random() % 64 / alignment * alignment;
    while (pieces.size() < 1 + random() % 400) {
      const uint64_t bytes = alignment * (1 + random() % (most / alignment));
      if (at + bytes > span) break;
      pieces.push_back({at, at, static_cast<uint32_t>(bytes), 0});
      at += bytes + alignment * (random() % 3);
    }
    std::vector<GatherPiece> places = pieces;
    std::shuffle(places.begin(), places.end(), random);
    uint64_t to = 0;
    for (GatherPiece& piece : places) {
      piece.to = to;
      to += piece.bytes;
    }
    pieces = places;
    for (uint64_t turn = 1; turn < turns; ++turn) repeats.push_back({turn * span, (turns - turn) * span});
  }

  std::vector<GatherPiece> pieces;
  std::vector<GatherRepeat> repeats;
};

TEST_F(CudaKernel, CopiesEveryByteOfRandomLaunchesAndNoOther) {
  std::mt19937_64 random(30);
  GpuPool pool(GpuPool::Kind::kMalloc, 2 * kHalf);
  pool.fill(7);
  const auto device = *cuda::Device::at(0);
  const auto tables = *CudaTables::make(device, 1, 1024);
  const auto stream = *cuda::MarkedStream::open(device);
  const cuda::Current current(*device);
  std::vector<std::byte> wanted(kHalf);
  const auto most_blocks = from_fake_cuda<int()>("fake_cuda_most_blocks");
  most_blocks();  // of tests before this one
  for (int round = 0; round < 400; ++round) {
    const RandomLaunch launch(random);
    if (launch.pieces.empty()) continue;
    const auto table = tables->take();
    std::fill(pool.bytes() + kHalf, pool.bytes() + 2 * kHalf, kPoison);
    std::fill(wanted.begin(), wanted.end(), kPoison);
    GatherList list{.num_pieces = static_cast<uint32_t>(launch.pieces.size()),
                    .num_repeats = static_cast<uint32_t>(launch.repeats.size())};
    const uint64_t base = cuda::address_of(pool.range().base);
    for (size_t i = 0; i < launch.pieces.size(); ++i) {
      const GatherPiece& piece = launch.pieces[i];
      table->pieces[i] = {base + piece.from, base + kHalf + piece.to, piece.bytes, 0};
      list.bytes += piece.bytes;
      std::memcpy(&wanted[piece.to], pool.bytes() + piece.from, piece.bytes);
      for (const GatherRepeat& repeat : launch.repeats) {
        std::memcpy(&wanted[piece.to + repeat.to], pool.bytes() + piece.from + repeat.from, piece.bytes);
      }
    }
    std::copy(launch.repeats.begin(), launch.repeats.end(),
              reinterpret_cast<GatherRepeat*>(table->pieces + launch.pieces.size()));
    const auto blocks = static_cast<uint32_t>(1 + random() % 8);
    const auto gather = std::make_shared<CudaGather>(device, fake_kernel(), blocks);
    ASSERT_TRUE(gather->start(*table, list, stream->get()).ok());
    stream->drain();
    ASSERT_EQ(std::memcmp(pool.bytes() + kHalf, wanted.data(), kHalf), 0) << "round " << round;
    EXPECT_LE(most_blocks(), static_cast<int>(blocks));
  }
}

}  // namespace
}  // namespace kvlink::testing

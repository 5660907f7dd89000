// SPDX-License-Identifier: Apache-2.0
// How much of a GPU one launch of the kernel may take, while the engine's own kernels run on it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvlink {

/// The path that the bytes of a launch cross, which limits their rate.
enum class GatherLink : uint8_t { kHost, kPeer, kSameGpu };

/// The bytes that a launch has under way, which is about the link's rate times its latency. On an H200, 128
/// KiB fill PCIe 5 x16 in both directions, and 32 KiB for each multiprocessor come within a tenth of a plain
/// copy; what NVLink needs is computed. More would not be faster, and would keep the engine's kernels
/// waiting.
constexpr uint64_t gather_bytes_under_way(GatherLink link, uint32_t num_multiprocessors) {
  if (link == GatherLink::kHost) return 128 << 10;
  return link == GatherLink::kPeer ? 2 << 20 : uint64_t{num_multiprocessors} * (32 << 10);
}

/// The grid of a launch.
struct GatherGrid {
  uint32_t blocks = 1;
  uint32_t lanes = 1;  // threads that take a piece
};

/// Limits how much of a GPU a launch takes. `setting` above 0 is the most blocks, whatever the link.
struct GatherLimits {
  GatherLink link = GatherLink::kSameGpu;
  uint32_t num_multiprocessors = 0;
  uint32_t setting = 0;
};

inline constexpr uint32_t kGatherThreads = 128;    // of a block
inline constexpr uint64_t kGatherLaneBytes = 128;  // that a thread has under way: kAhead words in gather.cu

/// A warp copies each of many pieces. Few large ones get more threads each, and pieces below 512 bytes fewer,
/// one for each word of 16 bytes.
constexpr GatherGrid gather_grid(uint64_t num_copies, uint64_t piece_bytes, const GatherLimits& limits) {
  constexpr uint32_t kFewestLanes = 8, kWarp = 32, kWordBytes = 16, kBlocksEach = 4;
  const uint64_t under_way = gather_bytes_under_way(limits.link, limits.num_multiprocessors);
  const auto at_a_time = [piece_bytes](uint64_t lanes) {
    return std::max<uint64_t>(std::min(piece_bytes, lanes * kGatherLaneBytes), 1);
  };
  uint32_t lanes = kFewestLanes;
  while (lanes < kGatherThreads && lanes * kWordBytes < piece_bytes &&
         (lanes < kWarp || num_copies * at_a_time(lanes) < under_way)) {
    lanes *= 2;
  }
  const uint64_t in_block = kGatherThreads / lanes, block_bytes = in_block * at_a_time(lanes);
  const uint64_t all = std::max<uint64_t>(uint64_t{kBlocksEach} * limits.num_multiprocessors, 1);
  const uint64_t useful = std::min(all, (under_way + block_bytes - 1) / block_bytes);
  const uint64_t most = std::max<uint64_t>(limits.setting > 0 ? limits.setting : useful, 1);
  const uint64_t wanted = std::max<uint64_t>((num_copies + in_block - 1) / in_block, 1);
  return {static_cast<uint32_t>(std::min(wanted, most)), lanes};
}

}  // namespace kvlink

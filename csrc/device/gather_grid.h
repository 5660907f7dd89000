// SPDX-License-Identifier: Apache-2.0
// How much of a GPU one launch of the kernel may take, while the engine's own kernels run on it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvlink {

/// The path that the bytes of a launch cross, which limits their rate.
enum class GatherLink : uint8_t { kHost, kPeer, kSameGpu };

/// Returns the most blocks of threads that a launch may have. A block has 8 KiB under way, so this is about
/// the link's rate times its latency: PCIe needs some ten blocks, NVLink 128, and one GPU's own memory two on
/// each of its multiprocessors. More would not be faster, and would keep the engine's kernels waiting.
/// `setting` above 0 takes precedence.
constexpr uint32_t most_gather_blocks(GatherLink link, uint32_t num_multiprocessors, uint32_t setting) {
  if (setting > 0) return setting;
  const uint32_t all = std::max(2 * num_multiprocessors, 1u);
  if (link == GatherLink::kHost) return std::min(std::clamp(num_multiprocessors / 4, 16u, 32u), all);
  return link == GatherLink::kPeer ? std::min(128u, all) : all;
}

/// The grid of a launch for so many copies of `bytes` in all.
struct GatherGrid {
  uint32_t blocks = 1;
  uint32_t lanes = 1;  // threads that take a piece
};

inline constexpr uint32_t kGatherThreads = 128;  // of a block

/// A warp copies pieces of 2 KiB or less on average, with up to four loads of 16 bytes a thread under way; a
/// whole block copies larger ones.
constexpr GatherGrid gather_grid(uint64_t num_copies, uint64_t piece_bytes, uint32_t most_blocks) {
  constexpr uint32_t kWarp = 32, kWarpBytes = 2048;
  const uint32_t lanes = piece_bytes <= kWarpBytes ? kWarp : kGatherThreads;
  const uint64_t at_a_time = kGatherThreads / lanes;
  const uint64_t wanted = std::max<uint64_t>((num_copies + at_a_time - 1) / at_a_time, 1);
  return {static_cast<uint32_t>(std::min<uint64_t>(wanted, most_blocks)), lanes};
}

}  // namespace kvlink

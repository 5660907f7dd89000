// SPDX-License-Identifier: Apache-2.0
// How much of a GPU a launch takes.
#include "device/gather_grid.h"

#include <gtest/gtest.h>

namespace kvlink {
namespace {

TEST(GatherGrid, TakesWhatTheLinkNeedsAndNoMore) {
  struct Row {
    const char* gpu;
    uint32_t multiprocessors, host, peer, same_gpu;
  };
  for (const Row& row : {Row{"L4", 58, 8, 128, 116}, Row{"A100", 108, 8, 128, 216},
                         Row{"H100", 132, 8, 128, 264}, Row{"B200", 148, 8, 128, 296},
                         Row{"an instance of MIG", 14, 8, 56, 28}, Row{"unknown", 0, 1, 1, 1}}) {
    const auto blocks = [&](GatherLink link, uint32_t setting) {
      return gather_grid(1 << 20, 32 << 10, {link, row.multiprocessors, setting}).blocks;
    };
    EXPECT_EQ(blocks(GatherLink::kHost, 0), row.host) << row.gpu;
    EXPECT_EQ(blocks(GatherLink::kPeer, 0), row.peer) << row.gpu;
    EXPECT_EQ(blocks(GatherLink::kSameGpu, 0), row.same_gpu) << row.gpu;
    EXPECT_EQ(blocks(GatherLink::kHost, 7), 7u) << "as it is set";
  }
}

TEST(GatherGrid, GivesAPieceAsManyThreadsAsItCanUse) {
  struct Row {
    uint64_t copies, bytes;
    uint32_t blocks, lanes;
  };
  const GatherLimits host{GatherLink::kHost, 132, 0};
  for (const Row& row :
       {Row{1 << 20, 256, 64, 16}, Row{1 << 20, 96, 86, 8}, Row{1 << 20, 2048, 16, 32},
        Row{1 << 20, 4096, 8, 32}, Row{128, 4096, 8, 32}, Row{16, 32 << 10, 8, 64}, Row{2, 64 << 10, 2, 128},
        Row{1, 16 << 10, 1, 128}, Row{1, 512, 1, 32}, Row{0, 0, 1, 8}}) {
    const GatherGrid grid = gather_grid(row.copies, row.bytes, host);
    EXPECT_EQ(grid.blocks, row.blocks) << row.copies << " of " << row.bytes;
    EXPECT_EQ(grid.lanes, row.lanes) << row.copies << " of " << row.bytes;
  }
}

}  // namespace
}  // namespace kvlink

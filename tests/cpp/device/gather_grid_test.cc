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
  for (const Row& row : {Row{"L4", 58, 16, 116, 116}, Row{"A100", 108, 27, 128, 216},
                         Row{"H100", 132, 32, 128, 264}, Row{"B200", 148, 32, 128, 296},
                         Row{"an instance of MIG", 14, 16, 28, 28}, Row{"unknown", 0, 1, 1, 1}}) {
    EXPECT_EQ(most_gather_blocks(GatherLink::kHost, row.multiprocessors, 0), row.host) << row.gpu;
    EXPECT_EQ(most_gather_blocks(GatherLink::kPeer, row.multiprocessors, 0), row.peer) << row.gpu;
    EXPECT_EQ(most_gather_blocks(GatherLink::kSameGpu, row.multiprocessors, 0), row.same_gpu) << row.gpu;
    EXPECT_EQ(most_gather_blocks(GatherLink::kHost, row.multiprocessors, 7), 7u) << "as it is set";
  }
}

TEST(GatherGrid, GivesEachPieceAWarpOrABlock) {
  struct Row {
    uint64_t copies, bytes;
    uint32_t blocks, lanes;
  };
  for (const Row& row : {Row{1, 512, 1, 32}, Row{4, 512, 1, 32}, Row{5, 2048, 2, 32}, Row{5, 2049, 5, 128},
                         Row{256, 4096, 128, 128}, Row{1 << 20, 256, 128, 32}, Row{0, 0, 1, 32}}) {
    const GatherGrid grid = gather_grid(row.copies, row.bytes, 128);
    EXPECT_EQ(grid.blocks, row.blocks) << row.copies << " of " << row.bytes;
    EXPECT_EQ(grid.lanes, row.lanes) << row.copies << " of " << row.bytes;
  }
}

}  // namespace
}  // namespace kvlink

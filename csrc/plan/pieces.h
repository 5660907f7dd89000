// SPDX-License-Identifier: Apache-2.0
// Plans reads of single pieces, for callers that have addresses and no blocks. Pure.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "plan/planner.h"

namespace kvlink {

/// Bytes of the owner's region `remote_region` from `remote` on, and where they land.
struct ReadPiece {
  uint64_t remote = 0;
  std::byte* local = nullptr;
  uint64_t bytes = 0;
  uint32_t remote_region = 0;  // as Connection::establish() returned it
  uint32_t local_region = 0;   // see Engine::segment_region()
};

/// Returns reads of at most Planner::kMaxOpBytes and kMaxOpSegments. Pieces that follow one another at the
/// owner are read at once. Pieces without bytes are left out.
std::shared_ptr<const Plan> plan_pieces(std::span<const ReadPiece> pieces);

}  // namespace kvlink

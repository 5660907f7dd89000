// SPDX-License-Identifier: Apache-2.0
// Plans a request whose layers have caches of several shapes: one planner and one pair of block lists for
// each cache group. Pure.
#pragma once

#include <memory>
#include <span>

#include "plan/planner.h"

namespace kvlink {

/// The reads of one cache group.
struct GroupRead {
  std::shared_ptr<const Planner> planner;
  std::span<const uint32_t> owner_blocks, reader_blocks;
  Range tokens;  // of a group of states: positions in its block lists, as a state counts as one token
  Range layers;
  bool at_end = false;  // a streaming pull reads it once the whole request is ready
};

/// Plans all groups into one plan. Refuses what Planner::plan refuses, and groups that write the same bytes:
/// their layouts share memory at the reader, and two of the block lists name the same memory.
Status plan_groups(const GroupRead& first, std::span<const GroupRead> more, Plan& into);

/// Plans `scope` of a group behind what `into` holds. REQUIRES that `into` has no repeats. On failure `into`
/// is empty.
Status plan_behind(const GroupRead& group, const PlanScope& scope, Plan& into);

}  // namespace kvlink

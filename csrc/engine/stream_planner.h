// SPDX-License-Identifier: Apache-2.0
// Plans a pull unit by unit, as its owner writes them. Pure; the transfer that has it guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/pull_request.h"

namespace kvlink {

class StreamPlanner {
 public:
  /// Copies the block lists, and checks the whole pull. REQUIRES a streaming request.
  Status start(const PullRequest& request);
  /// Plans what is ready beyond the units planned before; `into` may be empty. REQUIRES any_beyond(ready).
  Status plan(uint64_t ready, bool fold, Plan& into);

  bool any_beyond(uint64_t ready) const { return std::min(ready, total_units_) > planned_units_; }
  uint64_t planned_units() const { return planned_units_; }
  bool all_planned() const { return planned_units_ >= total_units_; }

 private:
  struct Followed {
    GroupRead read;  // with the lists below
    std::vector<uint32_t> owner_blocks, reader_blocks;
  };
  void follow(const GroupRead& read);
  PlanScope newly_ready(const GroupRead& read, uint64_t ready) const;

  StreamUnit unit_ = StreamUnit::kNone;
  std::vector<Followed> groups_;
  uint64_t planned_units_ = 0, total_units_ = 0, batch_units_ = UINT64_MAX;
};

}  // namespace kvlink

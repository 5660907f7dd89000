// SPDX-License-Identifier: Apache-2.0
// Plans a pull unit by unit, as its owner writes them. Pure; the transfer that has it guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lease/lease_words.h"
#include "plan/groups.h"

namespace kvlink {

/// The units that LeaseSlot::ready counts if a pull starts before all is written.
enum class StreamUnit : uint8_t { kNone, kBlocks, kLayers, kTokens };

/// A pull of one cache group, which it describes itself, or of several: then `more` has the others. The block
/// lists are copied only when streaming.
struct PullRequest : GroupRead {
  std::span<const GroupRead> more;
  /// Instead of the groups: the reads, planned before by the same connection.
  std::shared_ptr<const Plan> prepared;
  LeaseSeat seat;  // settle_nonce 0 or kSharedSeat: validate, do not settle
  StreamUnit stream = StreamUnit::kNone;
  /// Reads the slot before the data. To be used after the connection was cut: if its owner cut it because the
  /// lease has ended, a second announcement would be answered by a second cut.
  bool looks_first = false;
  uint32_t num_tokens = 0;  // of the offer; used with kTokens
  int64_t deadline_ns = 0;  // by now_ns()
  /// With a StreamUnit: at most this many units are read before the slot is checked again; 0 for no limit.
  uint64_t batch_units = 0;
  /// Used by a streaming pull; may be empty. The first `units` have landed, and the nonce was read behind
  /// them. Nothing writes their bytes any more, so others may read them. Never decreases. Called as
  /// TransferObserver is.
  std::function<void(uint64_t units)> on_proven;
};

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

// SPDX-License-Identifier: Apache-2.0
// When the open seats of a lease table expire.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/check.h"

namespace kvlink {

/// The deadline of each slot's seat while it is open. To find those that have passed costs one comparison per
/// group of slots in which none has, so idle seats are not looked at one by one.
class SeatDeadlines {
 public:
  /// The deadline of a seat that does not expire.
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max() - 1;

  explicit SeatDeadlines(size_t num_slots)
      : by_slot_(num_slots, kNone), earliest_((num_slots + kGroup - 1) / kGroup, kNone) {}

  bool has(uint32_t slot) const { return by_slot_[slot] != kNone; }
  int64_t at(uint32_t slot) const {
    KVLINK_CHECK(has(slot));
    return by_slot_[slot];
  }
  void set(uint32_t slot, int64_t deadline_ns) {
    by_slot_[slot] = deadline_ns;
    int64_t& earliest = earliest_[slot / kGroup];
    earliest = std::min(earliest, deadline_ns);
  }
  void remove(uint32_t slot) { by_slot_[slot] = kNone; }
  /// Calls `expire` for each slot whose deadline has passed, the lowest first. It removes that deadline, and
  /// may remove others.
  template <typename Expire>
  void take_passed(int64_t now_ns, Expire expire) {
    for (size_t group = 0; group < earliest_.size(); ++group) {
      if (now_ns < earliest_[group]) continue;
      const size_t first = group * kGroup, end = std::min(first + kGroup, by_slot_.size());
      for (size_t slot = first; slot < end; ++slot) {
        if (now_ns >= by_slot_[slot]) expire(static_cast<uint32_t>(slot));
      }
      const auto begin = by_slot_.begin();
      earliest_[group] =
          *std::min_element(begin + static_cast<ptrdiff_t>(first), begin + static_cast<ptrdiff_t>(end));
    }
  }
  const std::vector<int64_t>& all() const { return by_slot_; }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  static constexpr size_t kGroup = 256;

  std::vector<int64_t> by_slot_;
  std::vector<int64_t> earliest_;  // by group: no deadline in it is earlier
};

}  // namespace kvlink

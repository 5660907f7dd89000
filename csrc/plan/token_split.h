// SPDX-License-Identifier: Apache-2.0
// Counts the tokens of a request that one of several ranks holds. Pure.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvlink {

/// The tokens of a request that a worker holds: `interleave` at a time in turn with the other ranks. Its
/// blocks hold them without gaps.
struct TokenSplit {
  static constexpr uint32_t kMaxSize = 1024;

  uint32_t rank = 0, size = 1, interleave = 1;

  bool is_whole() const { return size == 1; }
  /// Returns how many of the tokens before `position` the worker holds.
  uint64_t num_before(uint64_t position) const {
    const uint64_t turn = uint64_t{size} * interleave, begin = uint64_t{rank} * interleave;
    const uint64_t in_turn = position % turn;
    return position / turn * interleave +
           std::min<uint64_t>(in_turn > begin ? in_turn - begin : 0, interleave);
  }
  /// Returns the position of the token that is number `index` among those that the worker holds.
  uint64_t position_of(uint64_t index) const {
    return (index / interleave * size + rank) * interleave + index % interleave;
  }
};

}  // namespace kvlink

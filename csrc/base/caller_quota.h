// SPDX-License-Identifier: Apache-2.0
// Which entry goes when there are too many of them: one caller's flood costs no other caller anything.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>

namespace kvlink {

/// Entries are named by numbers; those of one caller are kept oldest first. Not thread safe.
class CallerQuota {
 public:
  CallerQuota(size_t most_of_one, size_t most) : most_of_one_(most_of_one), most_(most) {}

  /// Takes an entry in. Returns the one that has to go for it: the oldest of the same caller when that has
  /// its share, or else, when all places are taken, the oldest of the caller that has most.
  std::optional<uint64_t> add(uint64_t caller, uint64_t entry);
  void remove(uint64_t caller, uint64_t entry);
  void clear();
  size_t size() const { return size_; }

 private:
  using Callers = std::unordered_map<uint64_t, std::deque<uint64_t>>;

  uint64_t drop_oldest(Callers::iterator of);

  const size_t most_of_one_, most_;
  Callers callers_;  // each has an entry
  size_t size_ = 0;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The connections that announced that they read under a lease. They are cut off if it ends during the read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "lease/lease_words.h"

namespace kvlink {

/// The readers by slot. Empty, and free of cost, if no transport fences.
class LeaseReaders {
 public:
  void hear(uint32_t slot, const Announcement& said) {
    std::vector<uint64_t>& known = readers_[slot];
    const auto found = std::find(known.begin(), known.end(), said.connection);
    if (said.withdrawn && found != known.end()) known.erase(found);
    if (!said.withdrawn && found == known.end()) known.push_back(said.connection);
    if (known.empty()) readers_.erase(slot);
  }
  const std::map<uint32_t, std::vector<uint64_t>>& all() const { return readers_; }
  void forget(uint32_t slot) { readers_.erase(slot); }
  /// Appends the readers of the slot, and forgets them.
  void take(uint32_t slot, std::vector<uint64_t>& taken) {
    const auto found = readers_.find(slot);
    if (found == readers_.end()) return;
    taken.insert(taken.end(), found->second.begin(), found->second.end());
    readers_.erase(found);
  }

 private:
  std::map<uint32_t, std::vector<uint64_t>> readers_;
};

}  // namespace kvlink

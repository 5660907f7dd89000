// SPDX-License-Identifier: Apache-2.0
#include "base/caller_quota.h"

#include <algorithm>

namespace kvlink {

std::optional<uint64_t> CallerQuota::add(uint64_t caller, uint64_t entry) {
  std::optional<uint64_t> dropped;
  const auto known = callers_.find(caller);
  if (known != callers_.end() && known->second.size() >= most_of_one_) {
    dropped = drop_oldest(known);
  } else if (size_ >= most_) {
    const auto fewer = [](const auto& one, const auto& other) {
      return one.second.size() < other.second.size();
    };
    dropped = drop_oldest(std::max_element(callers_.begin(), callers_.end(), fewer));
  }
  callers_[caller].push_back(entry);
  ++size_;
  return dropped;
}

void CallerQuota::remove(uint64_t caller, uint64_t entry) {
  const auto known = callers_.find(caller);
  if (known == callers_.end()) return;
  const size_t removed = std::erase(known->second, entry);
  size_ -= removed;
  if (known->second.empty()) callers_.erase(known);
}

void CallerQuota::clear() {
  callers_.clear();
  size_ = 0;
}

uint64_t CallerQuota::drop_oldest(Callers::iterator of) {
  const uint64_t oldest = of->second.front();
  of->second.pop_front();
  --size_;
  if (of->second.empty()) callers_.erase(of);
  return oldest;
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Tracks under which leases the pulls of one connection read, as announced to the owner.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "base/sync.h"
#include "lease/lease_words.h"

namespace kvlink {

/// Shared by the lanes of a connection. Any thread.
class AnnouncedReaders {
 public:
  explicit AnnouncedReaders(uint32_t connection) : connection_(connection) {}

  /// Returns the word that announces this connection.
  uint64_t announcement(uint64_t nonce) const {
    return Announcement{connection_, Announcement::tag_of(nonce)}.word();
  }
  uint64_t withdrawal(uint64_t nonce) const {
    return Announcement{connection_, Announcement::tag_of(nonce), true}.word();
  }

  /// Counts one more pull that reads under the lease with this nonce.
  void begin(uint64_t nonce) {
    const std::lock_guard lock(mutex_);
    ++pulls_[nonce];
  }
  /// Counts one pull less, if `is_first()`: no lane has reported its end before. Returns true if no pull
  /// reads under the lease any more, whichever lane asks.
  template <typename IsFirst>
  bool end(uint64_t nonce, IsFirst is_first) {
    const std::lock_guard lock(mutex_);
    const auto found = pulls_.find(nonce);
    if (found == pulls_.end()) return true;
    if (is_first() && --found->second == 0) pulls_.erase(found);
    return !pulls_.contains(nonce);
  }

 private:
  const uint32_t connection_;
  Mutex mutex_;
  std::unordered_map<uint64_t, uint32_t> pulls_;  // by nonce
};

}  // namespace kvlink

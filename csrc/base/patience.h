// SPDX-License-Identifier: Apache-2.0
// How long a call may wait. A call that holds a lock while it waits for a peer takes one, so that whoever
// needs the lock to close what waits can end the wait first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/status.h"
#include "base/sync.h"

namespace kvlink {

/// A deadline, and a flag by which another thread ends the wait before it. The flag must outlive the object.
class Patience {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): most callers only have a timeout
  Patience(int64_t timeout_ns) : until_ns_(now_ns() + timeout_ns) {}
  Patience(int64_t timeout_ns, const Atomic<bool>& given_up)
      : until_ns_(now_ns() + timeout_ns), given_up_(&given_up) {}

  /// Returns a patience of the nth part of the time that is left. The same flag ends it.
  Patience part(size_t n) const {
    Patience part(*this);
    part.until_ns_ = now_ns() + left_ns() / static_cast<int64_t>(n);
    return part;
  }
  bool given_up() const { return given_up_ && given_up_->load(std::memory_order_acquire); }
  /// Returns 0 when the wait is over.
  int64_t left_ns() const { return given_up() ? 0 : std::max<int64_t>(until_ns_ - now_ns(), 0); }
  bool over() const { return left_ns() == 0; }
  /// Returns how long to wait in one piece: not long, so that the flag is seen soon after it was set.
  int64_t piece_ns() const { return std::min(left_ns(), kPieceNs); }
  /// Returns `late`, or that the caller has given up.
  Status why_over(Status late) const {
    return given_up() ? Status::Cancelled("the connection was closed while it was made") : std::move(late);
  }

 private:
  static constexpr int64_t kPieceNs = 20'000'000;

  int64_t until_ns_;
  const Atomic<bool>* const given_up_ = nullptr;
};

}  // namespace kvlink

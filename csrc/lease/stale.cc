// SPDX-License-Identifier: Apache-2.0
#include "lease/stale.h"

#include <string>

namespace kvlink {

Status stale_blocks(uint64_t found) {
  const auto because = [](StaleReason why, const char* what) {
    return Status::Stale(why, std::string("the lease ended before the read did: ") + what);
  };
  switch (found) {
    case 0:
      return Status::Stale(StaleReason::kNeverGranted,
                           "the slot has never had a lease: the owner has not granted it yet");
    case static_cast<uint64_t>(StaleReason::kSettled):
      return because(StaleReason::kSettled, "another reader of its seat settled it");
    case static_cast<uint64_t>(StaleReason::kExpired):
      return because(StaleReason::kExpired, "its time to live ran out");
    case static_cast<uint64_t>(StaleReason::kAborted):
      return because(StaleReason::kAborted, "its owner aborted it");
    case static_cast<uint64_t>(StaleReason::kEvicted):
      return because(StaleReason::kEvicted, "its owner gave the blocks new content");
    default:
      return because(StaleReason::kReused, "a new lease has its slot");
  }
}

}  // namespace kvlink

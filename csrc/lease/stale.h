// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/status.h"

namespace kvlink {

/// Larger words may be nonces, which are nobody else's business: owners tell them as this.
inline constexpr uint64_t kLargestToldWord = 255;

/// What it means that `found` stands in the slot in place of the ticket's nonce.
Status stale_blocks(uint64_t found);

}  // namespace kvlink

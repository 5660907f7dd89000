// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/status.h"

namespace kvlink {

/// Larger words may be nonces, which must not be disclosed. Owners report them as this value.
inline constexpr uint64_t kLargestToldWord = 255;

/// Returns the error for a slot that has `found` instead of the ticket's nonce.
Status stale_blocks(uint64_t found);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace kvlink {

/// Returns how often the process has called operator new so far.
size_t num_allocations();

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Refuses layouts that would read or write outside their regions. Pure; foreign layouts come through here.
#pragma once

#include <span>
#include <string_view>

#include "plan/planner.h"

namespace kvlink {

/// Checks counts, strides (rows of one plane never overlap) and that every plane is inside its region.
/// kConfig names the field; `who` starts the sentence ("reader layout").
Status check_layout(const Layout& layout, std::string_view who, std::span<const uint64_t> region_bytes);

/// Refuses planes that share bytes, as a destination must not have; but not layers upon each other, whose
/// blocks come from one table in turn (cache groups): a plan takes one of them. REQUIRES check_layout passed.
Status check_planes_apart(const Layout& layout, std::string_view who);

/// kLayoutMismatch with the first field in which the two ends describe different caches.
Status check_same_cache(const Layout& reader, const Layout& owner);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Refuses layouts that would read or write outside their regions. Pure; foreign layouts come through here.
#pragma once

#include <span>
#include <string_view>

#include "plan/planner.h"

namespace kvlink {

/// Checks counts, strides (rows of one plane never overlap), and that every plane is inside its region.
/// kConfig names the field; `who` begins the message ("reader layout").
Status check_layout(const Layout& layout, std::string_view who, std::span<const uint64_t> region_bytes);

/// Refuses planes that share bytes, which a destination must not have. Layers upon each other are allowed if
/// their blocks come from one table in turn (cache groups), because a plan takes only one of them. REQUIRES
/// that check_layout passed.
Status check_planes_apart(const Layout& layout, std::string_view who);

/// Returns kLayoutMismatch with the first field in which the two ends describe different caches.
Status check_same_cache(const Layout& reader, const Layout& owner);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "engine/cost_model.h"

namespace kvlink {

/// Returns what is assumed of a transport, "fault+X" included, before any pull.
Cost prior_cost(std::string_view transport);

}  // namespace kvlink

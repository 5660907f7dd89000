// SPDX-License-Identifier: Apache-2.0
// What version 1 takes of layouts, and why it refuses the others.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "capi/outcome.h"
#include "codec/card.h"

namespace kvlink::capi {

/// Reads a layout of the program, and checks what its planes do not need regions for.
Outcome take_layout(const kvl_layout* from, CardLayout& into);
/// Returns kLayoutMismatch, or kConfig that names what only Python plans, unless this worker's groups can be
/// read from an owner with these.
Status check_groups(const WorkerCard& owner, std::span<const CardLayout> own);
/// Returns the 8 bytes of the identity that a model's text begins with, or 0 for free text.
uint64_t model_number(std::string_view text);

}  // namespace kvlink::capi

// SPDX-License-Identifier: Apache-2.0
// Which ports of a reader and an owner carry lanes to each other, and what each pair can carry.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "transports/verbs/protocol.h"

namespace kvlink::verbs {

struct Rail {
  uint32_t local = 0, remote = 0;  // indices into the two lists
  double mbps = 0;
};

/// Joins the i-th with the i-th of those that can reach each other; the shorter side's ports serve several in
/// turn. A port's rate is divided among its rails, and a rail has the lesser of its two parts. The widest
/// come first. Empty: no port of one side can reach the other, and why_apart() says why.
std::vector<Rail> pair(std::span<const NicAddress> local, std::span<const NicAddress> remote);
Status why_apart(const NicAddress& local, const NicAddress& remote);

}  // namespace kvlink::verbs

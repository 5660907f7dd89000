// SPDX-License-Identifier: Apache-2.0
// Decides which ports of a reader and an owner carry lanes to each other, and their rates.
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

/// Joins the i-th ports of both sides that can reach each other, first those of one network among themselves;
/// the ports of the shorter side serve several in turn. A port's rate is divided among its rails, and a rail
/// has the smaller of its two parts. The widest come first. If the result is empty, no ports reach each
/// other, and why_apart() gives the reason.
std::vector<Rail> pair(std::span<const NicAddress> local, std::span<const NicAddress> remote);
Status why_apart(const NicAddress& local, const NicAddress& remote);

}  // namespace kvlink::verbs

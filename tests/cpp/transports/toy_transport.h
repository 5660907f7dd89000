// SPDX-License-Identifier: Apache-2.0
// The transport of docs/design/adding-a-transport.md, and a table that has it besides the built-in ones.
#pragma once

#include <span>
#include <vector>

#include "transports/registry.h"

namespace kvlink::testing {

/// Reads by pread of /proc/PID/mem.
extern const TransportInfo kToy;

inline std::span<const TransportInfo> transports_and_toy() {
  static const std::vector<TransportInfo> table = [] {
    std::vector<TransportInfo> rows(transports().begin(), transports().end());
    rows.push_back(kToy);
    return rows;
  }();
  return table;
}

}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// The transport of docs/design/adding-a-transport.md, and a table that has it besides the built-in ones, and
// providers of libfabric.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "transports/factories.h"
#include "transports/registry.h"

namespace kvlink::testing {

/// Reads by pread of /proc/PID/mem.
extern const TransportInfo kToy;

inline constexpr char kSockets[] = "sockets", kRxm[] = "tcp;ofi_rxm";  // of libfabric

template <const char* provider>
Result<std::unique_ptr<Transport>> fabric_by(const TransportOptions& options) {
  TransportOptions chosen = options;
  chosen.fabric_provider = provider;
  return fabric_make(chosen);
}

inline std::span<const TransportInfo> transports_and_toy() {
  static const std::vector<TransportInfo> table = [] {
    std::vector<TransportInfo> rows(all_transports().begin(), all_transports().end());
    rows.push_back(kToy);
    rows.push_back({"sockets", "fabric by this provider", 1, fabric_probe, fabric_by<kSockets>});
    rows.push_back({"rxm", "fabric by this provider", 1, fabric_probe, fabric_by<kRxm>});
    return rows;
  }();
  return table;
}

}  // namespace kvlink::testing

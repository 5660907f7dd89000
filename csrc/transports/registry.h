// SPDX-License-Identifier: Apache-2.0
// The transports by name. Only registry.cc names them all.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "transport_api/options.h"
#include "transport_api/transport.h"

namespace kvlink {

/// One row of the table in transports/registry.cc.
struct TransportInfo {
  const char* name;
  const char* summary;
  uint32_t default_lanes;  // that Transport::open makes of 0, where one port leads to one port
  Status (*probe)();       // ok, or why this machine cannot use it and the fix
  Result<std::unique_ptr<Transport>> (*make)(const TransportOptions&);
};

/// The transports that are used without being named, best first for a peer that several can reach.
std::span<const TransportInfo> transports();
/// Every transport built in: also those that are only used, and probed, where an operator names them.
std::span<const TransportInfo> all_transports();
/// Returns the row of "shm", also for "fault+shm". Null if there is no such transport.
const TransportInfo* find_transport(std::string_view name,
                                    std::span<const TransportInfo> table = all_transports());
/// A provider of libfabric on this machine: what decides how it serves, or why it does not.
struct FabricProvider {
  std::string name, facts, why_not;
};
/// Opens each, over IP at the address `host`.
Result<std::vector<FabricProvider>> fabric_providers(const std::string& host);

/// Makes a transport of the table; "fault+X" wraps X in the fault transport.
Result<std::unique_ptr<Transport>> make_transport(std::string_view name, const TransportOptions& options,
                                                  std::span<const TransportInfo> table = all_transports());

}  // namespace kvlink

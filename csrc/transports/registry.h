// SPDX-License-Identifier: Apache-2.0
// The transports by name. Only registry.cc names them all.
#pragma once

#include <memory>
#include <span>
#include <string_view>

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

/// Every transport built in, best first for a peer that several can reach.
std::span<const TransportInfo> transports();
/// Returns the row of "shm", also for "fault+shm". Null if there is no such transport.
const TransportInfo* find_transport(std::string_view name,
                                    std::span<const TransportInfo> table = transports());
/// Makes a transport of the table; "fault+X" wraps X in the fault transport.
Result<std::unique_ptr<Transport>> make_transport(std::string_view name, const TransportOptions& options,
                                                  std::span<const TransportInfo> table = transports());

}  // namespace kvlink

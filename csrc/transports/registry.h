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
  uint32_t default_lanes;  // of a connection, unless configured or Transport::lanes_to knows better
  Status (*probe)();       // ok, or why this machine cannot use it and the fix
  Result<std::unique_ptr<Transport>> (*make)(const TransportOptions&);
};

/// Every transport built in, best first for a peer that several can reach.
std::span<const TransportInfo> transports();
/// Knows "shm" and wrapped names such as "fault+shm". Null when there is no such transport.
const TransportInfo* find_transport(std::string_view name);
/// Makes a transport by the names find_transport knows; "fault+X" wraps X.
Result<std::unique_ptr<Transport>> make_transport(std::string_view name, const TransportOptions& options);

}  // namespace kvlink

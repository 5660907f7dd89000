// SPDX-License-Identifier: Apache-2.0
// The factories of the transports, for transports/registry.cc and the transports themselves. Other code uses
// names.
#pragma once

#include <memory>

#include "transport_api/options.h"
#include "transport_api/transport.h"

namespace kvlink {

Status loopback_probe();
Result<std::unique_ptr<Transport>> loopback_make(const TransportOptions& options);

Status shm_probe();
Result<std::unique_ptr<Transport>> shm_make(const TransportOptions& options);

Status cma_probe();
Result<std::unique_ptr<Transport>> cma_make(const TransportOptions& options);

Status tcp_probe();
Result<std::unique_ptr<Transport>> tcp_make(const TransportOptions& options);

Status cuda_probe();
Result<std::unique_ptr<Transport>> cuda_make(const TransportOptions& options);

Status verbs_probe();
Result<std::unique_ptr<Transport>> verbs_make(const TransportOptions& options);

Status fabric_probe();
Result<std::unique_ptr<Transport>> fabric_make(const TransportOptions& options);

/// Wraps `inner` with the plan in `options.fault`. Returns kConfig with the grammar if the plan does not
/// parse.
Result<std::unique_ptr<Transport>> fault_wrap(std::unique_ptr<Transport> inner,
                                              const TransportOptions& options);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The reader's end: an endpoint of libfabric, and a socket that shows whether the owner lives.
#pragma once

#include <memory>

#include "transport_api/transport.h"
#include "transports/fabric/domain.h"

namespace kvlink::fabric {

/// `liveness` connects to the owner's Address::liveness.
Result<std::unique_ptr<Endpoint>> open_endpoint(std::shared_ptr<const Domain> domain, const Address& owner,
                                                std::unique_ptr<Endpoint> liveness);

}  // namespace kvlink::fabric

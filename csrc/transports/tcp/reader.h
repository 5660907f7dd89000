// SPDX-License-Identifier: Apache-2.0
// The reader's end of a tcp connection.
#pragma once

#include <memory>

#include "transport_api/transport.h"
#include "transports/tcp/socket.h"

namespace kvlink::tcp {

std::unique_ptr<Endpoint> make_reader(const Address& owner, uint32_t lane);

/// Encodes the reader's hello, which the control plane carries.
std::string encode_hello(uint32_t lane);
/// Refuses other versions and malformed blobs.
Status check_hello(std::string_view hello);

}  // namespace kvlink::tcp

// SPDX-License-Identifier: Apache-2.0
// Where a worker's native channel listens, and what admits to it: the `channel` of its card. It is secret.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "channel/session.h"
#include "transports/tcp/socket.h"

namespace kvlink::channel {

inline constexpr size_t kMaxAddresses = 4;
inline constexpr uint32_t kNeedsTls = 1;  // then nobody connects: the channel has none

struct ChannelAddress {
  std::vector<std::string> addresses;  // "host:port", tried in this order
  Credentials credentials;
  uint32_t flags = 0;  // one that a reader does not know forbids it to connect
};

/// Parses "10.0.0.1:7000" or "[::1]:7000". Names are refused: a card must not make its reader ask a name
/// server.
Result<tcp::Address> parse_address(std::string_view text);

}  // namespace kvlink::channel

// SPDX-License-Identifier: Apache-2.0
// Addresses and sockets, the same at both ends of the tcp transport. Every socket is non-blocking.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvlink::tcp {

struct Address {
  std::string host;  // numeric
  uint16_t port = 0;
  uint64_t instance = 0;  // random, one for each owner

  std::string encode() const;
  /// Refuses blobs that encode() did not write and hosts that are not numeric.
  static Result<Address> parse(std::string_view blob);
  /// "127.0.0.1:7000" or "[::1]:7000".
  std::string text() const;
};

/// Binds `host`, a name or a number, and listens. Refuses a wildcard, which peers cannot dial, unless `any`.
Result<UniqueFd> listen_on(const std::string& host, uint16_t port, bool any = false);
/// Whether `host` is a number that peers can dial.
bool can_be_dialled(const std::string& host);
/// Where `socket` is bound.
Result<Address> local_address(int socket);
/// Starts connecting; the socket becomes writable when it is decided.
Result<UniqueFd> start_connect(const Address& to);
/// No delay for small frames; notices within seconds a peer host that vanished.
/// False with errno set.
bool tune(int socket);
/// Between two ends of this host nothing is shared that pacing would spare, and the timers of a congestion
/// control that paces (BBR) cost bare sockets 11 to 21 % of their CPU time (1 to 64 MiB in pieces of 4 and
/// 16 KiB). No effect on other connections.
void leave_unpaced_in_host(int socket);
/// Resets the connection at once, even if another process holds a copy of the descriptor.
void cut(int socket);
/// "what: the system's sentence for errno".
std::string errno_text(const std::string& what);

}  // namespace kvlink::tcp

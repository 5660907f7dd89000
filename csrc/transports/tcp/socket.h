// SPDX-License-Identifier: Apache-2.0
// Addresses and sockets for both ends of the tcp transport. Every socket is non-blocking.
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
  /// Refuses blobs that encode() did not write, and hosts that are not numeric.
  static Result<Address> parse(std::string_view blob);
  /// Returns "127.0.0.1:7000" or "[::1]:7000".
  std::string text() const;
};

/// Binds `host`, a name or a number, and listens. Refuses a wildcard, which peers cannot dial, unless `any`.
Result<UniqueFd> listen_on(const std::string& host, uint16_t port, bool any = false);
/// Returns whether `host` is a number that peers can dial.
bool can_be_dialled(const std::string& host);
/// Returns the address that `socket` is bound to.
Result<Address> local_address(int socket);
/// Starts to connect. The socket becomes writable when the result is known.
Result<UniqueFd> start_connect(const Address& to);
/// Sends small frames without delay, and notices a vanished peer host within seconds. Returns false with
/// errno set.
bool tune(int socket);
/// Turns pacing off if both ends are on this host. Nothing shared needs it there, and the timers of a pacing
/// congestion control (BBR) cost bare sockets 11 to 21 % of their CPU time (1 to 64 MiB in pieces of 4 and 16
/// KiB). Other connections are not affected.
void leave_unpaced_in_host(int socket);
/// Resets the connection at once, even if another process holds a copy of the descriptor.
void cut(int socket);
/// Returns "what: the system's message for errno".
std::string errno_text(const std::string& what);

}  // namespace kvlink::tcp

// SPDX-License-Identifier: Apache-2.0
// IP addresses in Gids: IPv6, and IPv4 mapped into IPv6.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "transports/verbs/protocol.h"

namespace kvlink::verbs {

/// A socket address for the kernel.
class SocketAddress {
 public:
  SocketAddress(const Gid& ip, uint16_t port);
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage_); }

 private:
  sockaddr_storage storage_{};
};

/// Returns whether the address is an IPv4 one mapped into IPv6.
bool is_v4(const Gid& ip);
std::string ip_text(const Gid& ip);

/// Returns this machine's addresses of interfaces that are up, IPv4 first, without link-local ones.
std::vector<Gid> local_ips();

}  // namespace kvlink::verbs

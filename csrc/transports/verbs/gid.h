// SPDX-License-Identifier: Apache-2.0
// IP addresses as Gids hold them: IPv6's, and IPv4's mapped into it.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "transports/verbs/protocol.h"

namespace kvlink::verbs {

/// As the kernel wants it.
class SocketAddress {
 public:
  SocketAddress(const Gid& ip, uint16_t port);
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage_); }

 private:
  sockaddr_storage storage_{};
};

/// As an IPv6 address that stands for an IPv4 one.
bool is_v4(const Gid& ip);
std::string ip_text(const Gid& ip);

/// This machine's, of interfaces that are up, IPv4's first. None that is only of one link.
std::vector<Gid> local_ips();

}  // namespace kvlink::verbs

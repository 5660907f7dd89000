// SPDX-License-Identifier: Apache-2.0
// GIDs: the IP addresses in them (IPv6, and IPv4 mapped into IPv6), InfiniBand's subnets, and the choice of
// one.
#pragma once

#include <sys/socket.h>

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
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

/// Chooses among the GIDs of a port.
struct GidChoice {
  std::string text = {};  // as in KVLINK_RDMA_GID: an index, an address or a subnet; empty: any GID
  std::optional<int> index = {};
  Gid prefix{};
  uint32_t prefix_bits = 0;  // of 128

  static Result<GidChoice> parse(const std::string& text);
  bool allows(int at, const Gid& gid) const;
};

/// Returns whether the first `bits` of 128 are the same.
bool same_prefix(const Gid& a, const Gid& b, uint32_t bits);

/// InfiniBand: the LID by which routers forward to the subnet of this GID, or 0 if it has none.
uint16_t flid_of(const Gid& gid);
/// InfiniBand: returns whether a LID of one port reaches the other. The prefix is the first half of a GID. If
/// both have a FLID, its last 16 bits are the subnet.
bool same_subnet(const Gid& a, const Gid& b);

/// An address of an interface. Those whose first `net_bits` of 128 are the same are on its network.
struct LocalIp {
  Gid ip{};
  uint32_t net_bits = 128;
};

/// Returns this machine's addresses of interfaces that are up, IPv4 first, without link-local ones.
std::vector<LocalIp> local_ips();

}  // namespace kvlink::verbs

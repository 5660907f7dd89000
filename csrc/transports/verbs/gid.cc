// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/gid.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace kvlink::verbs {
namespace {

constexpr char kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, '\xff', '\xff'};

const char* v4_of(const Gid& ip) { return ip.data() + sizeof kMapped; }

std::optional<Gid> ip_of(const sockaddr* address) {
  Gid ip{};
  if (address && address->sa_family == AF_INET) {
    std::memcpy(ip.data(), kMapped, sizeof kMapped);
    std::memcpy(ip.data() + sizeof kMapped, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, 4);
    return ip;
  }
  if (!address || address->sa_family != AF_INET6) return {};
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  if (IN6_IS_ADDR_LINKLOCAL(&v6)) return {};
  std::memcpy(ip.data(), &v6, ip.size());
  return ip;
}

}  // namespace

bool is_v4(const Gid& ip) { return std::memcmp(ip.data(), kMapped, sizeof kMapped) == 0; }

SocketAddress::SocketAddress(const Gid& ip, uint16_t port) {
  if (is_v4(ip)) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(storage_);
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    std::memcpy(&v4.sin_addr, v4_of(ip), sizeof v4.sin_addr);
  } else {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(storage_);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    std::memcpy(&v6.sin6_addr, ip.data(), sizeof v6.sin6_addr);
  }
}

std::string ip_text(const Gid& ip) {
  char text[INET6_ADDRSTRLEN] = {};
  if (is_v4(ip)) {
    ::inet_ntop(AF_INET, v4_of(ip), text, sizeof text);
  } else {
    ::inet_ntop(AF_INET6, ip.data(), text, sizeof text);
  }
  return text;
}

std::vector<Gid> local_ips() {
  std::vector<Gid> found;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return found;
  for (const ifaddrs* at = all; at; at = at->ifa_next) {
    if (!(at->ifa_flags & IFF_UP)) continue;
    if (const auto ip = ip_of(at->ifa_addr)) found.push_back(*ip);
  }
  ::freeifaddrs(all);
  std::stable_partition(found.begin(), found.end(), is_v4);
  return found;
}

}  // namespace kvlink::verbs

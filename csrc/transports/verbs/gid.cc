// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/gid.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <bit>
#include <charconv>
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

/// Returns LocalIp::net_bits. Those before a mapped IPv4 address count.
uint32_t net_bits_of(const sockaddr* mask) {
  if (!mask) return 128;
  if (mask->sa_family == AF_INET) {
    const auto bits = std::popcount(reinterpret_cast<const sockaddr_in*>(mask)->sin_addr.s_addr);
    return static_cast<uint32_t>(8 * sizeof kMapped) + static_cast<uint32_t>(bits);
  }
  uint32_t bits = 0;
  for (const uint8_t byte : reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr.s6_addr)
    bits += static_cast<uint32_t>(std::popcount(byte));
  return bits;
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

namespace {

template <typename Number>
bool parse_number(std::string_view text, Number most, Number& into) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, into);
  return error == std::errc{} && stop == end && into <= most;
}

constexpr size_t kFlidAt = 4;  // 10 fixed bits, 22 of 0, 16 of FLID, 16 of subnet prefix, 64 of EUI

}  // namespace

Result<GidChoice> GidChoice::parse(const std::string& text) {
  GidChoice choice;
  if (text.empty()) return choice;
  choice.text = text;
  if (int number; parse_number(text, 255, number) && number >= 0) {
    choice.index = number;
    return choice;
  }
  const size_t slash = text.find('/');
  const std::string address = text.substr(0, slash);
  in6_addr v6{};
  in_addr v4{};
  uint32_t most = 128;
  if (::inet_pton(AF_INET, address.c_str(), &v4) == 1) {
    most = 32;
    std::memcpy(choice.prefix.data(), kMapped, sizeof kMapped);
    std::memcpy(choice.prefix.data() + sizeof kMapped, &v4, sizeof v4);
  } else if (::inet_pton(AF_INET6, address.c_str(), &v6) == 1) {
    std::memcpy(choice.prefix.data(), &v6, sizeof v6);
  } else {
    return Status::Config("\"" + text + "\" chooses no GID: write an index, an address or a subnet");
  }
  uint32_t bits = most;
  if (slash != std::string::npos && !parse_number(std::string_view(text).substr(slash + 1), most, bits)) {
    return Status::Config("\"" + text + "\" is no subnet: write ADDRESS/BITS");
  }
  choice.prefix_bits = 128 - most + bits;
  return choice;
}

bool GidChoice::allows(int at, const Gid& gid) const {
  if (index) return at == *index;
  return same_prefix(gid, prefix, prefix_bits);
}

bool same_prefix(const Gid& a, const Gid& b, uint32_t bits) {
  const size_t bytes = bits / 8;
  if (std::memcmp(a.data(), b.data(), bytes) != 0) return false;
  const uint32_t rest = bits % 8;
  const auto differ = static_cast<uint8_t>(bytes < a.size() ? a[bytes] ^ b[bytes] : 0);
  return rest == 0 || differ >> (8 - rest) == 0;
}

uint16_t flid_of(const Gid& gid) {
  const auto byte = [&gid](size_t at) { return static_cast<uint8_t>(gid[at]); };
  return static_cast<uint16_t>(byte(kFlidAt) << 8 | byte(kFlidAt + 1));
}

bool same_subnet(const Gid& a, const Gid& b) {
  if (std::memcmp(a.data(), b.data(), a.size() / 2) == 0) return true;
  return flid_of(a) != 0 && flid_of(b) != 0 && std::memcmp(&a[kFlidAt + 2], &b[kFlidAt + 2], 2) == 0;
}

std::vector<LocalIp> local_ips() {
  std::vector<LocalIp> found;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return found;
  for (const ifaddrs* at = all; at; at = at->ifa_next) {
    if (!(at->ifa_flags & IFF_UP)) continue;
    if (const auto ip = ip_of(at->ifa_addr)) found.push_back({*ip, net_bits_of(at->ifa_netmask)});
  }
  ::freeifaddrs(all);
  std::stable_partition(found.begin(), found.end(), [](const LocalIp& each) { return is_v4(each.ip); });
  return found;
}

}  // namespace kvlink::verbs

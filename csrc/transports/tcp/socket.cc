// SPDX-License-Identifier: Apache-2.0
#include "transports/tcp/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/blob.h"
#include "base/sys.h"

namespace kvlink::tcp {
namespace {

constexpr int kBacklog = 128;
constexpr size_t kMaxHostBytes = 64;
constexpr int kIdleSeconds = 5, kProbeSeconds = 2, kProbes = 3;
constexpr int kUnackedMs = 15'000;

struct FreeAddrinfo {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Resolved = std::unique_ptr<addrinfo, FreeAddrinfo>;

/// Returns null and sets `why` if `host` does not resolve.
Resolved resolve(const std::string& host, uint16_t port, int flags, std::string& why) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found);
  if (failed != 0) why = failed == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(failed);
  return Resolved(failed == 0 ? found : nullptr);
}

bool is_wildcard(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr == htonl(INADDR_ANY);
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

UniqueFd open_socket(int family) { return UniqueFd(sys::socket(family, SOCK_STREAM | SOCK_NONBLOCK)); }

Result<Address> address_of(int socket, int (*which)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage bound{};
  socklen_t bytes = sizeof bound;
  char host[NI_MAXHOST], port[NI_MAXSERV];
  auto* address = reinterpret_cast<sockaddr*>(&bound);
  if (which(socket, address, &bytes) != 0 ||
      ::getnameinfo(address, bytes, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) !=
          0) {
    return Status::Config("tcp cannot tell its own address");
  }
  return Address{host, static_cast<uint16_t>(std::stoi(port)), 0};
}

}  // namespace

std::string errno_text(const std::string& what) { return what + ": " + std::strerror(errno); }

std::string Address::encode() const { return BlobWriter().bytes(host).u32(port).u64(instance).take(); }

Result<Address> Address::parse(std::string_view blob) {
  BlobReader reader(blob);
  const std::string host(reader.bytes(kMaxHostBytes));
  const uint32_t port = reader.u32();
  const uint64_t instance = reader.u64();
  std::string why;
  if (!reader.done() || port == 0 || port > UINT16_MAX || host.find('\0') != std::string::npos ||
      !resolve(host, static_cast<uint16_t>(port), AI_NUMERICHOST, why)) {
    return Status::Unavailable("the owner's tcp address is malformed", "run the same kvlink at both ends");
  }
  return Address{host, static_cast<uint16_t>(port), instance};
}

std::string Address::text() const {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

bool can_be_dialled(const std::string& host) {
  std::string why;
  const Resolved found = resolve(host, 0, AI_NUMERICHOST, why);
  return found && !is_wildcard(found->ai_addr);
}

Result<UniqueFd> listen_on(const std::string& host, uint16_t port, bool any) {
  std::string why;
  const Resolved found = resolve(host, port, 0, why);
  if (!found) return Status::Config("tcp cannot listen on host '" + host + "': " + why);
  if (!any && is_wildcard(found->ai_addr)) {
    return Status::Config("tcp cannot listen on '" + host +
                          "': name the address that peers reach this host by");
  }
  UniqueFd socket = open_socket(found->ai_family);
  if (!socket) return sys::transport_failed("tcp cannot listen", "socket", errno);
  if (!sys::set_option(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1)) {
    return sys::failed(Code::kConfig, "tcp cannot listen", "setsockopt", errno);
  }
  if (::bind(socket.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(socket.get(), kBacklog) != 0) {
    return Status::Config(errno_text("tcp cannot listen on " + Address{host, port, 0}.text()));
  }
  return socket;
}

Result<Address> local_address(int socket) { return address_of(socket, ::getsockname); }

Result<UniqueFd> start_connect(const Address& to) {
  std::string why;
  const Resolved found = resolve(to.host, to.port, AI_NUMERICHOST, why);
  if (!found) return Status::Unreachable(to.text() + ": " + why);
  UniqueFd socket = open_socket(found->ai_family);
  const std::string doing = "cannot connect to " + to.text();
  if (!socket) return sys::failed(Code::kTransportUnavailable, doing, "socket", errno);
  if (!tune(socket.get())) return sys::failed(Code::kTransportUnavailable, doing, "setsockopt", errno);
  if (::connect(socket.get(), found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS) {
    return Status::Unreachable(errno_text(doing));
  }
  return socket;
}

bool tune(int socket) {
  return sys::set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1) &&
         sys::set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1) &&
         sys::set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds) &&
         sys::set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds) &&
         sys::set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes) &&
         sys::set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kUnackedMs);
}

void leave_unpaced_in_host(int socket) {
  Result<Address> ours = address_of(socket, ::getsockname), theirs = address_of(socket, ::getpeername);
  if (!ours.ok() || !theirs.ok() || ours->host != theirs->host) return;
  ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);  // every kernel has it and allows it
}

void cut(int socket) {
  sockaddr nowhere{};
  nowhere.sa_family = AF_UNSPEC;
  ::connect(socket, &nowhere, sizeof nowhere);
}

}  // namespace kvlink::tcp

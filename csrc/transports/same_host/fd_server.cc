// SPDX-License-Identifier: Apache-2.0
#include "transports/same_host/fd_server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/host_identity.h"
#include "base/sys.h"

namespace kvlink {
namespace {

constexpr int kMaxEvents = 16;                                      // handled by one serve()
constexpr size_t kMaxPending = 64;                                  // clients that have not shown a secret
constexpr size_t kSecretBytes = kFdSecretBytes - sizeof(uint64_t);  // what readers show begins with its id
constexpr Invitations::Limits kInvitationLimits{
    .secret_bytes = kSecretBytes, .most_of_one = 256, .most = 1024, .lifetime_ns = INT64_MAX};
constexpr int kBacklog = 64;

Status cannot_listen(const char* call) {
  return sys::transport_failed("cannot listen on a Unix socket", call, errno);
}

// A spare descriptor, closed for a moment to refuse a reader when no other is left.
UniqueFd open_spare() { return UniqueFd(sys::open_file("/dev/null", O_RDONLY)); }

std::string random_name() {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string name(kSocketPrefix);
  for (const char byte : random_bytes(kSocketDigits / 2)) name += {kHex[byte >> 4 & 15], kHex[byte & 15]};
  return name;
}

bool is_trusted(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         (peer.uid == ::geteuid() || peer.uid == 0);
}

// Sends one message with its descriptors. Returns false with errno if the socket does not take it now.
bool send_message(int socket, std::string_view bytes, const std::vector<int>& fds) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kFdMaxOffers * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  return ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
}

}  // namespace

Result<std::shared_ptr<FdServer>> FdServer::listen(uint32_t magic) {
  UniqueFd listener(sys::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK));
  if (!listener) return cannot_listen("socket");
  const std::string name = random_name();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // the zero before it: abstract
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return cannot_listen("bind");
  if (::listen(listener.get(), kBacklog) != 0) return cannot_listen("listen");
  Result<UniqueFd> epoll = sys::epoll("cannot listen on a Unix socket");
  if (!epoll.ok()) return epoll.status();
  if (!sys::watch(epoll->get(), listener.get(), EPOLLIN, kListenerSerial)) return cannot_listen("epoll_ctl");
  UniqueFd spare = open_spare();
  if (!spare) return cannot_listen("open");
  return std::shared_ptr<FdServer>(
      new FdServer(magic, name, std::move(listener), std::move(*epoll), std::move(spare)));
}

FdServer::FdServer(uint32_t magic, std::string name, UniqueFd listener, UniqueFd epoll, UniqueFd spare)
    : magic_(magic),
      name_(std::move(name)),
      listener_(std::move(listener)),
      epoll_(std::move(epoll)),
      spare_(std::move(spare)),
      invitations_(kInvitationLimits) {}

std::string FdServer::address() const {
  return HostAddress{boot_id(), namespace_inode("net"), name_}.blob(magic_);
}

FdOffer FdServer::add(UniqueFd fd, FdOffer offer) {
  std::lock_guard lock(mutex_);
  offer.id = ++last_id_;
  exported_[offer.id] = std::make_shared<const Exported>(Exported{offer, std::move(fd)});
  return offer;
}

void FdServer::revoke(uint64_t id) {
  std::lock_guard lock(mutex_);
  exported_.erase(id);
}

Result<std::string> FdServer::accept(uint64_t caller, std::string_view hello) {
  BlobReader from(hello, magic_);
  if (!from.done()) return Status::AccessDenied("not the hello of a reader of this transport");
  std::lock_guard lock(mutex_);
  const Invitation issued = invitations_.issue(caller, 0, now_ns());
  return BlobWriter().u32(magic_).bytes(BlobWriter().u64(issued.id).take() + issued.secret).take();
}

void FdServer::serve() {
  std::lock_guard lock(mutex_);
  if (!listener_) return;
  std::array<epoll_event, kMaxEvents> events;
  const int num_events = ::epoll_wait(epoll_.get(), events.data(), kMaxEvents, 0);
  for (int i = 0; i < num_events; ++i) {
    const uint64_t serial = events[i].data.u64;
    if (serial == kListenerSerial) {
      accept_ready();
    } else if (const auto client = clients_.find(serial); client != clients_.end()) {
      const bool was_pending = !client->second.admitted;
      const bool keep = serve_client(serial, client->second, events[i].events);
      if (was_pending && (!keep || client->second.admitted)) --num_pending_;
      if (!keep) clients_.erase(client);
    }
  }
}

void FdServer::accept_ready() {
  UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket && (errno == EMFILE || errno == ENFILE)) {
    spare_.reset();
    UniqueFd(::accept(listener_.get(), nullptr, nullptr));  // closed at once: the reader sees why not
    spare_ = open_spare();
  }
  if (!socket || !is_trusted(socket.get())) return;
  if (num_pending_ == kMaxPending) make_room();
  if (!sys::watch(epoll_.get(), socket.get(), EPOLLIN, ++last_serial_)) return;
  clients_[last_serial_].socket = std::move(socket);
  ++num_pending_;
}

void FdServer::make_room() {
  const auto oldest = std::find_if(clients_.begin(), clients_.end(),
                                   [](const auto& entry) { return !entry.second.admitted; });
  clients_.erase(oldest);
  --num_pending_;
}

bool FdServer::serve_client(uint64_t serial, Client& client, uint32_t events) {
  if ((events & ~uint32_t{EPOLLOUT}) != 0 && !read_secret(client)) return false;
  return !client.admitted || client.all_sent || send_offers(serial, client);
}

// Clients send their secret and nothing else. Anything else ends the client.
bool FdServer::read_secret(Client& client) {
  std::array<char, kFdSecretBytes + 1> received;
  const ssize_t size = ::recv(client.socket.get(), received.data(), received.size(), MSG_DONTWAIT);
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  if (size != kFdSecretBytes || client.admitted) return false;
  Invitation shown{0, std::string(received.data() + sizeof shown.id, kSecretBytes)};
  std::memcpy(&shown.id, received.data(), sizeof shown.id);
  if (!invitations_.redeem(shown, now_ns())) return false;
  client.admitted = true;
  for (const auto& [id, exported] : exported_) client.offers.push_back(exported);
  return true;
}

bool FdServer::send_offers(uint64_t serial, Client& client) {
  do {
    const size_t count = std::min<size_t>(client.offers.size() - client.num_sent, kFdMaxOffers);
    BlobWriter message;
    message.u32(static_cast<uint32_t>(client.offers.size())).u32(static_cast<uint32_t>(count));
    std::vector<int> fds;
    for (size_t i = 0; i < count; ++i) {
      const Exported& exported = *client.offers[client.num_sent + i];
      exported.offer.write(message);
      fds.push_back(exported.fd.get());
    }
    if (!send_message(client.socket.get(), message.take(), fds)) {
      const bool later = errno == EAGAIN || errno == EINTR;
      return later && sys::rewatch(epoll_.get(), client.socket.get(), EPOLLIN | EPOLLOUT, serial);
    }
    client.num_sent += count;
  } while (client.num_sent < client.offers.size());
  client.all_sent = true;
  client.offers.clear();
  return sys::rewatch(epoll_.get(), client.socket.get(), EPOLLIN, serial);
}

void FdServer::close() {
  std::lock_guard lock(mutex_);
  listener_.reset();
  clients_.clear();
  exported_.clear();
  invitations_.clear();
  spare_.reset();
  epoll_.reset();
}

}  // namespace kvlink

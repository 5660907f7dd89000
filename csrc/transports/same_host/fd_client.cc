// SPDX-License-Identifier: Apache-2.0
#include "transports/same_host/fd_client.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/host_identity.h"
#include "base/sys.h"

namespace kvlink {
namespace {

Status owner_closed() { return Status::Unreachable("the owner has closed or ended"); }
Status failed(const char* call) {
  return sys::failed(Code::kTransportUnavailable, "cannot connect to the owner's Unix socket", call, errno);
}
Status too_late(const Patience& patience) {
  return patience.why_over(Status::Timeout("the owner did not answer in time; is it stopped?"));
}
Status malformed() { return Status::AccessDenied("the owner's offer of memory is malformed"); }

std::vector<UniqueFd> attached_fds(msghdr& message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= header->cmsg_len; at += sizeof(int)) {
      int fd;
      std::memcpy(&fd, reinterpret_cast<const char*>(header) + at, sizeof fd);
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

Result<FdClient> FdClient::of(uint32_t magic, std::string_view owner_address) {
  Result<HostAddress> parsed = HostAddress::parse(magic, owner_address);
  if (!parsed.ok()) return parsed.status();
  if (!is_this_boot(parsed->boot_id)) {
    return Status::Unavailable("the owner is on another machine",
                               "enable a transport between machines (verbs, tcp)");
  }
  if (!is_own_namespace("net", parsed->net_namespace)) {
    return Status::Unavailable(
        "the owner is in another network namespace, where its Unix socket is not visible",
        "share one (docker run --network, one pod in Kubernetes), or use another transport");
  }
  return FdClient(magic, std::move(parsed->socket));
}

Status FdClient::establish(std::string_view reply, const Patience& patience) {
  BlobReader from(reply, magic_);
  const std::string_view secret = from.bytes(kFdSecretBytes);
  if (!from.done() || secret.size() != kFdSecretBytes) {
    return Status::AccessDenied("not a reply of this transport's owner");
  }
  if (Status status = connect(patience); !status.ok()) return status;
  const auto send = [&] { return ::send(socket_.get(), secret.data(), secret.size(), MSG_NOSIGNAL); };
  if (in_time(SO_SNDTIMEO, patience, send) < 0) {
    return errno == EAGAIN ? too_late(patience) : errno == EPIPE ? owner_closed() : failed("send");
  }
  return receive_all(patience);
}

template <typename Call>
ssize_t FdClient::in_time(int option, const Patience& patience, Call call) {
  for (;;) {
    const int64_t piece_us = std::max<int64_t>(patience.piece_ns() / 1000, 1);  // 0 would mean for ever
    const timeval piece{piece_us / 1'000'000, piece_us % 1'000'000};
    if (!sys::set_option(socket_.get(), SOL_SOCKET, option, piece)) return -1;
    const ssize_t result = call();
    if (result >= 0 || (errno != EINTR && (errno != EAGAIN || patience.over()))) return result;
  }
}

Status FdClient::connect(const Patience& patience) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_name_.size() >= sizeof address.sun_path) return malformed();
  std::memcpy(address.sun_path + 1, socket_name_.data(), socket_name_.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + socket_name_.size());

  socket_.reset(sys::socket(AF_UNIX, SOCK_SEQPACKET));
  if (!socket_) return failed("socket");
  const auto knock = [&] {  // waits while the owner's backlog is full
    return ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), size);
  };
  if (in_time(SO_SNDTIMEO, patience, knock) != 0) {
    if (errno == EAGAIN) return too_late(patience);
    return errno == ECONNREFUSED ? owner_closed() : failed("connect");
  }
  return watch_owner();
}

Status FdClient::watch_owner() {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return failed("SO_PEERCRED");
  // Each end trusts its own user and root, so both ends, or neither, must be root.
  if (peer.uid != ::geteuid()) {
    return Status::Unavailable("the owner runs as uid " + std::to_string(peer.uid) +
                                   ", this process as uid " + std::to_string(::geteuid()),
                               "run both ends as one user, or use tcp");
  }
  owner_pid_ = peer.pid;
  // If the owner's pid is hidden, only the end of the socket shows its end.
  if (peer.pid > 0) pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
  Result<UniqueFd> wake = sys::epoll("cannot watch the owner", Code::kTransportUnavailable);
  if (!wake.ok()) return wake.status();
  wake_ = std::move(*wake);
  for (const int fd : {socket_.get(), pidfd_.get()}) {
    if (fd >= 0 && !sys::watch(wake_.get(), fd, EPOLLIN, 0)) return failed("epoll_ctl");
  }
  return {};
}

Status FdClient::receive_all(const Patience& patience) {
  uint32_t total = 0;
  do {
    const Result<uint32_t> received = receive(patience);
    if (!received.ok()) return received.status();
    total = *received;
  } while (received_.size() < total);
  return {};
}

Result<uint32_t> FdClient::receive(const Patience& patience) {
  std::array<char, kFdMaxMessageBytes> bytes;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kFdMaxOffers * sizeof(int))> control;
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t size =
      in_time(SO_RCVTIMEO, patience, [&] { return ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC); });
  if (size < 0)
    return errno == EAGAIN ? too_late(patience) : errno == ECONNRESET ? owner_closed() : failed("recvmsg");
  std::vector<UniqueFd> fds = attached_fds(message);
  if (size == 0)
    return Status::AccessDenied("the owner refused this reader: its invitation is unknown or used");
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return Status::Unreachable("this process has no room for the owner's descriptors; raise ulimit -n");
  }
  BlobReader from(std::string_view(bytes.data(), static_cast<size_t>(size)));
  const uint32_t total = from.u32();
  const uint32_t count = from.u32();
  const bool last = received_.size() + count == total;
  if (count != fds.size() || total > kFdMaxOffersInAll || received_.size() + count > total ||
      (count == 0 && !last)) {
    return malformed();
  }
  for (UniqueFd& fd : fds) {
    FdOffer offer;
    if (!offer.read(from)) return malformed();
    received_.push_back({offer, std::move(fd)});
  }
  return from.done() ? Result<uint32_t>(total) : malformed();
}

Result<UniqueFd> FdClient::take(const FdOffer& wanted) {
  const auto found = std::find_if(received_.begin(), received_.end(),
                                  [&](const Received& received) { return received.offer == wanted; });
  if (found == received_.end()) {
    return Status::AccessDenied(
        "the owner did not export this region when the connection was made; connect again");
  }
  UniqueFd fd = std::move(found->fd);
  received_.erase(found);
  return fd;
}

Status FdClient::check_owner() const {
  std::array<pollfd, 2> signs{{{socket_.get(), POLLIN, 0}, {pidfd_.get(), POLLIN, 0}}};
  return ::poll(signs.data(), signs.size(), 0) > 0 ? owner_closed() : Status{};
}

void FdClient::close() {
  received_.clear();
  wake_.reset();
  pidfd_.reset();
  socket_.reset();
}

}  // namespace kvlink

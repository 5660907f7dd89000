// SPDX-License-Identifier: Apache-2.0
#include "shm_reader.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "clock.h"

namespace kvlink {
namespace {

Status owner_gone() { return Status::Unreachable("the shm owner has closed or ended"); }
Status failed(const char* call) {
  return Status::Unreachable(std::string("connecting to the shm owner: ") + call + ": " +
                             std::strerror(errno));
}
Status too_late() { return Status::Timeout("the shm owner did not answer in time; is it stopped?"); }
Status malformed() { return Status::AccessDenied("the shm owner's offer of memory is malformed"); }

timeval until(int64_t deadline_ns) {
  const int64_t left_us = std::max<int64_t>((deadline_ns - now_ns()) / 1000, 1);  // 0 would mean for ever
  return {left_us / 1'000'000, left_us % 1'000'000};
}

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

// An owner must not be able to kill its readers by SIGBUS.
bool holds(int memfd, const ShmOffer& offer) {
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  struct stat found{};
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(memfd, &found) == 0 &&
         offer.offset + offer.bytes <= static_cast<uint64_t>(found.st_size);
}

}  // namespace

Status ShmReader::connect(std::string_view socket_name, std::string_view secret, int64_t timeout_ns) {
  const int64_t deadline_ns = now_ns() + timeout_ns;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_name.size() >= sizeof address.sun_path) return malformed();
  std::memcpy(address.sun_path + 1, socket_name.data(), socket_name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + socket_name.size());

  socket_.reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket_) return failed("socket");
  const timeval patience = until(deadline_ns);  // connect() waits while the owner's backlog is full
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    if (errno == EAGAIN) return too_late();
    return errno == ECONNREFUSED ? owner_gone() : failed("connect");
  }
  if (Status status = watch_owner(); !status.ok()) return status;
  if (::send(socket_.get(), secret.data(), secret.size(), MSG_NOSIGNAL) < 0) {
    return errno == EAGAIN ? too_late() : errno == EPIPE ? owner_gone() : failed("send");
  }
  return receive_all(deadline_ns);
}

Status ShmReader::watch_owner() {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return failed("SO_PEERCRED");
  if (peer.uid != ::geteuid() && peer.uid != 0) {
    return Status::AccessDenied("the shm owner runs as uid " + std::to_string(peer.uid) +
                                ", this process as uid " + std::to_string(::geteuid()));
  }
  // pid 0: in a pid namespace out of sight, where the socket's end has to do.
  if (peer.pid > 0) pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
  wake_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!wake_) return failed("epoll_create1");
  epoll_event event{};
  event.events = EPOLLIN;
  for (const int fd : {socket_.get(), pidfd_.get()}) {
    if (fd >= 0 && ::epoll_ctl(wake_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return failed("epoll_ctl");
  }
  return {};
}

Status ShmReader::receive_all(int64_t deadline_ns) {
  uint32_t total = 0;
  do {
    const Result<uint32_t> told = receive(deadline_ns);
    if (!told.ok()) return told.status();
    total = *told;
  } while (received_.size() < total);
  return {};
}

Result<uint32_t> ShmReader::receive(int64_t deadline_ns) {
  std::array<char, kShmMaxMessageBytes> bytes;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kShmMaxOffers * sizeof(int))> control;
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const timeval patience = until(deadline_ns);
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  const ssize_t size = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  if (size < 0) return errno == EAGAIN ? too_late() : errno == ECONNRESET ? owner_gone() : failed("recvmsg");
  std::vector<UniqueFd> fds = attached_fds(message);
  if (size == 0)
    return Status::AccessDenied("the shm owner refused this reader: its invitation is unknown or used");
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return Status::Unreachable("this process has no room for the shm owner's descriptors; raise ulimit -n");
  }
  BlobReader from({bytes.data(), static_cast<size_t>(size)});
  const uint32_t total = from.u32();
  const uint32_t count = from.u32();
  const bool last = received_.size() + count == total;
  if (count != fds.size() || total > kShmMaxRegions || received_.size() + count > total ||
      (count == 0 && !last)) {
    return malformed();
  }
  for (UniqueFd& fd : fds) {
    ShmOffer offer;
    if (!offer.read(from) || !holds(fd.get(), offer)) return malformed();
    received_.push_back({offer, std::move(fd)});
  }
  return from.done() ? Result<uint32_t>(total) : malformed();
}

Result<UniqueFd> ShmReader::take(const ShmOffer& wanted) {
  const auto found = std::find_if(received_.begin(), received_.end(),
                                  [&](const Received& received) { return received.offer == wanted; });
  if (found == received_.end()) {
    return Status::AccessDenied(
        "the shm owner did not lend this region when the connection was made; connect again");
  }
  UniqueFd memfd = std::move(found->memfd);
  received_.erase(found);
  return memfd;
}

Status ShmReader::check_owner() const {
  std::array<pollfd, 2> signs{{{socket_.get(), POLLIN, 0}, {pidfd_.get(), POLLIN, 0}}};
  return ::poll(signs.data(), signs.size(), 0) > 0 ? owner_gone() : Status{};
}

void ShmReader::close() {
  received_.clear();
  wake_.reset();
  pidfd_.reset();
  socket_.reset();
}

}  // namespace kvlink

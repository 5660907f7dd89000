// SPDX-License-Identifier: Apache-2.0
#include "bench/tcp_baseline.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>

#include "base/clock.h"

namespace kvlink {
namespace {

constexpr size_t kSocketCallBytes = 1 << 20;  // aim of one sendmsg or recvmsg
constexpr uint64_t kMaxPieces = 1 << 22;      // of one read

Status failed(const char* call) {
  return Status::Unreachable(std::string("the bare ") + call + ": " + std::strerror(errno));
}

sockaddr_in loopback(uint16_t port) {
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(port);
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return name;
}

/// Neither delays small sends nor paces large ones, whatever the system does by default.
void tune(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

/// Cuts pieces to what one call should move.
void add(std::vector<iovec>& pieces, uint64_t base, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += kSocketCallBytes) {
    pieces.push_back(
        {reinterpret_cast<std::byte*>(base + at), std::min<uint64_t>(bytes - at, kSocketCallBytes)});
  }
}

/// `call` is sendmsg or recvmsg. Consumes the pieces. Returns false if it failed or the other end is gone.
bool move_all(ssize_t (*call)(int, msghdr&), int socket, std::span<iovec> pieces) {
  while (!pieces.empty()) {
    msghdr message{};
    message.msg_iov = pieces.data();
    for (size_t bytes = 0;
         bytes < kSocketCallBytes && message.msg_iovlen < IOV_MAX && message.msg_iovlen < pieces.size();) {
      bytes += pieces[message.msg_iovlen++].iov_len;
    }
    const ssize_t moved = call(socket, message);
    if (moved <= 0) return false;
    auto left = static_cast<size_t>(moved);
    while (left > 0 && left >= pieces.front().iov_len) {
      left -= pieces.front().iov_len;
      pieces = pieces.subspan(1);
    }
    if (left == 0) continue;
    iovec& cut = pieces.front();
    cut = {static_cast<std::byte*>(cut.iov_base) + left, cut.iov_len - left};
  }
  return true;
}

ssize_t send(int socket, msghdr& message) { return ::sendmsg(socket, &message, MSG_NOSIGNAL); }
ssize_t receive(int socket, msghdr& message) { return ::recvmsg(socket, &message, 0); }

bool move_one(ssize_t (*call)(int, msghdr&), int socket, void* at, size_t bytes) {
  iovec piece{at, bytes};
  return move_all(call, socket, {&piece, 1});
}

}  // namespace

Result<std::unique_ptr<BaselineSource>> BaselineSource::make(std::byte* base, uint64_t bytes) {
  UniqueFd listening(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name = loopback(0);
  socklen_t size = sizeof name;
  auto* const any = reinterpret_cast<sockaddr*>(&name);
  if (!listening || ::bind(listening.get(), any, size) != 0 || ::listen(listening.get(), SOMAXCONN) != 0 ||
      ::getsockname(listening.get(), any, &size) != 0) {
    return failed("socket");
  }
  return std::unique_ptr<BaselineSource>(
      new BaselineSource(base, bytes, std::move(listening), ntohs(name.sin_port)));
}

BaselineSource::BaselineSource(std::byte* base, uint64_t bytes, UniqueFd listening, uint16_t port)
    : base_(base), bytes_(bytes), listening_(std::move(listening)), port_(port), thread_([this] {
        accept_ready();
      }) {}

void BaselineSource::accept_ready() {
  while (true) {
    UniqueFd accepted(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    std::lock_guard lock(mutex_);
    if (closed_ || !accepted) return;
    const int sink = accepted.get();
    tune(sink);
    served_.push_back({std::move(accepted), std::thread([this, sink] { serve(sink); })});
  }
}

void BaselineSource::serve(int sink) const {
  std::vector<iovec> pieces;
  uint64_t word = 0;  // how many pieces, then how many bytes there are, then whatever says go
  while (move_one(receive, sink, &word, sizeof word)) {
    if (!take_pieces(sink, word, pieces)) break;
    word = 0;
    for (const iovec& piece : pieces) word += piece.iov_len;
    if (!move_one(send, sink, &word, sizeof word) || !move_one(receive, sink, &word, sizeof word)) break;
    if (!move_all(send, sink, pieces)) break;
  }
  ::shutdown(sink, SHUT_RDWR);
}

/// Receives them in the byte order of the sink's memory, because both ends are on this host.
bool BaselineSource::take_pieces(int sink, uint64_t count, std::vector<iovec>& pieces) const {
  pieces.clear();
  if (count > kMaxPieces) return false;
  std::vector<BaselinePiece> wanted(count);
  if (!move_one(receive, sink, wanted.data(), count * sizeof(BaselinePiece))) return false;
  const auto base = reinterpret_cast<uint64_t>(base_);
  for (const auto& [from, to, bytes] : wanted) {
    if (from < base || from - base > bytes_ || bytes > bytes_ - (from - base)) return false;
    add(pieces, from, bytes);
  }
  return true;
}

void BaselineSource::close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    ::shutdown(listening_.get(), SHUT_RDWR);
    for (const Served& each : served_) ::shutdown(each.socket.get(), SHUT_RDWR);
  }
  if (thread_.joinable()) thread_.join();
  for (Served& each : served_) {
    if (each.thread.joinable()) each.thread.join();
  }
}

Result<std::unique_ptr<BaselineSink>> BaselineSink::connect(uint16_t port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name = loopback(port);
  if (!socket || ::connect(socket.get(), reinterpret_cast<sockaddr*>(&name), sizeof name) != 0) {
    return failed("connect");
  }
  tune(socket.get());
  return std::unique_ptr<BaselineSink>(new BaselineSink(std::move(socket)));
}

Result<int64_t> BaselineSink::read(BaselinePieces pieces) {
  std::vector<iovec> places;
  uint64_t bytes = 0, count = pieces.size(), there = 0;
  for (const BaselinePiece& piece : pieces) {
    add(places, piece.to, piece.bytes);
    bytes += piece.bytes;
  }
  if (!move_one(send, socket_.get(), &count, sizeof count) ||
      !move_one(send, socket_.get(), const_cast<BaselinePiece*>(pieces.data()), pieces.size_bytes()) ||
      !move_one(receive, socket_.get(), &there, sizeof there) || there != bytes) {
    return Status::Unreachable("the bare stream: its source refused these pieces or is gone");
  }
  const int64_t start = now_ns();
  if (!move_one(send, socket_.get(), &count, sizeof count) || !move_all(receive, socket_.get(), places)) {
    return failed("socket stream");
  }
  return now_ns() - start;
}

}  // namespace kvlink

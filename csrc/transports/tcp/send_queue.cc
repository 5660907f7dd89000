// SPDX-License-Identifier: Apache-2.0
#include "transports/tcp/send_queue.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>

namespace kvlink::tcp {

void Outbox::add_zeros(uint64_t bytes) {
  static std::array<std::byte, 64 << 10> zeros{};
  for (; bytes > 0; bytes -= pieces_.back().iov_len) {
    pieces_.push_back({zeros.data(), std::min<uint64_t>(bytes, zeros.size())});
  }
}

void Outbox::clear() {
  pieces_.clear();
  next_ = 0;
}

Wants Outbox::send(int socket, bool more, size_t& budget) {
  while (!empty()) {
    if (budget == 0) return Wants::kSpace;
    msghdr message{};
    message.msg_iov = &pieces_[next_];
    size_t asked = 0;
    while (message.msg_iovlen < IOV_MAX && next_ + message.msg_iovlen < pieces_.size() && asked < budget) {
      asked += pieces_[next_ + message.msg_iovlen++].iov_len;
    }
    const size_t over = asked > budget ? asked - budget : 0;
    iovec& last = message.msg_iov[message.msg_iovlen - 1];
    last.iov_len -= over;
    const bool whole = over == 0 && next_ + message.msg_iovlen == pieces_.size();
    const ssize_t sent =
        ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL | (more || !whole ? MSG_MORE : 0));
    last.iov_len += over;
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN ? Wants::kSpace : Wants::kEnd;
    }
    advance(static_cast<size_t>(sent));
    budget -= static_cast<size_t>(sent);
    if (static_cast<size_t>(sent) < asked - over) return Wants::kSpace;
  }
  return Wants::kRequests;
}

void Outbox::advance(size_t bytes) {
  while (bytes > 0) {
    iovec& piece = pieces_[next_];
    const size_t taken = std::min(bytes, piece.iov_len);
    piece.iov_base = static_cast<std::byte*>(piece.iov_base) + taken;
    piece.iov_len -= taken;
    bytes -= taken;
    if (piece.iov_len == 0) ++next_;
  }
}

bool Outbox::touches(const ExportedRegion& region) const {
  return std::any_of(pieces_.begin() + static_cast<ptrdiff_t>(next_), pieces_.end(), [&](const iovec& piece) {
    return region.meets(static_cast<const std::byte*>(piece.iov_base), piece.iov_len);
  });
}

}  // namespace kvlink::tcp

// SPDX-License-Identifier: Apache-2.0
// Bare sockets that speak to a tcp owner, or play one, byte by byte.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/invitations.h"
#include "base/unique_fd.h"
#include "cpp/transports/copy_peers.h"
#include "transports/tcp/protocol.h"
#include "transports/tcp/response_queue.h"
#include "transports/tcp/socket.h"

namespace kvlink::testing {

template <typename T>
std::string raw(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// A reply that admits nobody.
inline std::string uninvited() { return Invitation{0, std::string(sizeof(tcp::Secret), 0)}.encode(); }

inline std::string read_frame(const std::vector<tcp::ReadEntry>& entries, uint64_t id) {
  std::string frame = raw(
      tcp::RequestHeader{tcp::kFrameMagic, tcp::FrameKind::kRead, static_cast<uint32_t>(entries.size()), id});
  for (const tcp::ReadEntry& entry : entries) frame += raw(entry);
  return frame;
}

inline std::string guarded_frame(const tcp::GuardEntry& guard, const std::vector<tcp::ReadEntry>& entries,
                                 uint64_t id) {
  std::string frame = read_frame(entries, id);
  const auto header = tcp::RequestHeader{tcp::kFrameMagic, tcp::FrameKind::kGuardedRead,
                                         static_cast<uint32_t>(entries.size()), id};
  return frame.replace(0, sizeof header, raw(header) + raw(guard));
}

inline std::string write_frame(const tcp::WriteEntry& entry, uint64_t value) {
  return raw(tcp::RequestHeader{tcp::kFrameMagic, tcp::FrameKind::kWrite, 0, value}) + raw(entry);
}

inline void expect_landed(const Scatter& scatter, const std::vector<std::byte>& pool) {
  for (const ReadOp& op : scatter.ops) {
    uint64_t offset = op.offset;
    for (uint32_t index = 0; index < op.num_segments; ++index) {
      const Segment& piece = scatter.segments[op.first_segment + index];
      ASSERT_EQ(std::memcmp(piece.local, &pool[offset], piece.bytes), 0);
      offset += piece.bytes;
    }
  }
}

/// Feeds a whole stream by as few receives as landing asks for.
inline Status land_stream(tcp::ResponseQueue& landing, const std::string& stream,
                          std::vector<Completion>& ended) {
  for (size_t at = 0; at < stream.size();) {
    size_t taken = 0;
    for (const iovec& place : landing.places(1 << 20)) {
      const size_t bytes = std::min(place.iov_len, stream.size() - at - taken);
      std::memcpy(place.iov_base, stream.data() + at + taken, bytes);
      taken += bytes;
    }
    at += taken;
    const Status status = landing.landed(taken, ended);
    if (!status.ok()) return status;
  }
  return {};
}

/// Returns the greeting of the owner at this address.
inline std::string greeting_of(const std::string& address) {
  return raw(tcp::Greeting{tcp::kHelloMagic, tcp::kVersion, 0, (*tcp::Address::parse(address)).instance});
}

class RawSocket {
 public:
  explicit RawSocket(UniqueFd socket) : socket_(std::move(socket)) {}
  explicit RawSocket(const std::string& address) {
    auto parsed = tcp::Address::parse(address);
    EXPECT_TRUE(parsed.ok());
    auto socket = tcp::start_connect(*parsed);
    EXPECT_TRUE(socket.ok());
    socket_ = std::move(*socket);
    EXPECT_TRUE(ready(POLLOUT));
  }

  /// Sends what fits; false when the peer is gone.
  bool say(std::string_view bytes) {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 ||
           errno == EAGAIN;
  }
  /// Returns up to `bytes` received bytes, fewer if the peer closed or 10 s passed.
  std::string hear(size_t bytes) {
    std::string heard(bytes, '\0');
    size_t got = 0;
    while (got < bytes && ready(POLLIN)) {
      const ssize_t more = ::recv(socket_.get(), heard.data() + got, bytes - got, MSG_DONTWAIT);
      if (more <= 0) break;
      got += static_cast<size_t>(more);
    }
    heard.resize(got);
    return heard;
  }
  /// Waits for the peer to close, dropping what it says.
  bool is_closed() {
    char dropped[4096];
    while (ready(POLLIN)) {
      if (::recv(socket_.get(), dropped, sizeof dropped, MSG_DONTWAIT) <= 0) return true;
    }
    return false;
  }
  tcp::Verdict greet(const std::string& address, const std::string& reply) {
    const Invitation invitation = Invitation::parse(reply, sizeof(tcp::Secret)).value();
    EXPECT_EQ(hear(sizeof(tcp::Greeting)), greeting_of(address));
    tcp::Hello hello{tcp::kHelloMagic, tcp::kVersion, 0, invitation.id, {}};
    std::memcpy(hello.secret.data(), invitation.secret.data(), sizeof(tcp::Secret));
    say(raw(hello));
    tcp::HelloReply answer{0, 0, tcp::Verdict::kRefused};
    const std::string heard = hear(sizeof answer);
    if (heard.size() == sizeof answer) std::memcpy(&answer, heard.data(), sizeof answer);
    return answer.verdict;
  }

 private:
  bool ready(short events) {
    pollfd watched{socket_.get(), events, 0};
    return ::poll(&watched, 1, 10'000) > 0;
  }
  UniqueFd socket_;
};

}  // namespace kvlink::testing

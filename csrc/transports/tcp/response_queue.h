// SPDX-License-Identifier: Apache-2.0
// The responses that a connection still expects, in order, and the places for the next bytes of the stream.
//
// Responses come in order, so one scattered receive places headers and payload before it is known that each
// header says "ok". If one says "refused", no payload follows, and the bytes in its place belong to later
// responses: they are taken back and placed again. Only one payload at a time is placed ahead of its header,
// so nothing is overwritten.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport_api/chunk.h"
#include "transports/tcp/protocol.h"

namespace kvlink::tcp {

class ResponseQueue {
 public:
  /// `peer` is part of messages.
  explicit ResponseQueue(std::string peer) : peer_(std::move(peer)) {}

  bool empty() const { return first_ == responses_.size(); }
  /// Appends to everything expected so far. `bytes` is the sum over the ops; every kMaxFrameBytes of them is
  /// a response of its own, and ids count up from `id`. The chunk is not copied.
  void expect(uint64_t token, uint32_t id, const Chunk& chunk, uint64_t bytes);
  /// Nothing of `token` lands from now on. Its bytes are discarded.
  void forget(uint64_t token);
  void forget_all();

  /// Returns the places for the next bytes, never empty, about `budget` bytes in all. Valid until the next
  /// call of any method.
  std::span<iovec> places(size_t budget);
  /// The first `bytes` of places() were received. Returns an error if the stream is not what was requested.
  Status landed(size_t bytes, std::vector<Completion>& ended);

 private:
  struct Response {
    uint64_t token;
    uint64_t bytes;  // of payload when not refused
    uint64_t got;    // of header and payload
    Chunk chunk;     // empty once forgotten
    ChunkCursor at;  // where the next payload byte lands
    uint32_t id;
    bool last;  // of its token
    bool forgotten;
    // The header, and behind it the payload of a small read, which is copied out when it is complete.
    std::array<std::byte, sizeof(ResponseHeader) + kMaxAtomicBytes> head;

    bool small() const { return bytes <= kMaxAtomicBytes; }
    bool proven() const { return got >= sizeof(ResponseHeader); }
    uint64_t total() const { return sizeof(ResponseHeader) + bytes; }
  };

  void place(void* base, size_t bytes);
  bool place_payload(const Response& response, size_t budget);
  /// `taken` is less than `bytes` if a refusal shows that the rest landed in the wrong place.
  Status take(size_t bytes, size_t& taken, std::vector<Completion>& ended);
  Status take_header(Response& response, std::vector<Completion>& ended, bool& refused);
  void scatter_small(const Response& response) const;
  void take_back(size_t skip, size_t bytes);
  size_t place_again(size_t from);
  void pop();
  static iovec segment_at(const Response& response, const ChunkCursor& at);

  static constexpr size_t kMaxPlaces = 1024;  // IOV_MAX
  static constexpr size_t kScratchBytes = 64 << 10;

  std::string peer_;
  std::vector<Response> responses_;  // expected from first_ on
  size_t first_ = 0;
  std::vector<iovec> places_;
  size_t placed_bytes_ = 0;
  std::vector<std::byte> taken_back_;
  std::byte stray_{};                     // when nothing is expected, the end of the stream is
  std::unique_ptr<std::byte[]> scratch_;  // made when first needed
};

}  // namespace kvlink::tcp

// SPDX-License-Identifier: Apache-2.0
// The reader's end of the transports that move bytes themselves (loopback, shm, cma): posts queue up, and
// poll() works them off in order, a bounded slice at a time. Between two calls no byte moves, so cancel()
// only forgets.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "transport.h"

namespace kvlink {

class QueuedEndpoint : public Endpoint {
 public:
  Window window() const override { return {.chunk_bytes = 4 << 20, .chunk_ops = 4096, .depth = 1}; }
  bool ordered() const final { return true; }
  bool copies_in_poll() const final { return true; }

  Status post_read(uint64_t token, const Chunk& chunk) final;
  Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) final;
  PollResult poll(std::vector<Completion>& ended) final;
  bool cancel(uint64_t token) final;

 protected:
  static constexpr size_t kSliceBytes = 4 << 20;
  static constexpr uint32_t kMaxWordsBytes = 64;  // reads up to a lease slot are loaded word by word

  /// One region of the owner; `address` in whatever space the transport copies from.
  struct Remote {
    uint64_t address;
    uint64_t bytes;
    Access access;
  };
  /// The next byte of a chunk to move.
  struct Cursor {
    uint32_t op = 0, segment = 0;        // segment counts within the op
    uint32_t in_op = 0, in_segment = 0;  // bytes already moved of the op, of the segment
    uint64_t moved = 0;                  // of the whole chunk
  };
  struct Read {
    Chunk chunk = {};
    uint64_t bytes = 0;
    Cursor at = {};
    bool done() const { return at.moved == bytes; }
  };

  uint32_t add_remote(const Remote& remote);
  const Remote& remote(uint32_t region) const { return remotes_[region]; }
  static bool is_words(uint64_t address, uint32_t bytes) {
    return bytes <= kMaxWordsBytes && (address | bytes) % sizeof(uint64_t) == 0;
  }
  /// Every later poll() answers `why`, and no post is left.
  void break_down(Status why);

  /// Visits the pieces from `at` on, at most `budget` bytes of them: move(op, bytes into the op, local,
  /// bytes). Stops before a piece for which `move` answers false.
  template <typename Move>
  static void walk(const Chunk& chunk, Cursor& at, size_t budget, Move&& move) {
    while (at.op < chunk.ops.size() && budget > 0) {
      const ReadOp& op = chunk.ops[at.op];
      const Segment& segment = chunk.segments[op.first_segment + at.segment];
      const auto bytes = static_cast<uint32_t>(std::min<size_t>(segment.bytes - at.in_segment, budget));
      if (!move(op, at.in_op, segment.local + at.in_segment, bytes)) return;
      budget -= bytes;
      advance(op, segment, bytes, at);
    }
  }

  /// Whether the owner is still there. Called now and then, and before the first work after a pause.
  virtual Status check_owner() = 0;
  /// Moves at most `budget` bytes and advances `read.at`; none means that it wants to be called again later.
  /// `behind`, the read posted after it or null, may be taken along where that saves something.
  /// kAccessDenied ends this read alone, any other failure the endpoint.
  virtual Status read_some(Read& read, Read* behind, size_t budget) = 0;
  virtual Status write_word(uint32_t region, uint64_t offset, uint64_t value) = 0;

 private:
  struct Post {
    uint64_t token = 0;
    Read read = {};  // of no bytes: a write
    uint32_t region = 0;
    uint64_t offset = 0, value = 0;
  };

  static void advance(const ReadOp& op, const Segment& segment, uint32_t bytes, Cursor& at) {
    at.moved += bytes;
    at.in_op += bytes;
    at.in_segment += bytes;
    if (at.in_segment < segment.bytes) return;
    at.in_segment = 0;
    if (++at.segment < op.num_segments) return;
    at = {.op = at.op + 1, .moved = at.moved};
  }
  Status check(const ReadOp& op, const Segment* segments) const;
  Status execute_front(size_t& budget);
  void notice_owner();

  std::vector<Remote> remotes_;
  std::deque<Post> posts_;
  Status broken_;
  int64_t owner_checked_ns_ = 0;
};

/// A QueuedEndpoint whose remote addresses are addresses of this process.
class MappedEndpoint : public QueuedEndpoint {
 protected:
  Status read_some(Read& read, Read* behind, size_t budget) override;
  Status write_word(uint32_t region, uint64_t offset, uint64_t value) override;
};

}  // namespace kvlink

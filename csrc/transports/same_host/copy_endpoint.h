// SPDX-License-Identifier: Apache-2.0
// The reader's end of the transports that move bytes themselves (loopback, shm, cma). Posts queue up, and
// poll() executes them in order, a bounded slice at a time. No byte moves between two calls, so cancel() only
// removes the post.
#pragma once

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "memory/streaming_copy.h"
#include "transport_api/transport.h"
#include "transports/same_host/copy_helper.h"
#include "transports/same_host/remote_regions.h"

namespace kvlink {

class QueuedEndpoint : public Endpoint {
 public:
  const Traits& traits() const final { return traits_; }
  Status post_read(uint64_t token, const Chunk& chunk) final;
  Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) final;
  PollResult poll(int64_t now_ns, bool waiting, std::vector<Completion>& ended) final;
  bool cancel(uint64_t token) final;

 protected:
  static constexpr size_t kSliceBytes = 4 << 20;

  struct Read {
    Chunk chunk = {};
    uint64_t bytes = 0;
    CountingCursor at = {};
    bool done() const { return at.moved == bytes; }
  };

  uint32_t add_remote(const Remote& remote) { return remotes_.add(remote); }
  const Remote& remote(uint32_t region) const { return remotes_[region]; }
  /// To be called before establish() returns.
  void set_wake_fd(int fd) { traits_.wake_fd = fd; }
  /// Makes every later poll() return `why`, and removes all posts.
  void break_down(Status why);

  /// Returns whether the owner is alive. Called now and then, and before the first work after a pause.
  virtual Status check_owner() = 0;
  /// Moves at most `budget` bytes and advances `read.at`; if none move, it is called again later. It may also
  /// take `behind`, the read posted next or null, if that saves something. kAccessDenied and kStaleBlocks end
  /// only this read, any other failure ends the endpoint.
  virtual Status read_some(Read& read, Read* behind, size_t budget) = 0;
  virtual Status write_word(uint32_t region, uint64_t offset, uint64_t value) = 0;

 private:
  struct Post {
    uint64_t token = 0;
    Read read = {};  // of no bytes: a write
    uint32_t region = 0;
    uint64_t offset = 0, value = 0;
  };

  Status execute_front(size_t& budget);
  void notice_owner(int64_t now_ns);

  Traits traits_{
      .window = {.chunk_bytes = 4 << 20, .chunk_ops = 4096, .depth = 1}, .ordered = true, .cpu_copies = true};
  Remotes remotes_;
  std::deque<Post> posts_;
  Status broken_;
  Interval owner_checks_{kCheckOwnerNs};
};

/// A QueuedEndpoint whose remote addresses are addresses of this process.
class MappedEndpoint : public QueuedEndpoint {
 public:
  /// `helper` copies with the caller; null: the caller copies alone.
  explicit MappedEndpoint(std::shared_ptr<CopyHelper> helper) : helper_(std::move(helper)) {}

 protected:
  Status read_some(Read& read, Read* behind, size_t budget) override;
  Status write_word(uint32_t region, uint64_t offset, uint64_t value) override;

 private:
  void copy_by_two(Read& read, size_t bytes) const;
  template <typename Cursor>
  void copy(const Chunk& chunk, Cursor& at, size_t num_bytes) const;

  const std::shared_ptr<CopyHelper> helper_;  // of the transport
};

}  // namespace kvlink

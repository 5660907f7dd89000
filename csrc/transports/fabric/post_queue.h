// SPDX-License-Identifier: Apache-2.0
// Turns posts into operations of a provider. It knows nothing of libfabric, so the simulation runs it over a
// wire that reorders and delays.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "memory/memory_range.h"
#include "transport_api/chunk.h"

namespace kvlink::fabric {

/// A region of the owner, as the provider names it.
struct RemoteRegion {
  Access access = Access::kRead;
  uint64_t bytes = 0;
  uint64_t base = 0;  // the address of byte 0 in operations
  uint64_t key = 0;
};

/// A provider that starts operations. They read, store and end in any order.
class Wire {
 public:
  enum class Taken : uint8_t { kYes, kLater, kFailed };

  virtual ~Wire() = default;
  /// Starts to read a range of the owner into `pieces`, which are copied. `op` names it until it ends.
  virtual Taken read(uint32_t op, const RemoteRegion& from, uint64_t offset,
                     std::span<const Segment> pieces) = 0;
  /// Starts to store a word. It ends once the owner's memory has it.
  virtual Taken write(uint32_t op, const RemoteRegion& to, uint64_t offset, uint64_t value) = 0;
  /// Appends the operations that ended well, a bounded number. Returns why one failed.
  virtual Status poll(std::vector<uint32_t>& ended) = 0;
  /// Returns why an operation was not taken (kFailed).
  virtual Status why() const = 0;
};

struct OpLimits {
  uint32_t ops = 64;         // under way
  uint32_t pieces = 1;       // of a read
  uint64_t bytes = 1 << 20;  // of a read
};

/// The posts of one endpoint, each one or more operations. Nothing is started behind a store before it has
/// ended, because two operations have no order.
class PostQueue {
 public:
  PostQueue(Wire& wire, const OpLimits& limits);

  /// REQUIRES that check_read() allows every operation of the chunk.
  void read(uint64_t token, const Chunk& chunk) { posts_.push_back({.token = token, .chunk = chunk}); }
  void write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value);
  /// See Endpoint::cancel().
  bool cancel(uint64_t token);
  /// Starts what fits, collects what ended, and starts what fits then. Sets `progressed` if anything moved.
  Status drive(const std::vector<RemoteRegion>& remotes, std::vector<Completion>& ended, bool& progressed);
  uint32_t under_way() const { return limits_.ops - static_cast<uint32_t>(free_.size()); }
  /// Returns whether something waits until the provider takes it.
  bool waits() const { return waits_; }
  /// Returns whether there is nothing but stores, at least one.
  bool only_writes() const;

 private:
  struct Post {
    uint64_t token = 0;
    Chunk chunk = {};
    ChunkCursor at = {};
    uint32_t under_way = 0;
    bool started = false, cancelled = false, reported = false;
    uint32_t region = 0;  // from here on of a store, which has no operations
    uint64_t offset = 0, value = 0;

    bool is_write() const { return chunk.ops.empty(); }
    bool all_started() const { return cancelled || (is_write() ? started : at.op == chunk.ops.size()); }
  };

  static constexpr uint64_t kNone = UINT64_MAX;

  Wire::Taken start(Post& post, uint64_t number, const std::vector<RemoteRegion>& remotes);
  Wire::Taken start_read(Post& post, uint32_t op, const std::vector<RemoteRegion>& remotes);
  Status start_all(const std::vector<RemoteRegion>& remotes, bool& progressed);
  Status retire(std::vector<Completion>& ended);

  Wire& wire_;
  const OpLimits limits_;
  std::deque<Post> posts_;
  uint64_t first_ = 0;      // number of posts_.front()
  size_t num_started_ = 0;  // of posts_, from the front: all their operations were started
  bool waits_ = false;
  std::vector<uint32_t> free_;   // operations
  std::vector<uint64_t> owner_;  // by operation: the number of its post, or kNone
  std::vector<uint32_t> done_;
  std::vector<Segment> pieces_;
};

}  // namespace kvlink::fabric

// SPDX-License-Identifier: Apache-2.0
// Turns operations into chained work requests. They are data, so no NIC is needed.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <vector>

#include "memory/memory_range.h"
#include "transport_api/chunk.h"

namespace kvlink::verbs {

/// A registered region of this process, as named by one NIC.
struct LocalRegion {
  const std::byte* base = nullptr;
  uint64_t bytes = 0;
  uint64_t iova = 0;
  std::vector<uint32_t> lkeys;  // one per kSliceBytes
};

/// A region of the owner, as named by one of its NICs.
struct RemoteRegion {
  Access access = Access::kRead;
  uint64_t iova = 0;
  uint64_t bytes = 0;
  uint64_t slice_bytes = 0;
  std::vector<uint32_t> rkeys;
};

struct ChainLimits {
  uint32_t wrs = 64;
  uint32_t sges_per_wr = 1;
  uint64_t bytes_per_wr = 1 << 20;
  uint64_t bytes_per_signal = UINT64_MAX;  // reads of so many bytes end with one that says so
};

/// Work requests for one doorbell. Allocates once.
class Chain {
 public:
  explicit Chain(const ChainLimits& limits);

  /// Fills the chain behind its first `used` requests with at most `room` reads from `at` on. Returns how
  /// many; their numbers continue from `number`. A run of the owner becomes as few reads as the limits allow.
  /// REQUIRES check() of every operation.
  uint32_t fill(const Chunk& chunk, ChunkCursor& at, uint32_t room, const std::vector<LocalRegion>& locals,
                const std::vector<RemoteRegion>& remotes, uint32_t used = 0, uint64_t number = 1);
  /// Adds a store of `value` behind them. The value is copied when the chain is posted.
  void add_write(uint32_t used, uint64_t address, uint32_t rkey, const uint64_t& value);
  /// Makes a request start only after all before it have ended.
  void fence(uint32_t index) { wrs_[index].send_flags |= IBV_SEND_FENCE; }
  void signal(uint32_t index, uint64_t wr_id);
  /// Ends the chain and signals its last request.
  void finish(uint32_t num_wrs, uint64_t wr_id);
  ibv_send_wr* first() { return wrs_.data(); }
  uint32_t capacity() const { return limits_.wrs; }

 private:
  const ChainLimits limits_;
  std::vector<ibv_send_wr> wrs_;
  std::vector<ibv_sge> sges_;    // limits_.sges_per_wr for each
  uint64_t unsigned_bytes_ = 0;  // read since the last signal
};

/// Returns kAccessDenied or kConfig for an operation that leaves its regions.
Status check(const ReadOp& op, const Segment* segments, const std::vector<LocalRegion>& locals,
             const std::vector<RemoteRegion>& remotes);

}  // namespace kvlink::verbs

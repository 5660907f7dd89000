// SPDX-License-Identifier: Apache-2.0
// A range of memory, registered with one NIC.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "transports/verbs/nic.h"

namespace kvlink::verbs {

inline constexpr uint64_t kSliceBytes = kNicSliceBytes;

enum class Rights : uint8_t {
  kLocal,           // a destination of this process alone
  kPeersRead,       // block pools
  kPeersReadWords,  // lease slots
  kPeersWriteWords  // peer words
};

/// Returns the name of byte 0 in requests. It is congruent to its address, so that the NIC may use large
/// pages, and discloses nothing else.
uint64_t iova_of(const MemoryRange& range);

/// Registered until destroyed; the caller keeps the memory. Constant after registration.
class Memory {
 public:
  /// Registers with each NIC, with all in parallel. Refuses (kTransportUnavailable, reason and fix) memory
  /// that one cannot reach.
  static Result<std::vector<std::shared_ptr<const Memory>>> register_everywhere(
      std::span<const std::shared_ptr<Nic>> nics, const MemoryRange& range, Rights rights);

  const MemoryRange& range() const { return range_; }
  uint64_t iova() const { return iova_of(range_); }
  std::vector<uint32_t> lkeys() const;
  std::vector<uint32_t> rkeys() const;

 private:
  Memory(std::shared_ptr<Nic> nic, const MemoryRange& range) : nic_(std::move(nic)), range_(range) {}
  Status register_everywhere(Rights rights);
  Status register_everywhere(int access, std::vector<Owned<ibv_mr>>& slices) const;
  uint64_t bytes_of(size_t slice) const;
  ibv_mr* register_slice(size_t slice, int access) const;
  bool register_directly();

  const std::shared_ptr<Nic> nic_;
  const MemoryRange range_;
  std::vector<Owned<ibv_mr>> slices_;
  std::vector<Owned<ibv_mr>> sinks_;  // the same, for reads to land in, where that differs
};

}  // namespace kvlink::verbs

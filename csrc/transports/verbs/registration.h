// SPDX-License-Identifier: Apache-2.0
// A range of memory as one NIC knows it.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "transports/verbs/nic.h"

namespace kvlink::verbs {

/// Registered in slices: one registration of more than 3.5 to 4 GiB was seen to slow writes into it by a
/// third, and slices can be registered in parallel.
inline constexpr uint64_t kSliceBytes = uint64_t{2} << 30;

enum class Rights : uint8_t {
  kLocal,           // a destination of this process alone
  kPeersRead,       // block pools
  kPeersReadWords,  // lease slots
  kPeersWriteWords  // peer words
};

/// What byte 0 is called in requests. Congruent to its address, so that the NIC may use large pages, and
/// otherwise says nothing about it.
uint64_t iova_of(const MemoryRange& range);

/// Registered until destroyed; the memory itself belongs to the caller. Constant after registration.
class Memory {
 public:
  /// At each NIC by itself, all at a time. Refuses (kTransportUnavailable, reason and fix) what one cannot
  /// reach.
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

  const std::shared_ptr<Nic> nic_;
  const MemoryRange range_;
  std::vector<Owned<ibv_mr>> slices_;
  std::vector<Owned<ibv_mr>> sinks_;  // the same, for reads to land in; iWARP's alone
};

}  // namespace kvlink::verbs

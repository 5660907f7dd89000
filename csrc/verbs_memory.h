// SPDX-License-Identifier: Apache-2.0
// A range of memory as every NIC of this process knows it.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "verbs_nic.h"

namespace kvlink::verbs {

/// Registered in slices: one registration of more than 3.5 to 4 GiB was seen to slow writes into it by a
/// third, and slices can be registered in parallel.
inline constexpr uint64_t kSliceBytes = uint64_t{2} << 30;

enum class Rights : uint8_t {
  kLocal,          // a destination of this process alone
  kPeersRead,      // block pools
  kPeersReadWrite  // the lease table
};

/// Registered until destroyed; the memory itself belongs to the caller. Constant after registration.
class Memory {
 public:
  /// Refuses (kTransportUnavailable, reason and fix) what a NIC cannot reach.
  static Result<std::shared_ptr<const Memory>> enlist(std::span<const std::shared_ptr<Nic>> nics,
                                                      const MemoryRange& range, Rights rights);

  const MemoryRange& range() const { return range_; }
  /// What byte 0 is called in requests. Congruent to its address, so that the NIC may use large pages, and
  /// otherwise says nothing about it.
  uint64_t iova() const;
  std::vector<uint32_t> lkeys(size_t nic) const;
  std::vector<uint32_t> rkeys(size_t nic) const;

 private:
  explicit Memory(const MemoryRange& range) : range_(range) {}
  Status enlist_at(const std::shared_ptr<Nic>& nic, int access, std::vector<Owned<ibv_mr>>& slices) const;

  const MemoryRange range_;
  std::vector<std::shared_ptr<Nic>> nics_;
  std::vector<std::vector<Owned<ibv_mr>>> slices_;  // [nic][slice]
  std::vector<std::vector<Owned<ibv_mr>>> sinks_;   // the same, for reads to land in; iWARP's alone
};

}  // namespace kvlink::verbs

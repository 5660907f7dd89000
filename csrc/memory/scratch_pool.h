// SPDX-License-Identifier: Apache-2.0
// Registered local memory for reads of lease slots: one cache line per transfer in flight.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/process_mark.h"
#include "base/sync.h"
#include "memory/host_memory.h"

namespace kvlink {

class ScratchPool : public std::enable_shared_from_this<ScratchPool> {
 public:
  static constexpr uint32_t kLineBytes = 64;
  static constexpr uint64_t kSinkBytes = 12 << 10;  // three packets of the largest MTU of RDMA

  /// `has_sink`: the last kSinkBytes are no lines.
  ScratchPool(std::shared_ptr<HostMemory> memory, uint32_t region, bool has_sink = false);

  /// Takes a line, which returns when the last reference is dropped. Null if all are taken.
  std::shared_ptr<uint64_t[]> take();
  /// Returns where bytes may land that nobody reads, or null.
  std::byte* sink() const { return sink_; }
  uint32_t region() const { return region_; }
  HostMemory& memory() const { return *memory_; }

 private:
  const ProcessMark process_;
  std::shared_ptr<HostMemory> memory_;
  uint32_t region_;
  std::byte* sink_ = nullptr;
  Mutex mutex_;
  std::vector<uint64_t*> free_;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Host memory that kvlink allocates. It is a mapped memfd, so that readers on the same host can map it too.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "base/unique_fd.h"
#include "memory/memory_range.h"

namespace kvlink {

/// Owns one mapping and its memfd, and releases both. Pages are zero and populated.
class HostMemory {
 public:
  /// `huge_pages` asks for transparent huge pages (advice only). `go_on`, if set, is called now and then; if
  /// it returns false, the allocation ends with kCancelled. Unless `access` is kWriteWords, no other process
  /// can map the memory writable, even if it has the descriptor (from Linux 5.1 on).
  static Result<std::shared_ptr<HostMemory>> allocate(uint64_t bytes, bool huge_pages,
                                                      const std::function<bool()>& go_on = {},
                                                      Access access = Access::kRead);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  MemoryRange range() const { return range_; }
  /// Closes the memfd: no process can map the memory from now on. Existing mappings stay.
  void close_memfd();

 private:
  HostMemory(MemoryRange range, UniqueFd memfd) : range_(range), memfd_(std::move(memfd)) {}
  MemoryRange range_;
  UniqueFd memfd_;
};

}  // namespace kvlink

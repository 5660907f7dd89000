// SPDX-License-Identifier: Apache-2.0
// Host memory that kvlink allocates: a memfd, mapped, so that same-host readers may map it too.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "base/unique_fd.h"
#include "memory/memory_range.h"

namespace kvlink {

/// Owns one mapping and its memfd; both go with it. Pages are zero and populated.
class HostMemory {
 public:
  /// `huge_pages` asks for transparent huge pages (advice only). `go_on`, if any, is asked now and then:
  /// false gives up with kCancelled. Unless `lent_for` is kWriteWords, no other process can map it to write,
  /// even one that has the descriptor (from Linux 5.1 on).
  static Result<std::shared_ptr<HostMemory>> allocate(uint64_t bytes, bool huge_pages,
                                                      const std::function<bool()>& go_on = {},
                                                      Access lent_for = Access::kRead);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  MemoryRange range() const { return range_; }
  /// From now on nobody can map it. What is mapped stays.
  void close_memfd();

 private:
  HostMemory(MemoryRange range, UniqueFd memfd) : range_(range), memfd_(std::move(memfd)) {}
  MemoryRange range_;
  UniqueFd memfd_;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Which process made an object. A forked child has a copy of the memory, the same sockets and none of the
// threads: what its parent made must neither be used nor be destroyed there.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/status.h"

namespace kvlink {

/// The number of forks between this process and the one that loaded the library: another number in each
/// child.
uint32_t num_forks();

class ProcessMark {
 public:
  /// Made by a process that this one was forked from. Costs one load.
  bool inherited() const { return made_ != forks_.load(std::memory_order_relaxed); }
  /// kConfig where it is inherited.
  Status check() const;

 private:
  friend uint32_t num_forks();
  friend void count_fork();
  static std::atomic<uint32_t> forks_;

  uint32_t made_ = forks_.load(std::memory_order_relaxed);
};

/// Deletes for a shared_ptr, but in a forked child leaves everything as it is: destructors would wait for
/// threads that are not there and take back what the parent still uses.
struct DeleteOwn {
  template <typename T>
  void operator()(T* object) const {
    if (!object->process().inherited()) delete object;
  }
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Records which process made an object. A forked child has a copy of the memory and the same sockets but none
// of the threads, so it must neither use nor destroy what its parent made.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/status.h"

namespace kvlink {

/// Counts the forks between this process and the one that loaded the library. Each child has another number.
uint32_t num_forks();

class ProcessMark {
 public:
  /// Returns whether this process was forked from the one that made the object. Costs one load.
  bool inherited() const { return made_ != forks_.load(std::memory_order_relaxed); }
  /// Returns kConfig if the object is inherited.
  Status check() const;

 private:
  friend uint32_t num_forks();
  friend void count_fork();
  static std::atomic<uint32_t> forks_;

  uint32_t made_ = forks_.load(std::memory_order_relaxed);
};

/// Deletes for a shared_ptr, but not in a forked child: destructors would wait for threads that do not exist
/// there and release what the parent still uses.
struct DeleteOwn {
  template <typename T>
  void operator()(T* object) const {
    if (!object->process().inherited()) delete object;
  }
};

}  // namespace kvlink

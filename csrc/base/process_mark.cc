// SPDX-License-Identifier: Apache-2.0
#include "base/process_mark.h"

#include <pthread.h>

namespace kvlink {

std::atomic<uint32_t> ProcessMark::forks_{0};

void count_fork() { ProcessMark::forks_.fetch_add(1, std::memory_order_relaxed); }

uint32_t num_forks() { return ProcessMark::forks_.load(std::memory_order_relaxed); }

namespace {

// It fails only without memory at the start of the process. A forked child would then use its parent's
// objects.
[[maybe_unused]] const int registered = ::pthread_atfork(nullptr, nullptr, &count_fork);

}  // namespace

Status ProcessMark::check() const {
  if (!inherited()) return {};
  return {Code::kConfig, "this object was made before a fork and belongs to the parent process",
          "start processes by spawn or forkserver, or fork before the first Worker"};
}

}  // namespace kvlink

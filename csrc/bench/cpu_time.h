// SPDX-License-Identifier: Apache-2.0
// The CPU time of the calling thread.
#pragma once

#include <time.h>

#include <cstdint>

namespace kvlink {

inline int64_t thread_cpu_ns() {
  timespec now;
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "memory/scratch_pool.h"

namespace kvlink {

ScratchPool::ScratchPool(std::shared_ptr<HostMemory> memory, uint32_t region, bool has_sink)
    : memory_(std::move(memory)), region_(region) {
  const MemoryRange range = memory_->range();
  const uint64_t end = has_sink ? range.bytes - kSinkBytes : range.bytes;
  if (has_sink) sink_ = range.base + end;
  for (uint64_t at = end; at >= kLineBytes; at -= kLineBytes) {
    free_.push_back(reinterpret_cast<uint64_t*>(range.base + at - kLineBytes));
  }
}

std::shared_ptr<uint64_t[]> ScratchPool::take() {
  uint64_t* line;
  {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return nullptr;
    line = free_.back();
    free_.pop_back();
  }
  return {line, [pool = shared_from_this()](uint64_t* taken) {
            if (pool->process_.inherited()) return;  // a thread of the parent may have held the mutex
            std::lock_guard lock(pool->mutex_);
            pool->free_.push_back(taken);
          }};
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "base/completion_queue.h"

#include <utility>

namespace kvlink {

Result<std::shared_ptr<CompletionQueue>> CompletionQueue::make() {
  Result<UniqueFd> fd = open_event("cannot wait for completions on an event loop");
  if (!fd.ok()) return fd.status();
  return std::shared_ptr<CompletionQueue>(new CompletionQueue(std::move(*fd)));
}

void CompletionQueue::push(uint64_t token) {
  std::lock_guard lock(mutex_);
  if (fd_.get() < 0) return;
  tokens_.push_back(token);
  if (tokens_.size() == 1) set_event(fd_.get());
}

std::vector<uint64_t> CompletionQueue::drain() {
  std::lock_guard lock(mutex_);
  if (fd_.get() >= 0) clear_event(fd_.get());
  return std::exchange(tokens_, {});
}

void CompletionQueue::close() {
  std::lock_guard lock(mutex_);
  tokens_.clear();
  fd_.reset();
}

}  // namespace kvlink

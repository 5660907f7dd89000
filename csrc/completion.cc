// SPDX-License-Identifier: Apache-2.0
#include "completion.h"

#include <unistd.h>

#include "sys.h"

namespace kvlink {

Result<std::shared_ptr<CompletionQueue>> CompletionQueue::make() {
  Result<UniqueFd> fd = sys::event_fd("cannot wait for completions on an event loop");
  if (!fd.ok()) return fd.status();
  return std::shared_ptr<CompletionQueue>(new CompletionQueue(std::move(*fd)));
}

void CompletionQueue::push(uint64_t token) {
  std::lock_guard lock(mutex_);
  if (fd_.get() < 0) return;
  tokens_.push_back(token);
  if (tokens_.size() > 1) return;
  const uint64_t one = 1;
  // Cannot fail: the counter is far from its limit and the descriptor is ours.
  [[maybe_unused]] const ssize_t written = ::write(fd_.get(), &one, sizeof(one));
}

std::vector<uint64_t> CompletionQueue::drain() {
  std::lock_guard lock(mutex_);
  uint64_t count = 0;
  if (fd_.get() >= 0) {
    [[maybe_unused]] const ssize_t got = ::read(fd_.get(), &count, sizeof(count));
  }
  return std::exchange(tokens_, {});
}

void CompletionQueue::close() {
  std::lock_guard lock(mutex_);
  tokens_.clear();
  fd_.reset();
}

}  // namespace kvlink

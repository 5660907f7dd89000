// SPDX-License-Identifier: Apache-2.0
#include "channel/jobs.h"

#include <utility>

#include "base/sys.h"

namespace kvlink::channel {

Result<std::unique_ptr<Jobs>> Jobs::make(const char* name, uint32_t num_threads) {
  std::unique_ptr<Jobs> jobs(new Jobs());
  for (uint32_t index = 0; index < num_threads; ++index) {
    Result<std::thread> thread =
        sys::start_thread("cannot start the native channel", name, [self = jobs.get()] { self->run(); });
    if (!thread.ok()) return thread.status();
    jobs->threads_.push_back(std::move(*thread));
  }
  return jobs;
}

void Jobs::add(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    queue_.push_back(std::move(job));
  }
  changed_.notify_one();
}

void Jobs::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (closed_) return;
    std::function<void()> job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    job();
    job = {};  // what it holds is released without the lock
    lock.lock();
  }
}

void Jobs::close() {
  std::deque<std::function<void()>> dropped;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    dropped.swap(queue_);
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace kvlink::channel

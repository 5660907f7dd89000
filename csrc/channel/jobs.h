// SPDX-License-Identifier: Apache-2.0
// A few threads for calls that may take seconds, away from the thread that does frames.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"

namespace kvlink::channel {

class Jobs {
 public:
  /// `name` is that of each thread.
  static Result<std::unique_ptr<Jobs>> make(const char* name, uint32_t num_threads);
  ~Jobs() { close(); }

  /// Does nothing after close(). A job must not throw.
  void add(std::function<void()> job);
  /// Drops what has not begun, and waits for what has. Idempotent.
  void close();

 private:
  Jobs() = default;
  void run();

  std::mutex mutex_;  // guards queue_ and closed_
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvlink::channel

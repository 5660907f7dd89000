// SPDX-License-Identifier: Apache-2.0
// C++ threads report ended work to an event loop through a list and an eventfd. They never take the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "base/unique_fd.h"

namespace kvlink {

/// Any thread pushes; one consumer watches fd() and drains.
class CompletionQueue {
 public:
  static Result<std::shared_ptr<CompletionQueue>> make();

  /// Writes the eventfd only when the list was empty.
  void push(uint64_t token);
  /// Empties the list and the eventfd.
  std::vector<uint64_t> drain();
  int fd() const { return fd_.get(); }
  /// Idempotent; later pushes are dropped.
  void close();

 private:
  explicit CompletionQueue(UniqueFd fd) : fd_(std::move(fd)) {}

  Mutex mutex_;
  std::vector<uint64_t> tokens_;
  UniqueFd fd_;
};

}  // namespace kvlink

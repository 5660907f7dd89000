// SPDX-License-Identifier: Apache-2.0
// The owner's exported memory, and the pieces of one response that the kernel has not taken yet.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "memory/memory_range.h"

namespace kvlink::tcp {

struct ExportedRegion {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  Access access = Access::kRead;
  bool device = false;  // memory of a device: no CPU may follow `base`

  bool meets(const std::byte* begin, uint64_t length) const {
    return begin < base + bytes && base < begin + length;
  }
};
using ExportedRegions = std::unordered_map<uint64_t, ExportedRegion>;  // by key

/// The event that a connection waits for. kCopies ends without a signal.
enum class Wants : uint8_t { kRequests, kSpace, kCopies, kEnd };

/// The pieces of one response that the kernel has not taken yet. Borrows the memory.
class Outbox {
 public:
  bool empty() const { return next_ == pieces_.size(); }
  void clear();
  /// Adds a piece, or extends the last one if `base` continues it.
  void add(std::byte* base, size_t bytes);
  /// Adds this many zero bytes.
  void add_zeros(uint64_t bytes);
  /// Sends at most `budget` bytes and subtracts them from it. `more`: the next response follows at once.
  Wants send(int socket, bool more, size_t& budget);
  bool touches(const ExportedRegion& region) const;

 private:
  void advance(size_t bytes);
  std::vector<iovec> pieces_;
  size_t next_ = 0;
};

inline void Outbox::add(std::byte* base, size_t bytes) {
  if (bytes == 0) return;
  if (!pieces_.empty()) {
    iovec& last = pieces_.back();
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == base) {
      last.iov_len += bytes;
      return;
    }
  }
  pieces_.push_back({base, bytes});
}

}  // namespace kvlink::tcp

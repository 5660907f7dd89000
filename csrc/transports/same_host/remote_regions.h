// SPDX-License-Identifier: Apache-2.0
// The regions of an owner, for readers that copy by themselves.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/memory_range.h"
#include "transport_api/chunk.h"

namespace kvlink {

/// One region of the owner. `address` is in the address space that the transport copies from.
struct Remote {
  uint64_t address;
  uint64_t bytes;
  Access access;
};

/// How often a reader that copies by itself checks the owner. It costs one or two system calls, too much for
/// every slice of a small pull.
inline constexpr int64_t kCheckOwnerNs = 2'000'000;

class Remotes {
 public:
  /// Returns its index.
  uint32_t add(const Remote& remote);
  const Remote& operator[](uint32_t region) const { return remotes_[region]; }

  /// Returns the bytes that `chunk` moves. kAccessDenied or kConfig if it leaves a region or does not add up.
  Result<uint64_t> check_read(const Chunk& chunk) const;
  /// Also adds the bytes of its repeats.
  Result<uint64_t> check_repeated(const Chunk& chunk) const;
  /// Checks a store of 8 bytes.
  Status check_write(uint32_t region, uint64_t offset) const;

 private:
  std::vector<Remote> remotes_;
};

}  // namespace kvlink

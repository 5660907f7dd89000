// SPDX-License-Identifier: Apache-2.0
// Memory as its owner registers it, and the access that peers have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvlink {

/// The access that peers have to a region.
enum class Access : uint8_t {
  kRead,        // read it: block pools
  kReadWords,   // read it strictly in order behind what was posted before, word by word: lease slots
  kWriteWords,  // store whole aligned words: peer words
  kLocal,       // nothing: only reads of this process land in it
};
/// The highest value that a remote key may have.
inline constexpr uint32_t kLastAccess = static_cast<uint32_t>(Access::kWriteWords);

/// NICs register memory in slices of this size, in parallel. One registration of more than 3.5 to 4 GiB was
/// seen to slow writes into it by a third. Every slice of device memory has a dma-buf of its own, because a
/// driver maps the whole dma-buf for each registration.
inline constexpr uint64_t kNicSliceBytes = uint64_t{2} << 30;

/// Memory as its owner registers it. It stays valid and unmoved until the transport is closed.
struct MemoryRange {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  int memfd = -1;  // the memfd behind it, or -1; stays owned by the caller
  uint64_t memfd_offset = 0;
  /// The device memory that `base` addresses, exported: one for each kNicSliceBytes, or none. They stay owned
  /// by the caller.
  std::vector<int> dmabuf_fds = {};
  /// The same memory, exported for NICs that reach it through a PCIe function of their own beside the GPU, or
  /// none.
  std::vector<int> pcie_dmabuf_fds = {};
  uint64_t dmabuf_offset = 0;  // of a slice's first byte in its dma-buf
  bool device = false;         // memory of a GPU: no CPU may follow `base`
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Which allocations are behind a range of GPU memory. What is exported or registered with a NIC keeps the
// physical memory, and does not follow an address that is mapped again.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/cuda_device.h"
#include "memory/memory_range.h"

namespace kvlink::cuda {

/// The allocations behind a pool when it was registered. Any thread.
class Placement {
 public:
  /// Returns null for memory that the driver does not know, which cannot be compared later.
  static std::shared_ptr<const Placement> of(std::span<const MemoryRange> pool);
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  /// Returns kConfig once other memory, or none, is behind an address. Checks kPartsALook parts at most, in
  /// turns, so that its cost does not grow with the pool.
  Status check() const;

 private:
  /// `id` is unique in the process for what cudaMalloc made, and `allocation` for what was mapped; kept, so
  /// that its number is not given again.
  struct Part {
    Address at;
    unsigned long long id;
    Allocation allocation;
  };
  static constexpr size_t kPartsALook = 64;

  explicit Placement(std::shared_ptr<const Device> device) : device_(std::move(device)) {}
  void add(const MemoryRange& range);
  bool is_same(const Part& part) const;

  const std::shared_ptr<const Device> device_;
  std::vector<Part> parts_;
  mutable std::atomic<size_t> next_{0};
};

}  // namespace kvlink::cuda

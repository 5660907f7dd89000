// SPDX-License-Identifier: Apache-2.0
// GPU memory that kvlink allocates. It is one physical allocation that other processes and NICs may map.
#pragma once

#include <cstdint>
#include <memory>

#include "base/process_mark.h"
#include "base/status.h"
#include "device/cuda_device.h"
#include "memory/memory_range.h"

namespace kvlink {

/// Owns the allocation and its mapping. Its bytes are zero.
class CudaMemory {
 public:
  /// Allocates on the GPU with CUDA's number `ordinal`. Returns kConfig if memory is short, and
  /// kTransportUnavailable without a GPU that shares memory.
  static Result<std::shared_ptr<CudaMemory>> allocate(uint64_t bytes, int ordinal);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  /// Returns a range of the requested size.
  MemoryRange range() const;

 private:
  CudaMemory(std::shared_ptr<const cuda::Device> device, uint64_t bytes)
      : device_(std::move(device)), bytes_(bytes) {}
  Status map();
  Status clear();

  const ProcessMark process_;
  const std::shared_ptr<const cuda::Device> device_;
  const uint64_t bytes_;
  cuda::Address address_ = 0;
  uint64_t reserved_ = 0, mapped_ = 0;
};

}  // namespace kvlink

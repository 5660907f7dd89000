// SPDX-License-Identifier: Apache-2.0
// Copies many scattered pieces on one GPU by one launch, whatever their number.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "device/cuda_device.h"
#include "device/gather_grid.h"
#include "device/gather_kernel.h"
#include "device/gather_tables.h"

namespace kvlink {

/// The contents of a table.
struct GatherList {
  /// So many pieces without repeats travel as parameters of the launch, and need no memory on the device.
  static constexpr uint32_t kFewPieces = sizeof(GatherLaunch::words) / sizeof(GatherPiece);

  uint32_t num_pieces = 0, num_repeats = 0;
  uint64_t bytes = 0;  // of the pieces, once
  GatherLink link = GatherLink::kSameGpu;

  uint64_t table_bytes() const {
    return num_pieces * sizeof(GatherPiece) + num_repeats * sizeof(GatherRepeat);
  }
  uint64_t num_copies() const { return uint64_t{num_pieces} * (1 + num_repeats); }
};

/// kvlink's kernel, cuMemcpyBatchAsync (CUDA 12.8), or one driver copy per piece.
enum class GatherBy : uint8_t { kKernel, kBatch, kCopies };

/// The kernel and its alternatives. Any thread, after measure().
class CudaGather {
 public:
  /// `kernel` is of the same GPU. Without it copies use cuMemcpyBatchAsync, or go one by one. `most_blocks`
  /// limits the grids of launches; 0 leaves that to gather_grid().
  CudaGather(std::shared_ptr<const cuda::Device> device, std::shared_ptr<const GatherKernel> kernel,
             uint32_t most_blocks)
      : device_(std::move(device)), kernel_(std::move(kernel)), most_blocks_(most_blocks) {}

  /// Measures the kernel and cuMemcpyBatchAsync on the same pieces, small and large, within this GPU, and
  /// keeps the faster one for each size. Takes some milliseconds and 16 MiB of GPU memory; without that
  /// memory, or with one way only, nothing changes. To be called before the first start().
  void measure();
  /// Larger pieces must be cut, because one block of the kernel's threads copies each.
  uint32_t most_piece_bytes() const { return kernel_ ? 64 << 10 : UINT32_MAX; }
  /// Copies pieces, none larger than that, as often as listed, and returns at once. REQUIRES that the device
  /// is Current, and that a table with memory on the device is kept until they have ended.
  Status start(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;
  const std::shared_ptr<const cuda::Device>& device() const { return device_; }
  /// Returns how it copies pieces of this size.
  GatherBy by(uint64_t piece_bytes) const;

 private:
  Result<bool> batch_is_faster(uint32_t piece_bytes) const;
  Status start_by(GatherBy by, const CudaTables::Table& table, const GatherList& list,
                  cuda::Stream stream) const;
  Status launch(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;
  Status copy_batch(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;
  Status copy_each(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;

  static constexpr uint32_t kLargePiece = 16 << 10;  // from here on

  const std::shared_ptr<const cuda::Device> device_;
  const std::shared_ptr<const GatherKernel> kernel_;
  const uint32_t most_blocks_;
  bool batch_small_ = false, batch_large_ = false;  // faster than the kernel
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Copies many scattered pieces on one GPU by one launch, whatever their number.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "base/status.h"
#include "device/cuda_device.h"
#include "device/gather_tables.h"

namespace kvlink {

/// The contents of a table.
struct GatherList {
  uint32_t num_pieces = 0, num_repeats = 0;
  uint64_t bytes = 0;  // of the pieces, once

  uint64_t num_copies() const { return uint64_t{num_pieces} * (1 + num_repeats); }
};

/// kvlink's kernel, cuMemcpyBatchAsync (CUDA 13), or one driver copy per piece.
enum class GatherBy : uint8_t { kKernel, kBatch, kCopies };

/// The kernel and its alternatives. Any thread, after measure().
class CudaGather {
 public:
  /// `image` is the compiled module. If it is empty, copies use cuMemcpyBatchAsync, or go one by one.
  static Result<std::shared_ptr<CudaGather>> make(std::shared_ptr<const cuda::Device> device,
                                                  std::string_view image);
  ~CudaGather();
  CudaGather(const CudaGather&) = delete;
  CudaGather& operator=(const CudaGather&) = delete;

  /// Measures the kernel and cuMemcpyBatchAsync on the same pieces, small and large, within this GPU, and
  /// keeps the faster one for each size. Takes some milliseconds and 16 MiB of GPU memory; without that
  /// memory, or with one way only, nothing changes. To be called before the first start().
  void measure();
  /// Larger pieces must be cut, because one block of the kernel's threads copies each.
  uint32_t most_piece_bytes() const { return function_ ? 64 << 10 : UINT32_MAX; }
  /// Copies pieces, none larger than that, as often as listed, and returns at once. REQUIRES that the table
  /// is kept until they have ended, and that the device is Current.
  Status start(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;
  const std::shared_ptr<const cuda::Device>& device() const { return device_; }
  /// Returns how it copies pieces of this size.
  GatherBy by(uint64_t piece_bytes) const;

 private:
  explicit CudaGather(std::shared_ptr<const cuda::Device> device) : device_(std::move(device)) {}
  Status load(std::string_view image);
  Result<bool> batch_is_faster(uint32_t piece_bytes) const;
  Status start_by(GatherBy by, const CudaTables::Table& table, const GatherList& list,
                  cuda::Stream stream) const;
  Status launch(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;
  Status copy_batch(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;
  Status copy_each(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;

  static constexpr uint32_t kLargePiece = 16 << 10;  // from here on

  const std::shared_ptr<const cuda::Device> device_;
  cuda::Module module_ = nullptr;
  cuda::Function function_ = nullptr;
  bool batch_small_ = false, batch_large_ = false;  // faster than the kernel
};

}  // namespace kvlink

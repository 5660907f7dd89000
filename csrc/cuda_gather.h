// SPDX-License-Identifier: Apache-2.0
// Many scattered pieces copied by one GPU at once: one launch, whatever their number.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "cuda_device.h"
#include "cuda_tables.h"
#include "status.h"

namespace kvlink {

/// What a table lists.
struct GatherList {
  uint32_t num_pieces = 0, num_repeats = 0;
  uint64_t bytes = 0;  // of the pieces, once

  uint64_t num_copies() const { return uint64_t{num_pieces} * (1 + num_repeats); }
};

/// The kernel. Any thread.
class CudaGather {
 public:
  /// `image` is the compiled module; empty: there is none, and copies go by cuMemcpyBatchAsync, or one by
  /// one.
  static Result<std::shared_ptr<CudaGather>> make(std::shared_ptr<const cuda::Device> device,
                                                  std::string_view image);
  ~CudaGather();
  CudaGather(const CudaGather&) = delete;
  CudaGather& operator=(const CudaGather&) = delete;

  /// Larger pieces are to be cut: a block of the kernel's threads takes each.
  uint32_t most_piece_bytes() const { return function_ ? 64 << 10 : UINT32_MAX; }
  /// Copies pieces, none larger than that, as often as is listed, and returns at once. REQUIRES that the
  /// table is kept until they have ended, and that the device is Current.
  Status start(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;
  const std::shared_ptr<const cuda::Device>& device() const { return device_; }
  /// How it copies: "kernel", "batch" or "copies".
  const char* way() const;

 private:
  explicit CudaGather(std::shared_ptr<const cuda::Device> device) : device_(std::move(device)) {}
  Status load(std::string_view image);
  Status launch(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;
  Status copy_batch(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;
  Status copy_each(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const;

  const std::shared_ptr<const cuda::Device> device_;
  cuda::Module module_ = nullptr;
  cuda::Function function_ = nullptr;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Many scattered pieces copied by one GPU at once: one launch, whatever their number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_device.h"
#include "memory.h"
#include "status.h"

namespace kvlink {

/// As kvlink_gather in gather.cu takes it.
struct GatherPiece {
  uint64_t from = 0, to = 0;
  uint32_t bytes = 0, unused = 0;
};
static_assert(sizeof(GatherPiece) == 24);

/// The kernel and the tables it takes pieces from, shared by all that one worker reads. Any thread.
class CudaGather {
 public:
  static constexpr uint32_t kTablePieces = 1 << 16;
  static constexpr uint32_t kNumTables = 4;

  /// `image` is the compiled module; empty: there is none, and copies go by cuMemcpyBatchAsync, or one by
  /// one.
  static Result<std::shared_ptr<CudaGather>> make(std::shared_ptr<const cuda::Device> device,
                                                  std::string_view image);
  ~CudaGather();
  CudaGather(const CudaGather&) = delete;
  CudaGather& operator=(const CudaGather&) = delete;

  /// In pinned host memory, with its copy on the device.
  struct Table {
    GatherPiece* pieces = nullptr;
    cuda::Address on_device = 0;
  };
  struct Return {
    CudaGather* gather;
    void operator()(Table* table) const { gather->give_back(table); }
  };
  using TableLoan = std::unique_ptr<Table, Return>;
  /// Null when all are taken.
  TableLoan take();

  /// Larger pieces are to be cut: a block of the kernel's threads takes each.
  uint32_t most_piece_bytes() const { return function_ ? 64 << 10 : UINT32_MAX; }
  /// Starts copying and returns at once. REQUIRES at most kTablePieces in `table`, none larger than that;
  /// that it is kept until they have ended, and that the device is Current.
  Status start(Table& table, uint32_t count, cuda::Stream stream) const;
  const std::shared_ptr<const cuda::Device>& device() const { return device_; }
  /// How it copies: "kernel", "batch" or "copies".
  const char* way() const;

 private:
  explicit CudaGather(std::shared_ptr<const cuda::Device> device) : device_(std::move(device)) {}
  Status load(std::string_view image);
  Status make_tables();
  void give_back(Table* table);
  Status launch(const Table& table, uint32_t count, cuda::Stream stream) const;
  Status copy_batch(std::span<const GatherPiece> pieces, cuda::Stream stream) const;
  Status copy_each(std::span<const GatherPiece> pieces, cuda::Stream stream) const;

  const std::shared_ptr<const cuda::Device> device_;
  cuda::Module module_ = nullptr;
  cuda::Function function_ = nullptr;
  std::shared_ptr<HostMemory> pinned_;
  cuda::Address on_device_ = 0;
  std::vector<Table> tables_;

  std::mutex mutex_;
  std::vector<Table*> free_;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Lists of pieces for a GPU. Short ones travel as parameters of a launch. Others are filled in pinned host
// memory and copied to the device.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "device/cuda_device.h"
#include "memory/host_memory.h"

namespace kvlink {

/// The layout that kvlink_gather in gather.cu expects.
struct GatherPiece {
  uint64_t from = 0, to = 0;
  uint32_t bytes = 0, unused = 0;
};
static_assert(sizeof(GatherPiece) == 24);

/// Repeats all pieces elsewhere: the offsets added to both ends of each.
struct GatherRepeat {
  uint64_t from = 0, to = 0;
};
static_assert(sizeof(GatherRepeat) == 16);

/// The parameters of kvlink_gather.
struct GatherLaunch {
  uint64_t table = 0;  // 0: the list is in `words`
  uint32_t num_pieces = 0, num_repeats = 0, lanes = 0, unused = 0;
  std::array<uint64_t, 509> words = {};
};
static_assert(sizeof(GatherLaunch) == 4096, "the most that every driver takes");

/// A fixed number of tables of one size. Any thread.
class CudaTables {
 public:
  static Result<std::shared_ptr<CudaTables>> make(std::shared_ptr<const cuda::Device> device,
                                                  uint32_t num_tables, uint32_t pieces_each);
  ~CudaTables();
  CudaTables(const CudaTables&) = delete;
  CudaTables& operator=(const CudaTables&) = delete;

  struct Table {
    GatherPiece* pieces = nullptr;  // and behind them the repeats
    cuda::Address on_device = 0;    // 0: of a list that fits into GatherLaunch
  };
  struct Return {
    CudaTables* tables;
    void operator()(Table* table) const { tables->release(table); }
  };
  /// Keep it until what it lists has been copied.
  using Held = std::unique_ptr<Table, Return>;
  /// Returns null if all are taken.
  Held take();
  uint32_t pieces_each() const { return pieces_each_; }

 private:
  CudaTables(std::shared_ptr<const cuda::Device> device, uint32_t pieces_each)
      : device_(std::move(device)), pieces_each_(pieces_each) {}
  Status allocate(uint32_t num_tables);
  void release(Table* table);

  const std::shared_ptr<const cuda::Device> device_;
  const uint32_t pieces_each_;
  std::shared_ptr<HostMemory> pinned_;
  cuda::Address on_device_ = 0;
  std::vector<Table> tables_;

  std::mutex mutex_;
  std::vector<Table*> free_;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "device/gather.h"

#include <cstring>
#include <vector>

#include "base/check.h"

namespace kvlink {
namespace {

/// Visits every piece as often as it is listed: visit(from, to, bytes).
template <typename Visit>
Status for_each(const CudaTables::Table& table, const GatherList& list, Visit&& visit) {
  const auto* const repeats = reinterpret_cast<const GatherRepeat*>(table.pieces + list.num_pieces);
  for (uint32_t turn = 0; turn <= list.num_repeats; ++turn) {
    const GatherRepeat shift = turn == 0 ? GatherRepeat{} : repeats[turn - 1];
    for (uint32_t i = 0; i < list.num_pieces; ++i) {
      const GatherPiece& piece = table.pieces[i];
      if (Status status = visit(piece.from + shift.from, piece.to + shift.to, piece.bytes); !status.ok()) {
        return status;
      }
    }
  }
  return {};
}

}  // namespace

GatherBy CudaGather::by(uint64_t piece_bytes) const {
  const bool batch = piece_bytes < kLargePiece ? batch_small_ : batch_large_;
  if (kernel_ && !batch) return GatherBy::kKernel;
  return device_->api.copies_batches() ? GatherBy::kBatch : GatherBy::kCopies;
}

Status CudaGather::start(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const {
  KVLINK_CHECK(list.num_pieces > 0);
  const GatherBy way = by(list.bytes / list.num_pieces);
  const bool one_call = list.num_copies() == 1 && way == GatherBy::kBatch;
  return start_by(one_call ? GatherBy::kCopies : way, table, list, stream);
}

Status CudaGather::start_by(GatherBy by, const CudaTables::Table& table, const GatherList& list,
                            cuda::Stream stream) const {
  if (by == GatherBy::kKernel) return launch(table, list, stream);
  return by == GatherBy::kBatch ? copy_batch(table, list, stream) : copy_each(table, list, stream);
}

Status CudaGather::launch(const CudaTables::Table& table, const GatherList& list, cuda::Stream stream) const {
  const cuda::Api& api = device_->api;
  const GatherLimits limits{list.link, kernel_->num_multiprocessors(), most_blocks_};
  const GatherGrid grid = gather_grid(list.num_copies(), list.bytes / list.num_pieces, limits);
  GatherLaunch launch{0, list.num_pieces, list.num_repeats, grid.lanes};
  if (list.table_bytes() <= sizeof launch.words) {
    std::memcpy(launch.words.data(), table.pieces, list.table_bytes());
  } else {
    launch.table = table.on_device;
    const int sent = api.copy(table.on_device, cuda::address_of(table.pieces), list.table_bytes(), stream);
    if (Status status = api.check(sent, "cuMemcpyAsync"); !status.ok()) return status;
  }
  void* arguments[] = {&launch};
  const int launched =
      api.launch(kernel_->function(), grid.blocks, 1, 1, kGatherThreads, 1, 1, 0, stream, arguments, nullptr);
  return api.check(launched, "cuLaunchKernel");
}

Status CudaGather::copy_batch(const CudaTables::Table& table, const GatherList& list,
                              cuda::Stream stream) const {
  std::vector<cuda::Address> to, from;
  std::vector<size_t> bytes;
  const Status listed = for_each(table, list, [&](uint64_t source, uint64_t target, uint32_t size) {
    from.push_back(source);
    to.push_back(target);
    bytes.push_back(size);
    return Status{};
  });
  if (!listed.ok()) return listed;
  cuda::CopyAttributes attributes{cuda::kInStreamOrder, {}, {}, 0};
  size_t first = 0, failed = 0;
  const cuda::Api& api = device_->api;
  const int result = api.copy_batch ? api.copy_batch(to.data(), from.data(), bytes.data(), to.size(),
                                                     &attributes, &first, 1, stream)
                                    : api.copy_batch_12(to.data(), from.data(), bytes.data(), to.size(),
                                                        &attributes, &first, 1, &failed, stream);
  return api.check(result, "cuMemcpyBatchAsync");
}

Status CudaGather::copy_each(const CudaTables::Table& table, const GatherList& list,
                             cuda::Stream stream) const {
  const cuda::Api& api = device_->api;
  return for_each(table, list, [&](uint64_t from, uint64_t to, uint32_t bytes) {
    return api.check(api.copy(to, from, bytes, stream), "cuMemcpyAsync");
  });
}

}  // namespace kvlink

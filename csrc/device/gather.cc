// SPDX-License-Identifier: Apache-2.0
#include "device/gather.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "base/check.h"
#include "base/clock.h"

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

constexpr uint64_t kTrialBytes = 8 << 20;  // moved, from one half of as much again
constexpr uint32_t kSmallPiece = 4 << 10, kLargeTrial = 32 << 10;
constexpr int kRounds = 5;  // the first finds everything cold

/// Device memory for the duration of the trial.
class Room {
 public:
  explicit Room(const cuda::Api& api) : api_(api) {}
  ~Room() {
    if (base != 0) api_.memory_free(base);
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  Status take() { return api_.check(api_.memory_alloc(&base, 2 * kTrialBytes), "cuMemAlloc"); }

  cuda::Address base = 0;

 private:
  const cuda::Api& api_;
};

/// Lists every piece of one half with a place of its own in the other.
GatherList list_scattered(const CudaTables::Table& table, cuda::Address base, uint32_t piece_bytes) {
  std::vector<uint32_t> places(kTrialBytes / piece_bytes);
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), std::mt19937(1));
  for (uint32_t i = 0; i < places.size(); ++i) {
    table.pieces[i] = {base + uint64_t{i} * piece_bytes,
                       base + kTrialBytes + uint64_t{places[i]} * piece_bytes, piece_bytes, 0};
  }
  return {.num_pieces = static_cast<uint32_t>(places.size()), .bytes = kTrialBytes};
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

void CudaGather::measure() {
  if (!kernel_ || !device_->api.copies_batches()) return;
  const Result<bool> small = batch_is_faster(kSmallPiece), large = batch_is_faster(kLargeTrial);
  batch_small_ = small.ok() && *small;
  batch_large_ = large.ok() && *large;
}

Result<bool> CudaGather::batch_is_faster(uint32_t piece_bytes) const {
  const cuda::Current current(*device_);
  if (!current.status().ok()) return current.status();
  Room room(device_->api);
  if (Status status = room.take(); !status.ok()) return status;
  Result<std::shared_ptr<CudaTables>> tables = CudaTables::make(device_, 1, kTrialBytes / kSmallPiece);
  if (!tables.ok()) return tables.status();
  Result<std::unique_ptr<cuda::MarkedStream>> stream = cuda::MarkedStream::open(device_);
  if (!stream.ok()) return stream.status();
  const CudaTables::Held table = (*tables)->take();
  const GatherList list = list_scattered(*table, room.base, piece_bytes);
  int64_t best_ns[] = {INT64_MAX, INT64_MAX};  // by the kernel, and in a batch
  for (int round = 0; round < kRounds; ++round) {
    for (const bool batch : {false, true}) {
      const int64_t start = now_ns();
      const GatherBy by = batch ? GatherBy::kBatch : GatherBy::kKernel;
      const Status status = start_by(by, *table, list, (*stream)->get());
      (*stream)->drain();
      if (!status.ok()) return status;
      if (round > 0) best_ns[batch] = std::min(best_ns[batch], now_ns() - start);
    }
  }
  return best_ns[true] < best_ns[false];
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Compares the kernel and cuMemcpyBatchAsync on the same pieces.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "base/clock.h"
#include "device/gather.h"

namespace kvlink {
namespace {

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

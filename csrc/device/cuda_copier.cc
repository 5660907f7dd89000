// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_copier.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "device/cuda_device.h"
#include "device/gather.h"
#include "device/gather_tables.h"

namespace kvlink {
namespace {

using cuda::address_of;
using cuda::Current;
using cuda::Device;

constexpr uint32_t kTablePieces = DeviceCopier::kTableBytes / sizeof(GatherPiece);
constexpr uint32_t kMostCuts = 16;  // that a slot's pieces may need beside themselves
// Average piece size from which copy engines are as fast as the kernel, and leave the GPU's cores free.
constexpr uint64_t kLargeBytes = 128 << 10;

/// State that queues share. The kernel accesses pinned host memory in place: one launch per slot, whatever
/// the number of pieces.
struct Means {
  const std::shared_ptr<const Device> device;
  const std::shared_ptr<CudaGather> gather;
  const std::shared_ptr<CudaTables> tables;  // one a slot: as many as there are copies under way
  bool host_by_kernel = true;                // addresses of pinned memory are the same on the device
};

class CudaQueue final : public CopyQueue {
 public:
  CudaQueue(const Means& means, std::unique_ptr<cuda::MarkedStream> stream)
      : means_(means), stream_(std::move(stream)) {}
  ~CudaQueue() override { drain(); }

  Result<uint64_t> start(CopyTo to, std::span<const CopyPiece> pieces) override {
    const Current current(stream_->device());
    if (!current.status().ok()) return current.status();
    CudaTables::Held table =
        wants_table(pieces) ? means_.tables->take() : CudaTables::Held{nullptr, {nullptr}};
    const Status status = table ? gather(to, pieces, *table) : copy_each(to, pieces);
    if (!status.ok()) {
      stream_->drain();
      return status;
    }
    Result<uint64_t> number = stream_->mark();
    if (number.ok() && table) in_use_.push_back({*number, std::move(table)});
    return number;
  }
  Result<bool> done(uint64_t number) override {
    const Result<bool> done = stream_->done(number);
    const bool ended = done.ok() && *done;
    while (ended && !in_use_.empty() && in_use_.front().number <= number)
      in_use_.pop_front();  // others want them
    return done;
  }
  void drain() override {
    stream_->drain();
    in_use_.clear();
  }

 private:
  struct TableInUse {
    uint64_t number;
    CudaTables::Held table;
  };

  bool wants_table(std::span<const CopyPiece> pieces) const {
    if (!means_.host_by_kernel || pieces.size() + kMostCuts > means_.tables->pieces_each()) return false;
    uint64_t bytes = 0;
    for (const CopyPiece& piece : pieces) bytes += piece.bytes;
    return bytes < pieces.size() * kLargeBytes;
  }

  /// REQUIRES pieces of one slot at most.
  Status gather(CopyTo to, std::span<const CopyPiece> pieces, const CudaTables::Table& table) {
    const uint64_t most = means_.gather->most_piece_bytes();
    uint64_t bytes = 0;
    GatherPiece* out = table.pieces;
    for (const CopyPiece& piece : pieces) {
      for (uint64_t at = 0; at < piece.bytes; at += most) {
        const cuda::Address device = address_of(piece.device + at), slot = address_of(piece.slot + at);
        const auto cut = static_cast<uint32_t>(std::min(piece.bytes - at, most));
        const bool in = to == CopyTo::kDevice;
        *out++ = {in ? slot : device, in ? device : slot, cut, 0};
      }
      bytes += piece.bytes;
    }
    const auto count = static_cast<uint32_t>(out - table.pieces);
    return means_.gather->start(table, {.num_pieces = count, .bytes = bytes}, stream_->get());
  }

  Status copy_each(CopyTo to, std::span<const CopyPiece> pieces) {
    const cuda::Api& api = stream_->device().api;
    for (const CopyPiece& piece : pieces) {
      const cuda::Address device = address_of(piece.device), slot = address_of(piece.slot);
      const int result = to == CopyTo::kDevice ? api.copy(device, slot, piece.bytes, stream_->get())
                                               : api.copy(slot, device, piece.bytes, stream_->get());
      if (Status status = api.check(result, "cuMemcpyAsync"); !status.ok()) return status;
    }
    return {};
  }

  const Means& means_;
  const std::unique_ptr<cuda::MarkedStream> stream_;
  std::deque<TableInUse> in_use_;
};

class CudaCopier final : public DeviceCopier {
 public:
  explicit CudaCopier(Means means) : means_(std::move(means)) {}
  ~CudaCopier() override {
    const Current current(*means_.device);
    for (std::byte* host : pinned_) means_.device->api.host_unregister(host);
  }

  Status pin(std::byte* host, uint64_t bytes) override {
    const Current current(*means_.device);
    if (!current.status().ok()) return current.status();
    const cuda::Api& api = means_.device->api;
    Status status = api.check(api.host_register(host, bytes, cuda::kPortable), "cuMemHostRegister");
    if (!status.ok()) return status;
    pinned_.push_back(host);
    cuda::Address seen = 0;
    const bool same = api.host_device_pointer(&seen, host, 0) == cuda::kSuccess && seen == address_of(host);
    means_.host_by_kernel = means_.host_by_kernel && same;
    return {};
  }

  uint32_t most_pieces() const override { return means_.tables->pieces_each() - kMostCuts; }

  Result<std::unique_ptr<CopyQueue>> open_queue() override {
    Result<std::unique_ptr<cuda::MarkedStream>> stream = cuda::MarkedStream::open(means_.device);
    if (!stream.ok()) return stream.status();
    return std::make_unique<CudaQueue>(means_, std::move(*stream));
  }

 private:
  Means means_;                     // constant after the last pin()
  std::vector<std::byte*> pinned_;  // by one thread, before the first queue
};

}  // namespace

Result<std::shared_ptr<DeviceCopier>> make_cuda_copier(const std::byte* memory, uint32_t num_slots,
                                                       std::string_view image) {
  Result<std::shared_ptr<const Device>> device = Device::of(memory);
  if (!device.ok()) return device.status();
  Result<std::shared_ptr<CudaGather>> gather = CudaGather::make(*device, image);
  if (!gather.ok()) return gather.status();
  Result<std::shared_ptr<CudaTables>> tables = CudaTables::make(*device, num_slots, kTablePieces);
  if (!tables.ok()) return tables.status();
  return std::make_shared<CudaCopier>(Means{std::move(*device), std::move(*gather), std::move(*tables)});
}

}  // namespace kvlink

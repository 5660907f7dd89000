// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_copier.h"

#include <algorithm>
#include <array>
#include <vector>

#include "device/cuda_device.h"
#include "device/gather.h"
#include "memory/slot_ring.h"

namespace kvlink {
namespace {

using cuda::address_of;
using cuda::Current;
using cuda::Device;

// Pieces of 256 bytes in a slot. A list that is too long for a launch's parameters is copied to the GPU,
// which takes 1.4 us on an H200; another launch takes 2.5 us.
constexpr uint32_t kMostPieces = SlotRing::kSlotBytes / 256;
// Longer lists in flight, of all queues. A queue that finds none free launches with what parameters hold.
constexpr uint32_t kTables = 16;
// Average piece size from which copy engines are as fast as the kernel, and leave the GPU's cores free.
constexpr uint64_t kLargeBytes = 128 << 10;

/// State that queues share. The kernel accesses pinned host memory in place.
struct Means {
  const std::shared_ptr<const Device> device;
  const std::shared_ptr<CudaGather> gather;
  const std::shared_ptr<CudaTables> tables;  // null without the kernel
  bool host_by_kernel = true;                // addresses of pinned memory are the same on the device
  GatherLink link = GatherLink::kSameGpu;    // until host memory is pinned
};

/// Starts alternate between two streams, because a launch begins only some microseconds after the one before
/// it in its stream has ended.
class CudaQueue final : public CopyQueue {
 public:
  using Streams = std::array<std::unique_ptr<cuda::MarkedStream>, 2>;

  CudaQueue(const Means& means, Streams streams) : means_(means), streams_(std::move(streams)) {}
  ~CudaQueue() override { drain(); }

  Result<uint64_t> start(CopyTo to, std::span<const CopyPiece> pieces) override {
    turn_ = 1 - turn_;
    cuda::MarkedStream& stream = *streams_[turn_];
    const Current current(stream.device());
    if (!current.status().ok()) return current.status();
    CudaTables::Held table;
    const Status status =
        suits_kernel(pieces) ? gather(to, pieces, table, stream.get()) : copy_each(to, pieces, stream.get());
    const Result<uint64_t> mark = status.ok() ? stream.mark() : Result<uint64_t>(status);
    if (!mark.ok()) {
      stream.drain();
      return mark.status();
    }
    if (table) listed_.push_back({numbered(*mark), std::move(table)});
    return numbered(*mark);
  }

  Result<bool> done(uint64_t number) override {
    Result<bool> ended = streams_[number % 2]->done(number / 2);
    if (ended.ok() && *ended)
      std::erase_if(listed_, [number](const Listed& list) { return list.number == number; });
    return ended;
  }

  void drain() override {
    for (const auto& stream : streams_) stream->drain();
    listed_.clear();
  }

 private:
  struct Listed {
    uint64_t number;
    CudaTables::Held table;
  };

  uint64_t numbered(uint64_t mark) const { return 2 * mark + turn_; }

  bool suits_kernel(std::span<const CopyPiece> pieces) const {
    uint64_t bytes = 0;
    for (const CopyPiece& piece : pieces) bytes += piece.bytes;
    return means_.host_by_kernel && bytes < pieces.size() * kLargeBytes;
  }

  Status gather(CopyTo to, std::span<const CopyPiece> pieces, CudaTables::Held& table, cuda::Stream stream) {
    const uint64_t most = means_.gather->most_piece_bytes();
    if (means_.tables && pieces.size() > few_.size() && pieces.size() <= kMostPieces)
      table = means_.tables->take();
    const CudaTables::Table into = table ? *table : CudaTables::Table{few_.data(), 0};
    const size_t room = table ? means_.tables->pieces_each() : few_.size();
    GatherList list{.link = means_.link};
    const auto launch = [&] {
      const Status status = means_.gather->start(into, list, stream);
      list = {.link = means_.link};
      return status;
    };
    for (const CopyPiece& piece : pieces) {
      for (uint64_t at = 0; at < piece.bytes; at += most) {
        const cuda::Address device = address_of(piece.device + at), slot = address_of(piece.slot + at);
        const auto cut = static_cast<uint32_t>(std::min(piece.bytes - at, most));
        const bool in = to == CopyTo::kDevice;
        into.pieces[list.num_pieces++] = {in ? slot : device, in ? device : slot, cut, 0};
        list.bytes += cut;
        if (list.num_pieces < room) continue;
        if (Status status = launch(); !status.ok()) return status;
      }
    }
    return list.num_pieces > 0 ? launch() : Status{};
  }

  Status copy_each(CopyTo to, std::span<const CopyPiece> pieces, cuda::Stream stream) {
    const cuda::Api& api = means_.device->api;
    for (const CopyPiece& piece : pieces) {
      const cuda::Address device = address_of(piece.device), slot = address_of(piece.slot);
      const int result = to == CopyTo::kDevice ? api.copy(device, slot, piece.bytes, stream)
                                               : api.copy(slot, device, piece.bytes, stream);
      if (Status status = api.check(result, "cuMemcpyAsync"); !status.ok()) return status;
    }
    return {};
  }

  const Means& means_;
  const Streams streams_;
  size_t turn_ = 0;
  std::vector<Listed> listed_;                           // until they have ended
  std::array<GatherPiece, GatherList::kFewPieces> few_;  // of the launch that is being filled
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
    means_.link = GatherLink::kHost;
    return {};
  }

  uint32_t most_pieces() const override { return kMostPieces; }

  Result<std::unique_ptr<CopyQueue>> open_queue() override {
    CudaQueue::Streams streams;
    for (auto& stream : streams) {
      Result<std::unique_ptr<cuda::MarkedStream>> opened = cuda::MarkedStream::open(means_.device);
      if (!opened.ok()) return opened.status();
      stream = std::move(*opened);
    }
    return std::make_unique<CudaQueue>(means_, std::move(streams));
  }

 private:
  Means means_;                     // constant after the last pin()
  std::vector<std::byte*> pinned_;  // by one thread, before the first queue
};

}  // namespace

Result<std::shared_ptr<DeviceCopier>> make_cuda_copier(const std::byte* memory,
                                                       std::shared_ptr<const GatherKernel> kernel,
                                                       uint32_t most_blocks) {
  Result<std::shared_ptr<const Device>> device = Device::of(memory);
  if (!device.ok()) return device.status();
  const bool has_kernel = kernel != nullptr;
  auto gather = std::make_shared<CudaGather>(*device, std::move(kernel), most_blocks);
  std::shared_ptr<CudaTables> tables;
  if (has_kernel) {
    const uint32_t most_cuts = SlotRing::kSlotBytes / gather->most_piece_bytes();  // of all pieces of a slot
    Result<std::shared_ptr<CudaTables>> made = CudaTables::make(*device, kTables, kMostPieces + most_cuts);
    if (!made.ok()) return made.status();
    tables = std::move(*made);
  }
  return std::make_shared<CudaCopier>(Means{std::move(*device), std::move(gather), std::move(tables)});
}

}  // namespace kvlink

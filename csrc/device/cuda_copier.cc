// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_copier.h"

#include <algorithm>
#include <array>
#include <vector>

#include "device/cuda_device.h"
#include "device/gather.h"

namespace kvlink {
namespace {

using cuda::address_of;
using cuda::Current;
using cuda::Device;

// Launches that a start may need, each with as many pieces as its parameters hold. They cost less than a
// table, whose copy makes the GPU change between its copy engine and the kernel.
constexpr uint32_t kMostLaunches = 6;
// Average piece size from which copy engines are as fast as the kernel, and leave the GPU's cores free.
constexpr uint64_t kLargeBytes = 128 << 10;

/// State that queues share. The kernel accesses pinned host memory in place.
struct Means {
  const std::shared_ptr<const Device> device;
  const std::shared_ptr<CudaGather> gather;
  bool host_by_kernel = true;              // addresses of pinned memory are the same on the device
  GatherLink link = GatherLink::kSameGpu;  // until host memory is pinned
};

class CudaQueue final : public CopyQueue {
 public:
  CudaQueue(const Means& means, std::unique_ptr<cuda::MarkedStream> stream)
      : means_(means), stream_(std::move(stream)) {}
  ~CudaQueue() override { drain(); }

  Result<uint64_t> start(CopyTo to, std::span<const CopyPiece> pieces) override {
    const Current current(stream_->device());
    if (!current.status().ok()) return current.status();
    const Status status = suits_kernel(pieces) ? gather(to, pieces) : copy_each(to, pieces);
    if (status.ok()) return stream_->mark();
    stream_->drain();
    return status;
  }
  Result<bool> done(uint64_t number) override { return stream_->done(number); }
  void drain() override { stream_->drain(); }

 private:
  bool suits_kernel(std::span<const CopyPiece> pieces) const {
    uint64_t bytes = 0;
    for (const CopyPiece& piece : pieces) bytes += piece.bytes;
    return means_.host_by_kernel && bytes < pieces.size() * kLargeBytes;
  }

  Status gather(CopyTo to, std::span<const CopyPiece> pieces) {
    const uint64_t most = means_.gather->most_piece_bytes();
    few_.num_pieces = 0;
    few_.bytes = 0;
    few_.link = means_.link;
    for (const CopyPiece& piece : pieces) {
      for (uint64_t at = 0; at < piece.bytes; at += most) {
        const cuda::Address device = address_of(piece.device + at), slot = address_of(piece.slot + at);
        const auto cut = static_cast<uint32_t>(std::min(piece.bytes - at, most));
        const bool in = to == CopyTo::kDevice;
        pieces_[few_.num_pieces++] = {in ? slot : device, in ? device : slot, cut, 0};
        few_.bytes += cut;
        if (few_.num_pieces < pieces_.size()) continue;
        if (Status status = launch(); !status.ok()) return status;
      }
    }
    return few_.num_pieces > 0 ? launch() : Status{};
  }

  Status launch() {
    const Status status = means_.gather->start({pieces_.data(), 0}, few_, stream_->get());
    few_.num_pieces = 0;
    few_.bytes = 0;
    return status;
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
  std::array<GatherPiece, GatherList::kFewPieces> pieces_;  // of the launch that is being filled
  GatherList few_;
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

  uint32_t most_pieces() const override { return kMostLaunches * GatherList::kFewPieces; }

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

Result<std::shared_ptr<DeviceCopier>> make_cuda_copier(const std::byte* memory,
                                                       std::shared_ptr<const GatherKernel> kernel,
                                                       uint32_t most_blocks) {
  Result<std::shared_ptr<const Device>> device = Device::of(memory);
  if (!device.ok()) return device.status();
  auto gather = std::make_shared<CudaGather>(*device, std::move(kernel), most_blocks);
  return std::make_shared<CudaCopier>(Means{std::move(*device), std::move(gather)});
}

}  // namespace kvlink

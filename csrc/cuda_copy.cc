// SPDX-License-Identifier: Apache-2.0
#include "cuda_copy.h"

#include <vector>

#include "cuda_device.h"

namespace kvlink {
namespace {

using cuda::address_of;
using cuda::Current;
using cuda::Device;

class CudaQueue final : public CopyQueue {
 public:
  explicit CudaQueue(std::unique_ptr<cuda::MarkedStream> stream) : stream_(std::move(stream)) {}

  Result<uint64_t> start(CopyTo to, std::span<const CopyPiece> pieces) override {
    const Current current(stream_->device());
    if (!current.status().ok()) return current.status();
    const Status status = enqueue(to, pieces);
    if (status.ok()) return stream_->mark();
    stream_->drain();
    return status;
  }
  Result<bool> done(uint64_t number) override { return stream_->done(number); }
  void drain() override { stream_->drain(); }

 private:
  Status enqueue(CopyTo to, std::span<const CopyPiece> pieces) {
    const cuda::Api& api = stream_->device().api;
    for (const CopyPiece& piece : pieces) {
      const cuda::Address device = address_of(piece.device);
      const Status status =
          to == CopyTo::kDevice
              ? api.check(api.copy_to_device(device, piece.host, piece.bytes, stream_->get()),
                          "cuMemcpyHtoDAsync")
              : api.check(api.copy_to_host(piece.host, device, piece.bytes, stream_->get()),
                          "cuMemcpyDtoHAsync");
      if (!status.ok()) return status;
    }
    return {};
  }

  const std::unique_ptr<cuda::MarkedStream> stream_;
};

class CudaCopier final : public DeviceCopier {
 public:
  explicit CudaCopier(std::shared_ptr<const Device> device) : device_(std::move(device)) {}
  ~CudaCopier() override {
    const Current current(*device_);
    for (std::byte* host : pinned_) device_->api.host_unregister(host);
  }

  Status pin(std::byte* host, uint64_t bytes) override {
    const Current current(*device_);
    if (!current.status().ok()) return current.status();
    Status status =
        device_->api.check(device_->api.host_register(host, bytes, cuda::kPortable), "cuMemHostRegister");
    if (status.ok()) pinned_.push_back(host);
    return status;
  }

  Result<std::unique_ptr<CopyQueue>> open_queue() override {
    Result<std::unique_ptr<cuda::MarkedStream>> stream = cuda::MarkedStream::open(device_);
    if (!stream.ok()) return stream.status();
    return std::unique_ptr<CopyQueue>(std::make_unique<CudaQueue>(std::move(*stream)));
  }

 private:
  const std::shared_ptr<const Device> device_;
  std::vector<std::byte*> pinned_;  // by one thread, before the first queue
};

}  // namespace

Result<std::shared_ptr<DeviceCopier>> make_cuda_copier(const std::byte* memory) {
  Result<std::shared_ptr<const Device>> device = Device::of(memory);
  if (!device.ok()) return device.status();
  return std::shared_ptr<DeviceCopier>(std::make_shared<CudaCopier>(std::move(*device)));
}

}  // namespace kvlink

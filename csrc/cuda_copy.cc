// SPDX-License-Identifier: Apache-2.0
// Copies by the CUDA driver: a stream of its own for each queue, an event behind each start(). The stream is
// non-blocking, so it waits for nobody's kernels: who offers blocks has waited for theirs.
#include "cuda_copy.h"

#include <deque>
#include <vector>

#include "cuda_api.h"

namespace kvlink {
namespace {

using cuda::Api;

/// A GPU's primary context, kept alive.
class Device {
 public:
  static Result<std::shared_ptr<const Device>> of(const std::byte* memory);
  Device(const Api& api, int device, cuda::Context context) : api(api), context(context), device_(device) {}
  ~Device() { api.primary_context_release(device_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Api& api;
  const cuda::Context context;

 private:
  const int device_;
};

unsigned long long address_of(const std::byte* memory) { return reinterpret_cast<uintptr_t>(memory); }

Result<std::shared_ptr<const Device>> Device::of(const std::byte* memory) {
  const Result<const Api*> loaded = cuda::api();
  if (!loaded.ok()) return loaded.status();
  const Api& api = **loaded;
  int ordinal = 0, device = 0;
  cuda::Context context = nullptr;
  Status status = api.check(api.pointer_get_attribute(&ordinal, cuda::kDeviceOrdinal, address_of(memory)),
                            "cuPointerGetAttribute");
  if (!status.ok()) return status;
  if (status = api.check(api.device_get(&device, ordinal), "cuDeviceGet"); !status.ok()) return status;
  status = api.check(api.primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
  if (!status.ok()) return status;
  return std::shared_ptr<const Device>(std::make_shared<Device>(api, device, context));
}

/// Makes the context current on this thread, whose own comes back.
class Current {
 public:
  explicit Current(const Device& device)
      : api_(device.api), status_(api_.check(api_.context_push(device.context), "cuCtxPushCurrent")) {}
  ~Current() {
    cuda::Context popped;
    if (status_.ok()) api_.context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  const Status& status() const { return status_; }

 private:
  const Api& api_;
  const Status status_;
};

class CudaQueue final : public CopyQueue {
 public:
  CudaQueue(std::shared_ptr<const Device> device, cuda::Stream stream)
      : device_(std::move(device)), api_(device_->api), stream_(stream) {}
  ~CudaQueue() override;

  Result<uint64_t> start(CopyTo to, std::span<const CopyPiece> pieces) override;
  Result<bool> done(uint64_t number) override;
  void drain() override;

 private:
  Status enqueue(CopyTo to, std::span<const CopyPiece> pieces);
  Status mark_end();

  const std::shared_ptr<const Device> device_;
  const Api& api_;
  const cuda::Stream stream_;
  uint64_t num_done_ = 0;            // a stream ends what it was given in order
  std::deque<cuda::Event> pending_;  // of what was started after that
  std::vector<cuda::Event> spare_;
};

CudaQueue::~CudaQueue() {
  const Current current(*device_);
  api_.stream_synchronize(stream_);
  for (cuda::Event event : pending_) api_.event_destroy(event);
  for (cuda::Event event : spare_) api_.event_destroy(event);
  api_.stream_destroy(stream_);
}

Result<uint64_t> CudaQueue::start(CopyTo to, std::span<const CopyPiece> pieces) {
  const Current current(*device_);
  if (!current.status().ok()) return current.status();
  Status status = enqueue(to, pieces);
  if (status.ok()) status = mark_end();
  if (status.ok()) return num_done_ + pending_.size();
  api_.stream_synchronize(stream_);
  return status;
}

Status CudaQueue::enqueue(CopyTo to, std::span<const CopyPiece> pieces) {
  for (const CopyPiece& piece : pieces) {
    const unsigned long long device = address_of(piece.device);
    const Status status =
        to == CopyTo::kDevice
            ? api_.check(api_.copy_to_device(device, piece.host, piece.bytes, stream_), "cuMemcpyHtoDAsync")
            : api_.check(api_.copy_to_host(piece.host, device, piece.bytes, stream_), "cuMemcpyDtoHAsync");
    if (!status.ok()) return status;
  }
  return {};
}

Status CudaQueue::mark_end() {
  cuda::Event event = nullptr;
  if (spare_.empty()) {
    const Status status = api_.check(api_.event_create(&event, cuda::kNoTiming), "cuEventCreate");
    if (!status.ok()) return status;
  } else {
    event = spare_.back();
    spare_.pop_back();
  }
  const Status status = api_.check(api_.event_record(event, stream_), "cuEventRecord");
  (status.ok() ? static_cast<void>(pending_.push_back(event)) : spare_.push_back(event));
  return status;
}

Result<bool> CudaQueue::done(uint64_t number) {
  if (number <= num_done_) return true;
  const Current current(*device_);
  if (!current.status().ok()) return current.status();
  while (!pending_.empty() && num_done_ < number) {
    const int result = api_.event_query(pending_.front());
    if (result == cuda::kNotReady) return false;
    if (const Status status = api_.check(result, "cuEventQuery"); !status.ok()) return status;
    spare_.push_back(pending_.front());
    pending_.pop_front();
    ++num_done_;
  }
  return true;
}

void CudaQueue::drain() {
  const Current current(*device_);
  api_.stream_synchronize(stream_);
}

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
    const Current current(*device_);
    if (!current.status().ok()) return current.status();
    cuda::Stream stream = nullptr;
    const int result = device_->api.stream_create(&stream, cuda::kNonBlockingStream);
    if (Status status = device_->api.check(result, "cuStreamCreate"); !status.ok()) return status;
    return std::unique_ptr<CopyQueue>(std::make_unique<CudaQueue>(device_, stream));
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

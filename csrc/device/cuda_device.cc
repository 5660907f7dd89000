// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_device.h"

namespace kvlink::cuda {

Result<std::shared_ptr<const Device>> Device::of(const std::byte* memory) {
  const Result<const Api*> loaded = cuda::api();
  if (!loaded.ok()) return loaded.status();
  int ordinal = 0;
  const int result = (*loaded)->pointer_get_attribute(&ordinal, kDeviceOrdinal, address_of(memory));
  if (Status status = (*loaded)->check(result, "cuPointerGetAttribute"); !status.ok()) return status;
  return at(ordinal);
}

Result<std::shared_ptr<const Device>> Device::at(int ordinal) {
  const Result<const Api*> loaded = cuda::api();
  if (!loaded.ok()) return loaded.status();
  const Api& api = **loaded;
  int device = 0;
  Uuid uuid{};
  Context context = nullptr;
  const RelaxedCapture relaxed(api);
  Status status = api.check(api.device_get(&device, ordinal), "cuDeviceGet");
  if (status.ok()) status = api.check(api.device_get_uuid(&uuid, device), "cuDeviceGetUuid");
  if (status.ok()) {
    status = api.check(api.primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
  }
  if (!status.ok()) return status;
  return std::shared_ptr<const Device>(std::make_shared<Device>(api, ordinal, device, context, uuid));
}

Result<std::unique_ptr<MarkedStream>> MarkedStream::open(std::shared_ptr<const Device> device) {
  const Current current(*device);
  if (!current.status().ok()) return current.status();
  const Api& api = device->api;
  Stream stream = nullptr;
  int least = 0, greatest = 0;
  Status status = api.check(api.stream_priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  if (!status.ok()) return status;
  status = api.check(api.stream_create(&stream, kNonBlockingStream, least), "cuStreamCreateWithPriority");
  if (!status.ok()) return status;
  return std::unique_ptr<MarkedStream>(new MarkedStream(std::move(device), stream));
}

MarkedStream::~MarkedStream() {
  const Current current(*device_);
  api_.stream_synchronize(stream_);
  for (Event event : pending_) api_.event_destroy(event);
  for (Event event : spare_) api_.event_destroy(event);
  api_.stream_destroy(stream_);
}

Result<uint64_t> MarkedStream::mark() {
  Status status = record();
  if (status.ok()) return num_done_ + pending_.size();
  api_.stream_synchronize(stream_);
  return status;
}

Status MarkedStream::record() {
  Event event = nullptr;
  if (spare_.empty()) {
    const Status status = api_.check(api_.event_create(&event, kNoTiming), "cuEventCreate");
    if (!status.ok()) return status;
  } else {
    event = spare_.back();
    spare_.pop_back();
  }
  const Status status = api_.check(api_.event_record(event, stream_), "cuEventRecord");
  (status.ok() ? static_cast<void>(pending_.push_back(event)) : spare_.push_back(event));
  return status;
}

Result<bool> MarkedStream::done(uint64_t number) {
  if (number <= num_done_) return true;
  const Current current(*device_);
  if (!current.status().ok()) return current.status();
  while (!pending_.empty() && num_done_ < number) {
    const int result = api_.event_query(pending_.front());
    if (result == kNotReady) return false;
    if (const Status status = api_.check(result, "cuEventQuery"); !status.ok()) return status;
    spare_.push_back(pending_.front());
    pending_.pop_front();
    ++num_done_;
  }
  return true;
}

void MarkedStream::drain() {
  const Current current(*device_);
  api_.stream_synchronize(stream_);
}

}  // namespace kvlink::cuda

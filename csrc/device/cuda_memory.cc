// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_memory.h"

#include <string>

namespace kvlink {
namespace {

using cuda::Api;

Status check(const Api& api, int result, const char* call, uint64_t bytes, int ordinal) {
  const Status status = api.check(result, call);
  if (status.ok()) return status;
  return {Code::kConfig,
          "cannot allocate " + std::to_string(bytes) + " bytes on cuda:" + std::to_string(ordinal) + ": " +
              status.what(),
          "ask for fewer blocks; nvidia-smi shows what is free"};
}

/// Also by the fabric where the GPU is on one.
int handle_types(const cuda::Device& device) {
  int fabric = 0;
  const int asked = device.api.device_get_attribute(&fabric, cuda::kFabricHandles, device.device);
  return asked == cuda::kSuccess && fabric != 0 ? cuda::kPosixFd | cuda::kFabric : cuda::kPosixFd;
}

cuda::AllocationProperties properties(const cuda::Device& device) {
  cuda::AllocationProperties wanted{};
  wanted.type = cuda::kPinnedAllocation;
  wanted.handle_types = handle_types(device);
  wanted.location = {cuda::kOnDevice, device.ordinal};
  int rdma = 0;
  const int asked = device.api.device_get_attribute(&rdma, cuda::kRdmaWithVmm, device.device);
  wanted.rdma_capable = asked == cuda::kSuccess && rdma != 0 ? 1 : 0;
  return wanted;
}

}  // namespace

Result<std::shared_ptr<CudaMemory>> CudaMemory::allocate(uint64_t bytes, int ordinal) {
  if (bytes == 0) return Status::Config("cannot allocate 0 bytes of GPU memory");
  Result<std::shared_ptr<const cuda::Device>> device = cuda::Device::at(ordinal);
  if (!device.ok()) return device.status();
  const cuda::Current current(**device);
  if (!current.status().ok()) return current.status();
  std::shared_ptr<CudaMemory> memory(new CudaMemory(std::move(*device), bytes));
  if (Status status = memory->map(); !status.ok()) return status;
  return memory;
}

Status CudaMemory::map() {
  const Api& api = device_->api;
  const int ordinal = device_->ordinal;
  cuda::AllocationProperties wanted = properties(*device_);
  size_t granularity = 0;
  const int asked = api.get_granularity(&granularity, &wanted, cuda::kRecommended);
  Status status = check(api, asked, "cuMemGetAllocationGranularity", bytes_, ordinal);
  if (!status.ok()) return status;
  const uint64_t whole = (bytes_ + granularity - 1) / granularity * granularity;
  cuda::Allocation allocation = 0;
  int created = api.allocation_create(&allocation, whole, &wanted, 0);
  if (created == cuda::kNotPermitted || created == cuda::kNotSupported) {  // IMEX has no channel for us
    wanted.handle_types = cuda::kPosixFd;
    created = api.allocation_create(&allocation, whole, &wanted, 0);
  }
  status = check(api, created, "cuMemCreate", bytes_, ordinal);
  if (!status.ok()) return status;
  const int reserved = api.address_reserve(&address_, whole, granularity, 0, 0);
  status = check(api, reserved, "cuMemAddressReserve", bytes_, ordinal);
  if (status.ok()) {
    reserved_ = whole;
    status = check(api, api.memory_map(address_, whole, 0, allocation, 0), "cuMemMap", bytes_, ordinal);
  }
  api.allocation_release(allocation);  // the mapping keeps it
  if (!status.ok()) return status;
  mapped_ = whole;
  const cuda::AccessDescription access{{cuda::kOnDevice, ordinal}, cuda::kReadWrite};
  status = check(api, api.memory_set_access(address_, whole, &access, 1), "cuMemSetAccess", bytes_, ordinal);
  return status.ok() ? clear() : status;
}

/// Waits until the bytes are zero, because other streams and NICs do not wait for this one and may write at
/// once.
Status CudaMemory::clear() {
  const Api& api = device_->api;
  const Result<std::unique_ptr<cuda::MarkedStream>> stream = cuda::MarkedStream::open(device_);
  if (!stream.ok()) return stream.status();
  const int set = api.memory_set(address_, 0, mapped_, (*stream)->get());
  const Status status = check(api, set, "cuMemsetD8Async", bytes_, device_->ordinal);
  if (!status.ok()) return status;
  return check(api, api.stream_synchronize((*stream)->get()), "cuStreamSynchronize", bytes_,
               device_->ordinal);
}

CudaMemory::~CudaMemory() {
  if (process_.inherited()) return;  // CUDA does not survive a fork
  const cuda::Current current(*device_);
  if (mapped_ != 0) device_->api.memory_unmap(address_, mapped_);
  if (reserved_ != 0) device_->api.address_free(address_, reserved_);
}

MemoryRange CudaMemory::range() const {
  return {.base = reinterpret_cast<std::byte*>(address_), .bytes = bytes_, .device = true};
}

}  // namespace kvlink

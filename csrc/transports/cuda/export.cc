// SPDX-License-Identifier: Apache-2.0
#include "transports/cuda/export.h"

#include <string>
#include <vector>

#include "base/host_identity.h"
#include "base/unique_fd.h"
#include "transports/cuda/fabric.h"
#include "transports/same_host/shared_mapping.h"

namespace kvlink {
namespace {

using cuda::Address;
using cuda::Api;

const char* const kAllocate = "allocate the pool with BlockPool.allocate(layout, gpu=...)";

/// The physical allocations of a region, in order, as descriptors of one type.
struct Parts {
  int type = 0;  // cuda::kPosixFd or kFabric
  std::vector<UniqueFd> fds;
  std::vector<uint64_t> sizes;
  uint64_t offset = 0;  // of the region in the first
  uint64_t bytes = 0;   // of the region that are covered
};

struct Retained {
  const Api& api;
  cuda::Allocation allocation;
  ~Retained() { api.allocation_release(allocation); }
};

/// Returns the type of handles that the allocation can be exported by. Descriptors come first, because they
/// need no daemon.
int type_of(const Api& api, cuda::Allocation allocation) {
  cuda::AllocationProperties made{};
  if (api.allocation_properties(&made, allocation) != cuda::kSuccess) return cuda::kPosixFd;
  return (made.handle_types & (cuda::kPosixFd | cuda::kFabric)) == cuda::kFabric ? cuda::kFabric
                                                                                 : cuda::kPosixFd;
}

Result<UniqueFd> export_fd(const Api& api, cuda::Allocation allocation) {
  int fd = -1;
  const int result = api.allocation_export(&fd, allocation, cuda::kPosixFd, 0);
  if (const Status status = api.check(result, "cuMemExportToShareableHandle"); !status.ok()) {
    return Status::Unavailable(
        "its memory was not allocated for sharing, or there is no descriptor left: " + status.what(),
        std::string("raise ulimit -n, or ") + kAllocate);
  }
  return UniqueFd(fd);
}

/// Returns true if `at` is in a physical allocation, which is appended, and false if it was not mapped from
/// one.
Result<bool> append_part(const Api& api, Address at, Parts& parts) {
  cuda::Allocation allocation = 0;
  if (api.allocation_retain(&allocation, reinterpret_cast<void*>(at)) != cuda::kSuccess) return false;
  const Retained retained{api, allocation};
  Address base = 0;
  size_t bytes = 0;
  Status status = api.check(api.get_address_range(&base, &bytes, at), "cuMemGetAddressRange");
  if (!status.ok()) return status;
  if (parts.fds.empty()) {
    parts.type = type_of(api, allocation);
    parts.offset = at - base;
  }
  Result<UniqueFd> fd =
      parts.type == cuda::kFabric ? export_fabric(api, allocation) : export_fd(api, allocation);
  if (!fd.ok()) return fd.status();
  parts.fds.push_back(std::move(*fd));
  parts.sizes.push_back(bytes);
  parts.bytes += base + bytes - at;
  return true;
}

Result<Parts> parts_of(const Api& api, const MemoryRange& range) {
  Parts parts;
  while (parts.bytes < range.bytes) {
    if (parts.fds.size() == kMaxCudaParts) {
      return Status::Unavailable("a region is in more than " + std::to_string(kMaxCudaParts) + " allocations",
                                 kAllocate);
    }
    const Result<bool> more = append_part(api, cuda::address_of(range.base) + parts.bytes, parts);
    if (!more.ok()) return more.status();
    if (!*more) break;
  }
  return parts;
}

Result<CudaKey> key_of_ipc(const Api& api, CudaKey key) {
  Address base = 0;
  size_t bytes = 0;
  Status status = api.check(api.get_address_range(&base, &bytes, key.address), "cuMemGetAddressRange");
  if (status.ok()) status = api.check(api.ipc_get(&key.ipc, base), "cuIpcGetMemHandle");
  if (!status.ok() || key.address + key.bytes > base + bytes) {
    return Status::Unavailable(
        "CUDA does not share its memory (cudaMallocAsync and managed memory cannot be shared): " +
            (status.ok() ? "it is in several allocations" : status.what()),
        kAllocate);
  }
  key.kind = CudaKey::Kind::kIpc;
  key.offset = key.address - base;
  return key;
}

Result<CudaKey> with_deed(FdServer& server, CudaKey key) {
  Result<UniqueFd> deed = memfd_of("kvlink-cuda-deed", key.deed_blob());
  if (!deed.ok()) return deed.status();
  key.deed = server.add(std::move(*deed), key.deed_offer()).id;
  return key;
}

}  // namespace

Result<CudaKey> export_cuda(const cuda::Device& device, FdServer& server, const MemoryRange& range) {
  const cuda::Current current(device);
  if (!current.status().ok()) return current.status();
  CudaKey key;
  key.bytes = range.bytes;
  key.address = cuda::address_of(range.base);
  key.gpu = device.uuid;
  key.pid_namespace = namespace_inode("pid");
  Result<Parts> parts = parts_of(device.api, range);
  if (!parts.ok()) return parts.status();
  if (parts->fds.empty()) {
    const Result<CudaKey> by_handle = key_of_ipc(device.api, key);
    return by_handle.ok() ? with_deed(server, *by_handle) : by_handle;
  }
  if (parts->bytes < range.bytes) return Status::Unavailable("a part of it is not mapped", kAllocate);
  key.kind = parts->type == cuda::kFabric ? CudaKey::Kind::kFabric : CudaKey::Kind::kAllocations;
  key.offset = parts->offset;
  for (size_t part = 0; part < parts->fds.size(); ++part) {
    const FdOffer offer{0, 0, parts->sizes[part], Access::kRead};
    key.parts.push_back(server.add(std::move(parts->fds[part]), offer));
  }
  return with_deed(server, std::move(key));
}

}  // namespace kvlink

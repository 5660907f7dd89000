// SPDX-License-Identifier: Apache-2.0
#include "transports/cuda/mapping.h"

#include <string>

#include "base/host_identity.h"
#include "transports/cuda/fabric.h"

namespace kvlink {
namespace {

/// How this process sees the GPU of the owner, before the driver is asked to map memory.
enum class Seen { kReachable, kHidden };

/// Finds the GPU with the id `owner` among those of this process. Refuses one that `reader` cannot access.
Result<Seen> find_gpu(const cuda::Device& reader, const cuda::Uuid& owner) {
  if (reader.uuid == owner) return Seen::kReachable;
  const cuda::Api& api = reader.api;
  int count = 0, can = 0;
  Status status = api.check(api.device_get_count(&count), "cuDeviceGetCount");
  if (!status.ok()) return status;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    cuda::Uuid uuid{};
    if (api.device_get(&device, ordinal) != cuda::kSuccess) continue;
    if (api.device_get_uuid(&uuid, device) != cuda::kSuccess || uuid != owner) continue;
    status = api.check(api.device_can_access_peer(&can, reader.device, device), "cuDeviceCanAccessPeer");
    if (!status.ok()) return status;
    if (can != 0) return Seen::kReachable;
    return Status::Unavailable("this worker's GPU " + std::to_string(reader.ordinal) +
                                   " does not reach GPU " + std::to_string(ordinal) +
                                   ", the owner's (nvidia-smi topo -p2p r)",
                               "use verbs or tcp between them");
  }
  return Seen::kHidden;
}

/// Says what to change after the driver has refused the memory of a GPU that this process does not see.
Status hidden_gpu(const CudaKey& key, const Status& why) {
  const bool by_parts = key.kind == CudaKey::Kind::kAllocations;
  return Status::Unavailable(
      "the owner's GPU is not visible to this process, and the driver does not map its memory: " + why.what(),
      std::string("name it in CUDA_VISIBLE_DEVICES after this worker's own GPU") +
          (by_parts ? ", or let the owner's pool be cudaMalloc memory, which needs no visible GPU" : "") +
          "; MIG instances do not share memory: use verbs or tcp between them");
}

Result<cuda::Allocation> import_fd(const cuda::Api& api, int fd) {
  cuda::Allocation allocation = 0;
  void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  const int imported = api.allocation_import(&allocation, handle, cuda::kPosixFd);
  const Status status = api.check(imported, "cuMemImportFromShareableHandle");
  return status.ok() ? Result<cuda::Allocation>(allocation) : status;
}

}  // namespace

Result<std::unique_ptr<CudaMapping>> CudaMapping::make(std::shared_ptr<const cuda::Device> reader,
                                                       const CudaKey& key, FdClient& client) {
  const Result<Seen> seen = find_gpu(*reader, key.gpu);
  if (!seen.ok()) return seen.status();
  const cuda::Current current(*reader);
  if (!current.status().ok()) return current.status();
  std::unique_ptr<CudaMapping> mapping(new CudaMapping(std::move(reader), key.gpu));
  const bool by_parts = key.in_parts();
  mapping->by_owner_ = !by_parts;
  Status status = by_parts ? mapping->map_parts(key, client) : mapping->open_ipc(key, client);
  // The driver maps cudaMalloc memory of hidden GPUs, and is asked for other memory too.
  const bool by_fabric = key.kind == CudaKey::Kind::kFabric;  // which asks for no visible GPU
  if (!status.ok() && *seen == Seen::kHidden && !by_fabric) return hidden_gpu(key, status);
  return status.ok() ? Result<std::unique_ptr<CudaMapping>>(std::move(mapping)) : status;
}

CudaMapping::~CudaMapping() {
  const cuda::Current current(*reader_);
  const cuda::Api& api = reader_->api;
  if (ipc_ != 0) api.ipc_close(ipc_);
  cuda::Address at = start_;
  for (const uint64_t bytes : mapped_) {
    api.memory_unmap(at, bytes);
    at += bytes;
  }
  if (reserved_ != 0) api.address_free(start_, reserved_);
}

Status CudaMapping::map_parts(const CudaKey& key, FdClient& client) {
  const cuda::Api& api = reader_->api;
  const uint64_t bytes = key.span();
  Status status = api.check(api.address_reserve(&start_, bytes, 0, 0, 0), "cuMemAddressReserve");
  if (!status.ok()) return status;
  reserved_ = bytes;
  cuda::Address at = start_;
  for (const FdOffer& part : key.parts) {
    const Result<UniqueFd> fd = client.take(part);
    if (!fd.ok()) return fd.status();
    if (status = map_part(part, (*fd).get(), key.kind, at); !status.ok()) return status;
    at += part.bytes;
  }
  cuda::AccessDescription access{{cuda::kOnDevice, reader_->ordinal}, cuda::kReadOnly};
  int set = api.memory_set_access(start_, bytes, &access, 1);
  if (set != cuda::kSuccess) {  // not every GPU and driver has mappings for reading alone
    access.flags = cuda::kReadWrite;
    set = api.memory_set_access(start_, bytes, &access, 1);
  }
  address_ = start_ + key.offset;
  return api.check(set, "cuMemSetAccess");
}

Status CudaMapping::map_part(const FdOffer& part, int fd, CudaKey::Kind kind, cuda::Address at) {
  const cuda::Api& api = reader_->api;
  const Result<cuda::Allocation> allocation =
      kind == CudaKey::Kind::kFabric ? import_fabric(api, fd) : import_fd(api, fd);
  if (!allocation.ok()) return allocation.status();
  const Status status = api.check(api.memory_map(at, part.bytes, 0, *allocation, 0), "cuMemMap");
  api.allocation_release(*allocation);  // the mapping keeps it
  if (status.ok()) mapped_.push_back(part.bytes);
  return status;
}

Status CudaMapping::open_ipc(const CudaKey& key, const FdClient& client) {
  if (client.in_owner_process()) {  // CUDA opens such handles in other processes alone
    address_ = key.address;
    return {};
  }
  const cuda::Api& api = reader_->api;
  const Status status = api.check(api.ipc_open(&ipc_, key.ipc, cuda::kLazyPeerAccess), "cuIpcOpenMemHandle");
  address_ = ipc_ + key.offset;
  cuda::Address base = 0;
  size_t bytes = 0;
  // A GPU that reads behind an allocation is lost to the whole process.
  if (status.ok() && api.get_address_range(&base, &bytes, ipc_) == cuda::kSuccess &&
      (key.offset > bytes || key.bytes > bytes - key.offset))
    return Status::AccessDenied("the owner's key is of more memory than its handle");
  if (status.ok() || is_own_namespace("pid", key.pid_namespace)) return status;
  return Status::Unavailable(
      "the owner is in another pid namespace, and the driver does not map its memory: " + status.what(),
      "share one (docker run --pid, shareProcessNamespace in Kubernetes), or allocate the pool with "
      "BlockPool.allocate(layout, gpu=...), which is passed by descriptor");
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "transports/cuda/fabric.h"

#include <unistd.h>

#include "transports/same_host/shared_mapping.h"

namespace kvlink {
namespace {

Status check(const cuda::Api& api, int result, const char* call) {
  const Status status = api.check(result, call);
  if (result != cuda::kNotPermitted && result != cuda::kNotSupported) return status;
  return Status::Unavailable(
      "no IMEX channel: " + status.what(),
      "start nvidia-imex, and give this process or container the channel that the other "
      "one has (/dev/nvidia-caps-imex-channels), or allocate the pool with "
      "BlockPool.allocate(layout, gpu=...), which needs none on one host");
}

}  // namespace

Result<UniqueFd> export_fabric(const cuda::Api& api, cuda::Allocation allocation) {
  cuda::FabricHandle handle{};
  const int exported = api.allocation_export(&handle, allocation, cuda::kFabric, 0);
  if (Status status = check(api, exported, "cuMemExportToShareableHandle"); !status.ok()) return status;
  return memfd_of("kvlink-fabric-handle", {reinterpret_cast<const char*>(handle.bytes), sizeof handle.bytes});
}

Result<cuda::Allocation> import_fabric(const cuda::Api& api, int fd) {
  cuda::FabricHandle handle{};
  if (::pread(fd, handle.bytes, sizeof handle.bytes, 0) != sizeof handle.bytes) {
    return Status::AccessDenied("the owner's handle of the fabric is malformed");
  }
  cuda::Allocation allocation = 0;
  const int imported = api.allocation_import(&allocation, &handle, cuda::kFabric);
  const Status status = check(api, imported, "cuMemImportFromShareableHandle");
  return status.ok() ? Result<cuda::Allocation>(allocation) : status;
}

}  // namespace kvlink

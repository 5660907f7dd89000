// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_api.h"

#include "base/dynamic_library.h"

namespace kvlink::cuda {
namespace {

const char* const kInstall =
    "install the NVIDIA driver, and give the container the GPU (nvidia-smi must work)";

Result<Api> load() {
  Result<Library> opened = Library::open({"libcuda.so.1"}, kInstall);
  if (!opened.ok()) return opened.status();
  Library& library = *opened;
  Api api{};
  const bool complete =
      library.load(api.init, "cuInit") && library.load(api.get_error_name, "cuGetErrorName") &&
      library.load(api.pointer_get_attribute, "cuPointerGetAttribute") &&
      library.load(api.device_get, "cuDeviceGet") &&
      library.load(api.primary_context_retain, "cuDevicePrimaryCtxRetain") &&
      library.load(api.primary_context_release, "cuDevicePrimaryCtxRelease_v2") &&
      library.load(api.context_push, "cuCtxPushCurrent_v2") &&
      library.load(api.context_pop, "cuCtxPopCurrent_v2") &&
      library.load(api.host_register, "cuMemHostRegister_v2") &&
      library.load(api.host_unregister, "cuMemHostUnregister") &&
      library.load(api.host_device_pointer, "cuMemHostGetDevicePointer_v2") &&
      library.load(api.stream_create, "cuStreamCreate") &&
      library.load(api.stream_synchronize, "cuStreamSynchronize") &&
      library.load(api.stream_destroy, "cuStreamDestroy_v2") &&
      library.load(api.event_create, "cuEventCreate") && library.load(api.event_record, "cuEventRecord") &&
      library.load(api.event_query, "cuEventQuery") && library.load(api.event_destroy, "cuEventDestroy_v2") &&
      library.load(api.copy, "cuMemcpyAsync") && library.load(api.device_get_count, "cuDeviceGetCount") &&
      library.load(api.device_get_attribute, "cuDeviceGetAttribute") &&
      library.load(api.device_get_uuid, "cuDeviceGetUuid_v2") &&
      library.load(api.device_can_access_peer, "cuDeviceCanAccessPeer") &&
      library.load(api.memory_alloc, "cuMemAlloc_v2") && library.load(api.memory_free, "cuMemFree_v2") &&
      library.load(api.memory_set, "cuMemsetD8_v2") &&
      library.load(api.get_address_range, "cuMemGetAddressRange_v2") &&
      library.load(api.get_granularity, "cuMemGetAllocationGranularity") &&
      library.load(api.allocation_create, "cuMemCreate") &&
      library.load(api.allocation_retain, "cuMemRetainAllocationHandle") &&
      library.load(api.allocation_release, "cuMemRelease") &&
      library.load(api.allocation_export, "cuMemExportToShareableHandle") &&
      library.load(api.allocation_import, "cuMemImportFromShareableHandle") &&
      library.load(api.address_reserve, "cuMemAddressReserve") &&
      library.load(api.address_free, "cuMemAddressFree") && library.load(api.memory_map, "cuMemMap") &&
      library.load(api.memory_unmap, "cuMemUnmap") && library.load(api.memory_set_access, "cuMemSetAccess") &&
      library.load(api.ipc_get, "cuIpcGetMemHandle") && library.load(api.ipc_open, "cuIpcOpenMemHandle_v2") &&
      library.load(api.ipc_close, "cuIpcCloseMemHandle") &&
      library.load(api.module_load, "cuModuleLoadData") &&
      library.load(api.module_unload, "cuModuleUnload") &&
      library.load(api.module_get_function, "cuModuleGetFunction") &&
      library.load(api.launch, "cuLaunchKernel");
  if (!complete) {
    return Status::Unavailable(
        library.name() + " has no " + library.missing() + ": it is older than CUDA 11.4",
        "upgrade the NVIDIA driver");
  }
  library.load(api.copy_batch, "cuMemcpyBatchAsync_v2");
  return api;
}

}  // namespace

Status Api::check(int result, const char* call) const {
  if (result == kSuccess) return {};
  const char* name = nullptr;
  if (get_error_name(result, &name) != kSuccess || name == nullptr) name = "an unknown error";
  return Status::Unavailable(std::string(call) + ": " + name + " (" + std::to_string(result) + ")",
                             "see dmesg and nvidia-smi -q");
}

Result<const Api*> library() {
  static const Result<Api> loaded = load();
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

Result<const Api*> api() {
  const Result<const Api*> opened = library();
  if (!opened.ok()) return opened;
  static const Status initialised = (*opened)->check((*opened)->init(0), "cuInit");
  return initialised.ok() ? opened : initialised;
}

}  // namespace kvlink::cuda

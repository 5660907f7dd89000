// SPDX-License-Identifier: Apache-2.0
#include "cuda_api.h"

#include "dl.h"

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
      library.load(api.stream_create, "cuStreamCreate") &&
      library.load(api.stream_synchronize, "cuStreamSynchronize") &&
      library.load(api.stream_destroy, "cuStreamDestroy_v2") &&
      library.load(api.event_create, "cuEventCreate") && library.load(api.event_record, "cuEventRecord") &&
      library.load(api.event_query, "cuEventQuery") && library.load(api.event_destroy, "cuEventDestroy_v2") &&
      library.load(api.copy_to_device, "cuMemcpyHtoDAsync_v2") &&
      library.load(api.copy_to_host, "cuMemcpyDtoHAsync_v2");
  if (!complete) {
    return Status::Unavailable(library.name() + " has no " + library.missing() + ": it is older than CUDA 11",
                               "upgrade the NVIDIA driver");
  }
  if (Status status = api.check(api.init(0), "cuInit"); !status.ok()) return status;
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

Result<const Api*> api() {
  static const Result<Api> loaded = load();
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

}  // namespace kvlink::cuda

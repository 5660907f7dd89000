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
#define KVLINK_LOAD(name, symbol, parameters) &&library.load(api.name, symbol)
  const bool complete = true KVLINK_CUDA(KVLINK_LOAD);
#undef KVLINK_LOAD
  if (!complete) {
    return Status::Unavailable(
        library.name() + " has no " + library.missing() + ": it is older than CUDA 11.4",
        "upgrade the NVIDIA driver");
  }
  library.load(api.copy_batch, "cuMemcpyBatchAsync_v2");
  library.load(api.copy_batch_12, "cuMemcpyBatchAsync");
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

// SPDX-License-Identifier: Apache-2.0
#include "device/gather_kernel.h"

namespace kvlink {

Result<std::shared_ptr<GatherKernel>> GatherKernel::load(std::shared_ptr<const cuda::Device> device,
                                                         const std::string& image) {
  const cuda::Current current(*device);
  if (!current.status().ok()) return current.status();
  std::shared_ptr<GatherKernel> kernel(new GatherKernel(std::move(device)));
  const cuda::Api& api = kernel->device_->api;
  int multiprocessors = 0;
  const int asked =
      api.device_get_attribute(&multiprocessors, cuda::kMultiprocessors, kernel->device_->device);
  Status status = api.check(asked, "cuDeviceGetAttribute");
  if (!status.ok()) return status;
  kernel->num_multiprocessors_ = static_cast<uint32_t>(multiprocessors);
  status = api.check(api.module_load(&kernel->module_, image.c_str()), "cuModuleLoadData");
  if (!status.ok()) return status;
  const int found = api.module_get_function(&kernel->function_, kernel->module_, "kvlink_gather");
  status = api.check(found, "cuModuleGetFunction");
  if (!status.ok()) return status;
  return kernel;
}

GatherKernel::~GatherKernel() {
  if (!module_ || device_->process.inherited()) return;
  const cuda::Current current(*device_);
  device_->api.module_unload(module_);
}

Result<KernelTarget> kernel_target(int gpu) {
  const Result<const cuda::Api*> loaded = cuda::api();
  if (!loaded.ok()) return loaded.status();
  const cuda::Api& api = **loaded;
  KernelTarget target;
  int device = 0;
  Status status = api.check(api.device_get(&device, gpu), "cuDeviceGet");
  for (const auto& [value, attribute] :
       {std::pair{&target.major, cuda::kCapabilityMajor}, std::pair{&target.minor, cuda::kCapabilityMinor}}) {
    if (!status.ok()) break;
    status = api.check(api.device_get_attribute(value, attribute, device), "cuDeviceGetAttribute");
  }
  if (status.ok()) status = api.check(api.driver_get_version(&target.driver), "cuDriverGetVersion");
  if (!status.ok()) return status;
  return target;
}

}  // namespace kvlink

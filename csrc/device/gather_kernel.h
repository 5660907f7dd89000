// SPDX-License-Identifier: Apache-2.0
// gather.cu, compiled for one GPU.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "device/cuda_device.h"

namespace kvlink {

/// The compiled kernel, loaded once into a GPU's primary context. Any thread.
class GatherKernel {
 public:
  /// `image` is a cubin or PTX. Returns kTransportUnavailable if the driver refuses it.
  static Result<std::shared_ptr<GatherKernel>> load(std::shared_ptr<const cuda::Device> device,
                                                    const std::string& image);
  ~GatherKernel();
  GatherKernel(const GatherKernel&) = delete;
  GatherKernel& operator=(const GatherKernel&) = delete;

  cuda::Function function() const { return function_; }
  uint32_t num_multiprocessors() const { return num_multiprocessors_; }

 private:
  explicit GatherKernel(std::shared_ptr<const cuda::Device> device) : device_(std::move(device)) {}

  const std::shared_ptr<const cuda::Device> device_;
  cuda::Module module_ = nullptr;
  cuda::Function function_ = nullptr;
  uint32_t num_multiprocessors_ = 0;
};

/// These decide which images a GPU runs: its compute capability, and the driver's newest CUDA (12080: 12.8).
struct KernelTarget {
  int major = 0, minor = 0, driver = 0;
};

Result<KernelTarget> kernel_target(int gpu);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The kernel that gathers blocks on a GPU.
#include "bindings/bindings.h"
#include "bindings/wait.h"
#include "device/gather_kernel.h"

namespace kvlink {

void register_kernel(py::module_& m) {
  py::class_<GatherKernel, std::shared_ptr<GatherKernel>>(m, "CudaKernel",
                                                          py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const std::string& image, int gpu) {
             return take(run_whole([&]() -> Result<std::shared_ptr<GatherKernel>> {  // PTX is compiled
               Result<std::shared_ptr<const cuda::Device>> device = cuda::Device::at(gpu);
               if (!device.ok()) return device.status();
               return GatherKernel::load(std::move(*device), image);
             }));
           }),
           py::arg("image"), py::arg("gpu"));
  m.def(
      "kernel_target",
      [](int gpu) {
        const KernelTarget target = take(without_gil([gpu] { return kernel_target(gpu); }));
        return py::make_tuple(target.major, target.minor, target.driver);
      },
      py::arg("gpu"));
}

}  // namespace kvlink

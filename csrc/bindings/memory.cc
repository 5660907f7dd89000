// SPDX-License-Identifier: Apache-2.0
// Memory that kvlink allocates.
#include <optional>

#include "bindings/bindings.h"
#include "bindings/wait.h"
#include "device/cuda_memory.h"
#include "memory/host_memory.h"

namespace kvlink {
namespace {

// Unmapping and freeing takes the kernel 0.2 s per GiB of host memory, and a GPU ends its work first.
constexpr py::release_gil_before_calling_cpp_dtor kFreesMuch{};

template <typename Memory>
uintptr_t address_of(const Memory& memory) {
  return reinterpret_cast<uintptr_t>(memory.range().base);
}

template <typename Memory>
uint64_t bytes_of(const Memory& memory) {
  return memory.range().bytes;
}

/// Runs `allocate` without the GIL, and raises with it.
template <typename Allocate>
auto allocated(const Allocate& allocate) {
  auto memory = without_gil(allocate);
  if (PyErr_Occurred()) throw py::error_already_set();  // a signal handler raised it
  return take(std::move(memory));
}

/// Returns a function that runs Python's signal handlers on the main thread; it returns false if one raised.
std::function<bool()> handles_signals() {
  if (!on_main_thread()) return {};
  return [] {
    py::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() == 0;
  };
}

/// Entered and left on one thread.
class RelaxedCapture {
 public:
  void enter() {
    const Result<const cuda::Api*> library = without_gil(&cuda::library);  // the first call loads it
    if (library.ok()) relaxed_.emplace(**library);
  }
  void exit(const py::args&) { relaxed_.reset(); }

 private:
  std::optional<cuda::RelaxedCapture> relaxed_;
};

}  // namespace

void register_memory(py::module_& m) {
  py::class_<HostMemory, std::shared_ptr<HostMemory>>(m, "HostMemory", kFreesMuch)
      .def(py::init([](uint64_t bytes, bool huge_pages) {
             return allocated([=] { return HostMemory::allocate(bytes, huge_pages, handles_signals()); });
           }),
           py::arg("bytes"), py::arg("huge_pages") = true)
      .def_property_readonly("address", &address_of<HostMemory>)
      .def_property_readonly("bytes", &bytes_of<HostMemory>);
  py::class_<CudaMemory, std::shared_ptr<CudaMemory>>(m, "CudaMemory", kFreesMuch)
      .def(py::init([](uint64_t bytes, int gpu) {
             return allocated([=] { return CudaMemory::allocate(bytes, gpu); });
           }),
           py::arg("bytes"), py::arg("gpu"))
      .def_property_readonly("address", &address_of<CudaMemory>)
      .def_property_readonly("bytes", &bytes_of<CudaMemory>);
  py::class_<RelaxedCapture>(m, "RelaxedCapture")
      .def(py::init())
      .def("__enter__", &RelaxedCapture::enter)
      .def("__exit__", &RelaxedCapture::exit);
}

}  // namespace kvlink

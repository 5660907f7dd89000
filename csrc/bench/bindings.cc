// SPDX-License-Identifier: Apache-2.0
// The Python module `_bench`: limits of the machine that benchmarks compare with, and the cost of posting.
#include "bindings/bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bench/baselines.h"
#include "bench/bounce_baseline.h"
#include "bench/lease_cost.h"
#include "bench/posting_cost.h"
#include "bench/tcp_baseline.h"
#include "device/cuda_memory.h"
#include "device/gather_kernel.h"
#include "memory/host_memory.h"
#include "plan/planner.h"

namespace kvlink {
namespace {

BaselinePieces baseline_pieces(const py::array_t<uint64_t, py::array::c_style>& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != 3) raise(Status::Config("pieces are rows of from, to and bytes"));
  return {reinterpret_cast<const BaselinePiece*>(rows.data()), static_cast<size_t>(rows.shape(0))};
}

/// Benchmarks count the instructions within it.
[[gnu::noinline]] void call_rounds(const py::function& call, int rounds) {
  for (int round = 0; round < rounds; ++round) call();
}

void register_bench(py::module_& m) {
  using Pieces = py::array_t<uint64_t, py::array::c_style>;
  m.def("call_rounds", &call_rounds, py::arg("call"), py::arg("rounds"));
  m.def("baseline_memfd", [](const HostMemory& memory) { return memory.range().memfd; }, py::arg("memory"));
  const auto answering = [](const Pieces& pieces, auto copy, size_t threads = 1) {
    const BaselinePieces found = baseline_pieces(pieces);
    Result<int64_t> took = [&] {
      py::gil_scoped_release release;
      return baseline_at_once(found, threads, [&copy](size_t, BaselinePieces share) { return copy(share); });
    }();
    return take(std::move(took));
  };
  const auto copying = [&m, answering](const char* name, int64_t (*copy)(BaselinePieces)) {
    m.def(
        name,
        [copy, answering](const Pieces& pieces, size_t threads) {
          return answering(pieces, [copy](BaselinePieces share) { return Result(copy(share)); }, threads);
        },
        py::arg("pieces"), py::arg("threads") = 1);
  };
  copying("baseline_memcpy", &baseline_memcpy);
  copying("baseline_streamed_copy", &baseline_streamed_copy);
  m.def(
      "baseline_process_vm_readv",
      [answering](int pid, const Pieces& pieces, size_t threads) {
        return answering(
            pieces, [pid](BaselinePieces share) { return baseline_process_vm_readv(pid, share); }, threads);
      },
      py::arg("pid"), py::arg("pieces"), py::arg("threads") = 1);
  m.def(
      "baseline_cuda_copies",
      [answering](const Pieces& pieces) { return answering(pieces, &baseline_cuda_copies); },
      py::arg("pieces"));
  m.def(
      "time_bounce",
      [](const CudaMemory& memory, uint32_t piece_bytes, bool to_device,
         const std::shared_ptr<GatherKernel>& kernel) {
        const Result<BounceTimes> times = [&] {
          py::gil_scoped_release release;
          return time_bounce(memory.range(), piece_bytes, to_device ? CopyTo::kDevice : CopyTo::kSlot,
                             kernel);
        }();
        check(times.status());
        return py::make_tuple(times->bounced_ns, times->plain_ns);
      },
      py::arg("memory"), py::arg("piece_bytes"), py::arg("to_device"), py::arg("kernel"));
  py::class_<BaselineSource>(m, "BaselineSource")
      .def(py::init([](const HostMemory& memory) {
             return take(BaselineSource::make(memory.range().base, memory.range().bytes));
           }),
           py::arg("memory"), py::keep_alive<1, 2>())
      .def_property_readonly("port", &BaselineSource::port)
      .def("close", &BaselineSource::close, py::call_guard<py::gil_scoped_release>());
  py::class_<BaselineSink>(m, "BaselineSink")
      .def(py::init([](uint16_t port) { return take(BaselineSink::connect(port)); }), py::arg("port"))
      .def(
          "read",
          [answering](BaselineSink& self, const Pieces& pieces) {
            return answering(pieces, [&self](BaselinePieces found) { return self.read(found); });
          },
          py::arg("pieces"))
      .def_static(
          "read_at_once",
          [](const std::vector<BaselineSink*>& sinks, const Pieces& pieces) {
            const BaselinePieces found = baseline_pieces(pieces);
            Result<int64_t> took = [&] {
              py::gil_scoped_release release;
              return baseline_at_once(found, sinks.size(), [&sinks](size_t number, BaselinePieces share) {
                return sinks[number]->read(share);
              });
            }();
            return take(std::move(took));
          },
          py::arg("sinks"), py::arg("pieces"));
  const auto leasing = [&m](const char* name, Result<int64_t> (*time)(const LeasesOut&, uint32_t)) {
    m.def(
        name,
        [time](uint32_t num_slots, uint32_t num_leases, uint32_t rounds) {
          return take(time({num_slots, num_leases}, rounds));
        },
        py::arg("num_slots"), py::arg("num_leases"), py::arg("rounds"));
  };
  leasing("sweep_ns", &time_sweep);
  leasing("grant_at_ns", &time_grant_at);
  leasing("vain_revoke_ns", &time_vain_revoke);
  leasing("revoke_ns", &time_revoke);
#ifndef KVLINK_NO_VERBS
  m.def(
      "post_ns", [](const Plan& plan, uint32_t rounds) { return take(time_posting(plan, rounds)); },
      py::arg("plan"), py::arg("rounds"));
#endif
}

}  // namespace
}  // namespace kvlink

PYBIND11_MODULE(_bench, m, py::mod_gil_not_used()) {
  m.doc() = "What this machine does without kvlink, for benchmarks.";
  py::module_::import("kvlink._core");  // registers HostMemory, CudaMemory and Plan
  kvlink::register_bench(m);
}

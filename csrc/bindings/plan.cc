// SPDX-License-Identifier: Apache-2.0
// Bindings of layouts, plans and planners.
#include "bindings/plan.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

namespace kvlink {
namespace {

struct PackedSegment {
  uint64_t local;
  uint32_t bytes, region;
};

}  // namespace

void register_plan(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(ReadOp, offset, bytes, region, first_segment, num_segments);
  PYBIND11_NUMPY_DTYPE(PackedSegment, local, bytes, region);

  py::class_<Layout>(m, "Layout")
      .def(py::init([](uint32_t num_blocks, uint32_t block_tokens, uint32_t first_head, uint32_t num_heads,
                       uint32_t row_bytes, uint64_t block_stride, uint64_t token_stride, uint64_t head_stride,
                       const std::vector<std::tuple<uint32_t, uint32_t, uint64_t>>& planes,
                       std::tuple<uint32_t, uint32_t, uint32_t> tokens) {
             const auto [rank, size, interleave] = tokens;
             Layout layout{num_blocks,   block_tokens, first_head,  num_heads, row_bytes,
                           block_stride, token_stride, head_stride, {},        {rank, size, interleave}};
             for (const auto& [region, plane_layer, offset] : planes)
               layout.planes.push_back({region, plane_layer, offset});
             return layout;
           }),
           py::arg("num_blocks"), py::arg("block_tokens"), py::arg("first_head"), py::arg("num_heads"),
           py::arg("row_bytes"), py::arg("block_stride"), py::arg("token_stride"), py::arg("head_stride"),
           py::arg("planes"), py::arg("tokens") = std::tuple(0, 1, 1));
  py::class_<Plan>(m, "Plan")
      .def_property_readonly("num_ops", [](const Plan& plan) { return plan.ops.size(); })
      .def_property_readonly("num_segments", [](const Plan& plan) { return plan.segments.size(); })
      .def_readonly("bytes", &Plan::bytes)
      .def("ops",
           [](const Plan& plan) {
             return py::array_t<ReadOp>(static_cast<py::ssize_t>(plan.ops.size()), plan.ops.data());
           })
      .def("segments", [](const Plan& plan) {
        py::array_t<PackedSegment> packed(static_cast<py::ssize_t>(plan.segments.size()));
        auto rows = packed.mutable_unchecked<1>();
        for (py::ssize_t row = 0; row < rows.size(); ++row) {
          const Segment& segment = plan.segments[static_cast<size_t>(row)];
          rows(row) = {reinterpret_cast<uintptr_t>(segment.local), segment.bytes, segment.region};
        }
        return packed;
      });
  py::class_<PyPlanner>(m, "Planner")
      .def_property_readonly("num_layers", [](const PyPlanner& self) { return self.planner->num_layers(); })
      .def(py::init([](const Layout& reader, const Layout& owner,
                       const std::vector<std::pair<uintptr_t, uint64_t>>& local_regions,
                       const std::vector<uint64_t>& remote_region_bytes,
                       const std::vector<uint32_t>& remote_region_index, Range heads) {
             std::vector<MemoryRange> local;
             for (const auto& [address, bytes] : local_regions) {
               local.push_back({.base = reinterpret_cast<std::byte*>(address), .bytes = bytes});
             }
             return PyPlanner{take(Planner::make(reader, owner, std::move(local), remote_region_bytes,
                                                 remote_region_index, heads))};
           }),
           py::arg("reader"), py::arg("owner"), py::arg("local_regions"), py::arg("remote_region_bytes"),
           py::arg("remote_region_index"), py::arg("heads") = Range{})
      .def(
          "plan",
          [](const PyPlanner& self, py::handle owner_blocks, py::handle reader_blocks, Range tokens,
             Range layers, std::optional<Plan*> into) {
            const BlockIds owner(owner_blocks), reader(reader_blocks);
            Plan fresh;
            Plan& plan = into ? **into : fresh;
            check(self.planner->plan(owner, reader, {tokens, layers}, plan));
            return into ? py::cast(*into, py::return_value_policy::reference) : py::cast(std::move(fresh));
          },
          py::arg("owner_blocks"), py::arg("reader_blocks"), py::arg("tokens"), py::arg("layers") = Range{},
          py::arg("into") = py::none());
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The options of RDMA connections.
#include <string>

#include "bindings/bindings.h"
#include "transports/registry.h"

namespace kvlink {

void register_rdma_options(py::module_& m) {
  py::class_<RdmaOptions>(m, "RdmaOptions")
      .def(py::init([](const std::string& connect, const std::string& gid, uint16_t pkey,
                       uint8_t service_level, uint8_t traffic_class, uint8_t timeout, uint8_t retries,
                       double silence_s, uint32_t qps) {
             const auto silence_ns = static_cast<int64_t>(silence_s * 1e9);
             return RdmaOptions{connect, gid,        pkey, service_level, traffic_class, timeout,
                                retries, silence_ns, qps};
           }),
           py::kw_only(), py::arg("connect"), py::arg("gid"), py::arg("pkey"), py::arg("service_level"),
           py::arg("traffic_class"), py::arg("timeout"), py::arg("retries"), py::arg("silence_s"),
           py::arg("qps"))
      .def("__repr__", [](const RdmaOptions& made) {
        return py::str(
                   "connect={!r} gid={!r} pkey={:#x} service_level={} traffic_class={} timeout={} retries={} "
                   "silence_ns={} qps={}")
            .format(made.connect, made.gid, made.pkey, made.service_level, made.traffic_class, made.timeout,
                    made.retries, made.silence_ns, made.qps_per_rail);
      });
}

}  // namespace kvlink

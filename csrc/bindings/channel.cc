// SPDX-License-Identifier: Apache-2.0
#include "channel/channel.h"

#include <pybind11/stl.h>

#include <cstring>

#include "bindings/bindings.h"
#include "bindings/wait.h"

namespace kvlink {
namespace {

using channel::Channel;
using channel::ChannelAddress;
using channel::Client;

template <size_t size>
void copy_bytes(const py::bytes& from, std::array<char, size>& into, const char* what) {
  const std::string_view bytes = from;
  if (bytes.size() != size)
    raise(Status::Config(std::string(what) + " of a native channel has another size"));
  std::memcpy(into.data(), bytes.data(), size);
}

template <size_t size>
py::bytes to_bytes(const std::array<char, size>& from) {
  return py::bytes(from.data(), size);
}

/// Keeps the engine as long as the channel may call it.
channel::Serving serving(const std::shared_ptr<Engine>& engine) {
  channel::Serving serving = channel::serving(*engine);
  serving.accept = [engine, accept = std::move(serving.accept)](
                       const ConnectRequest& request, uint64_t caller) { return accept(request, caller); };
  return serving;
}

py::tuple listen(Channel& self, const std::shared_ptr<Engine>& engine, const std::string& host, uint16_t port,
                 const std::string& advertise) {
  check(engine->process().check());
  if (!engine->started()) raise(Status::Config("this worker has not started"));
  const ChannelAddress at =
      take(without_gil([&] { return self.listen(serving(engine), host, port, advertise); }));
  return py::make_tuple(at.addresses, to_bytes(at.credentials.instance), to_bytes(at.credentials.secret));
}

std::shared_ptr<Client> dial(Channel& self, std::vector<std::string> addresses, const py::bytes& instance,
                             const py::bytes& secret, uint32_t flags, double timeout_s) {
  ChannelAddress to{std::move(addresses), {}, flags};
  copy_bytes(instance, to.credentials.instance, "the instance");
  copy_bytes(secret, to.credentials.secret, "the secret");
  return take(without_gil([&] { return self.dial(to, to_ns(timeout_s)); }));
}

void register_client(py::module_& m) {
  py::class_<Client, std::shared_ptr<Client>>(m, "ChannelClient", py::release_gil_before_calling_cpp_dtor())
      .def(
          "card",
          [](Client& self, double timeout_s) {
            return py::bytes(take(without_gil([&] { return self.card(to_ns(timeout_s)); })));
          },
          py::arg("timeout_s"))
      .def(
          "connect",
          [](Client& self, const std::string& worker_id, uint64_t epoch, const std::string& transport,
             std::vector<std::string> hellos, double timeout_s) {
            const ConnectRequest request{worker_id, epoch, transport, std::move(hellos)};
            const Accepted accepted =
                take(without_gil([&] { return self.connect(request, to_ns(timeout_s)); }));
            return py::make_tuple(accepted.connection_id, bytes_list(accepted.replies),
                                  bytes_list(accepted.pool_keys), bytes_list(accepted.lease_keys));
          },
          py::arg("worker_id"), py::arg("epoch"), py::arg("transport"), py::arg("hellos"),
          py::arg("timeout_s"))
      .def(
          "settle",
          [](Client& self, uint32_t slot, uint64_t nonce, double timeout_s) {
            return take(without_gil([&] { return self.settle({slot, nonce}, to_ns(timeout_s)); }));
          },
          py::arg("slot"), py::arg("settle_nonce"), py::arg("timeout_s"))
      .def(
          "end_with_owner",
          [](Client& self, const std::shared_ptr<Connection>& connection) {
            check(self.process().check());
            without_gil([&] { self.end_with_owner(connection); });
          },
          py::arg("connection"))
      .def_property_readonly("ended",
                             [](const Client& self) {
                               check(self.process().check());
                               return self.ended().sentence();
                             })
      .def("close", [](Client& self) { without_gil([&] { self.close(); }); });
}

}  // namespace

void register_channel(py::module_& m) {
  register_client(m);
  py::class_<Channel, std::shared_ptr<Channel>>(m, "Channel", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([] { return take(without_gil([] { return Channel::make(); })); }))
      .def("listen", &listen, py::arg("engine"), py::arg("host"), py::arg("port"), py::arg("advertise") = "")
      .def(
          "publish",
          [](Channel& self, std::string card) {
            check(without_gil([&] { return self.publish(std::move(card)); }));
          },
          py::arg("card"))
      .def("dial", &dial, py::arg("addresses"), py::arg("instance"), py::arg("secret"), py::arg("flags"),
           py::arg("timeout_s"))
      .def("close", [](Channel& self) { run_whole([&self] { self.close(); }); });
}

}  // namespace kvlink

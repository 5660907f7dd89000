// SPDX-License-Identifier: Apache-2.0
// The Python module `_core`. A Status becomes an exception of kvlink.errors. Calls that may wait, or free or
// register much memory, release the GIL; tests/transfer/test_gil.py tries each, or says why it need not.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/clock.h"
#include "bindings/bindings.h"
#include "bindings/lease_seat.h"
#include "bindings/plan.h"
#include "bindings/wait.h"
#include "device/cuda_memory.h"
#include "device/gather_kernel.h"
#include "engine/engine.h"
#include "engine/prior_cost.h"
#include "transports/registry.h"

namespace kvlink {
namespace {

py::tuple durations(const Durations& durations) {
  return py::make_tuple(durations.sum_ns, py::cast(durations.buckets));
}

void register_path_stats(py::module_& m) {
  py::class_<PathStats, std::shared_ptr<PathStats>>(m, "PathStats")
      .def(py::init([](const std::string& transport) {
             return std::make_shared<PathStats>(prior_cost(transport));
           }),
           py::arg("transport"))
      .def("counts", [](const PathStats& self) {
        const PathCounts counts = self.counts();
        py::dict failed;
        for (size_t code = 1; code < counts.failed.size(); ++code) {
          if (counts.failed[code] > 0) failed[name_of(static_cast<Code>(code))] = counts.failed[code];
        }
        py::dict stale;
        for (const bool soft : {false, true}) {
          for (size_t why = 0; why < counts.stale[soft].size(); ++why) {
            if (counts.stale[soft][why] > 0) stale[py::make_tuple(soft, why)] = counts.stale[soft][why];
          }
        }
        return py::make_tuple(counts.valid, counts.bytes, counts.num_ops, counts.num_segments,
                              counts.unsettled, counts.redone, counts.rails_set_aside, failed, stale,
                              durations(counts.plan), durations(counts.read), durations(counts.validate),
                              durations(counts.settle), durations(counts.total));
      });
}

int64_t soft_ttl_ns(double ttl_s) { return ttl_s > 0 ? to_ns(ttl_s) : kNoExpiryNs; }

LeaseTable& leases_of(Engine& engine) {
  check(engine.process().check());
  if (!engine.started()) raise(Status::Config("this worker has not started"));
  return engine.leases();
}

/// Runs `call` on the lease table. Many blocks take long although nobody has the table's lock, and a driver
/// may be busy.
template <typename Call>
auto on_leases(Engine& engine, size_t num_blocks, Call call) {
  constexpr size_t kQuickBlocks = 4096;  // tens of microseconds
  const LeaseTable& leases = leases_of(engine);
  return num_blocks > kQuickBlocks || engine.asks_driver() ? without_gil(call) : with_lock_of(leases, call);
}

/// Runs a method of the lease table.
template <typename Returned, typename... Arguments>
auto of_leases(Returned (LeaseTable::*method)(Arguments...)) {
  return [method](Engine& self, Arguments... arguments) {
    return on_leases(self, 0, [&] { return (self.leases().*method)(arguments...); });
  };
}

/// Most calls find nothing, and keep the GIL: every step of an engine makes one.
uint32_t revoke(Engine& self, py::handle blocks) {
  check(self.process().check());
  if (!self.started()) return 0;
  const BlockIds ids(blocks);
  const std::span<const uint32_t> spanned = ids;
  const Revoked revoked = on_leases(self, spanned.size(), [&] { return self.leases().revoke(spanned); });
  if (!self.is_enforced(revoked)) without_gil([&] { self.enforce(revoked); });
  return revoked.num_ended;
}

void register_engine(py::module_& m) {
  // Its destructor closes it, which joins threads.
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](uint64_t epoch, const std::vector<std::string>& transports, const std::string& host,
                       uint16_t port, const std::string& fault, uint32_t num_lease_slots,
                       uint32_t num_progress_threads, double inline_us, uint32_t num_lanes,
                       const std::vector<std::pair<std::string, uint32_t>>& nics, const RdmaOptions& rdma,
                       uint64_t bounce_bytes, const std::shared_ptr<GatherKernel>& cuda_kernel,
                       uint32_t gpu_blocks, const std::string& advertise, const std::string& worker,
                       bool nics_named, const std::string& fabric_provider) {
             TransportOptions how{
                 host,           port, fault, {}, rdma, cuda_kernel, gpu_blocks, advertise, {worker, epoch},
                 fabric_provider};
             how.nics.emplace();
             for (const auto& [name, mbps] : nics) how.nics->push_back({name, mbps, nics_named});
             const EngineOptions options{epoch,           transports,           how,
                                         num_lease_slots, num_progress_threads, to_ns(inline_us / 1e6),
                                         num_lanes,       bounce_bytes};
             auto made = take(without_gil([&] { return Engine::make(options); }));  // names are resolved
             return std::shared_ptr<Engine>(made.release(), DeleteOwn());
           }),
           py::arg("epoch"), py::arg("transports"), py::arg("host"), py::arg("port"), py::arg("fault"),
           py::arg("num_lease_slots"), py::arg("num_progress_threads"), py::arg("inline_us"),
           py::arg("num_lanes"), py::arg("nics"), py::arg("rdma") = RdmaOptions{},
           py::arg("bounce_bytes") = 0, py::arg("cuda_kernel") = nullptr, py::arg("gpu_blocks") = 0,
           py::arg("advertise") = "", py::arg("worker") = "", py::arg("nics_named") = false,
           py::arg("fabric_provider") = "")
      .def(
          "add_pool_region",
          [](Engine& self, const HostMemory& memory) { return take(self.add_pool_region(memory.range())); },
          py::arg("memory"), py::keep_alive<1, 2>())
      .def(
          "add_foreign_region",
          [](Engine& self, uintptr_t address, uint64_t bytes, const py::object&, bool device,
             std::vector<int> dmabufs, uint64_t offset, std::vector<int> pcie_dmabufs) {
            auto* const base = reinterpret_cast<std::byte*>(address);
            return take(self.add_pool_region(
                {base, bytes, -1, 0, std::move(dmabufs), std::move(pcie_dmabufs), offset, device}));
          },
          py::arg("address"), py::arg("bytes"), py::arg("keeper"), py::arg("device") = false,
          py::arg("dmabuf_fds") = std::vector<int>{}, py::arg("dmabuf_offset") = 0,
          py::arg("pcie_dmabuf_fds") = std::vector<int>{}, py::keep_alive<1, 4>())
      .def("disable", &Engine::disable, py::arg("transport"), py::arg("why"),
           py::call_guard<py::gil_scoped_release>())
      .def("force_bounce", &Engine::force_bounce, py::arg("transport"), py::arg("why"))
      .def(
          "set_staging",
          [](Engine& self, const CudaMemory& memory, bool always, std::vector<int> dmabufs, uint64_t offset,
             std::vector<int> pcie_dmabufs) {
            MemoryRange range = memory.range();
            range.dmabuf_fds = std::move(dmabufs);
            range.pcie_dmabuf_fds = std::move(pcie_dmabufs);
            range.dmabuf_offset = offset;
            self.set_staging({range, always});
          },
          py::arg("memory"), py::arg("always"), py::arg("dmabuf_fds"), py::arg("dmabuf_offset"),
          py::arg("pcie_dmabuf_fds"), py::keep_alive<1, 2>())
      .def("staging_refused", &Engine::staging_refused)
      .def("start", [](Engine& self) { check(without_gil([&self] { return self.start(); })); })
      .def("access",
           [](const Engine& self) {
             py::list rows;
             check(self.process().check());
             for (const TransportAccess& row : self.access()) {
               rows.append(py::make_tuple(row.name, py::bytes(row.address), bytes_list(row.pool_keys),
                                          bytes_list(row.lease_keys), row.refused, row.bounces));
             }
             return rows;
           })
      .def("left_out",
           [](const Engine& self) {
             std::vector<std::pair<std::string, std::string>> rows;
             for (const TransportAccess& row : self.access()) {
               for (const PortState& port : row.left_out) rows.emplace_back(port.name, port.away);
             }
             return rows;
           })
      .def(
          "accept",
          [](Engine& self, const std::string& transport, const std::vector<std::string>& hellos,
             bool takes_keys, uint64_t caller) {
            check(self.process().check());
            const Accepted accepted =
                take(without_gil([&] { return self.accept(transport, hellos, takes_keys, caller); }));
            return py::make_tuple(accepted.connection_id, bytes_list(accepted.replies),
                                  bytes_list(accepted.pool_keys), bytes_list(accepted.lease_keys));
          },
          py::arg("transport"), py::arg("hellos"), py::arg("takes_keys"), py::arg("caller"))
      .def(
          "open",
          [](Engine& self, const std::string& transport, const std::string& address,
             std::shared_ptr<PathStats> path_stats, const std::string& worker, uint64_t epoch) {
            check(self.process().check());
            return take(without_gil(
                [&] { return self.open(transport, address, std::move(path_stats), {worker, epoch}); }));
          },
          py::arg("transport"), py::arg("address"), py::arg("path_stats"), py::arg("worker") = "",
          py::arg("epoch") = 0, py::keep_alive<0, 1>())
      .def(
          "grant",
          [](Engine& self, uint64_t lease, uint32_t readers, uint64_t ready, double ttl_s) {
            return take(on_leases(self, 0, [&] { return self.grant(lease, readers, ready, to_ns(ttl_s)); }));
          },
          py::arg("lease"), py::arg("readers"), py::arg("ready"), py::arg("ttl_s"))
      .def(
          "grant_at",
          [](Engine& self, uint64_t lease, const std::vector<LeaseSeat>& seats, uint64_t ready,
             double ttl_s) {
            check(on_leases(self, 0, [&] { return self.grant_at(lease, seats, ready, to_ns(ttl_s)); }));
          },
          py::arg("lease"), py::arg("seats"), py::arg("ready"), py::arg("ttl_s"))
      .def(
          "grant_soft",
          [](Engine& self, py::handle blocks, uint64_t ready, double ttl_s) {
            const BlockIds ids(blocks);
            const std::span<const uint32_t> spanned = ids;
            return take(on_leases(self, spanned.size(),
                                  [&] { return self.grant_soft(spanned, ready, soft_ttl_ns(ttl_s)); }));
          },
          py::arg("blocks"), py::arg("ready"), py::arg("ttl_s"))
      .def(
          "grant_soft_at",
          [](Engine& self, const LeaseSeat& seat, py::handle blocks, uint64_t ready, double ttl_s) {
            const BlockIds ids(blocks);
            const std::span<const uint32_t> spanned = ids;
            check(on_leases(self, spanned.size(),
                            [&] { return self.grant_soft_at(seat, spanned, ready, soft_ttl_ns(ttl_s)); }));
          },
          py::arg("seat"), py::arg("blocks"), py::arg("ready"), py::arg("ttl_s"))
      .def("revoke", &revoke, py::arg("blocks"))
      .def(
          "holds_lease",
          [](Engine& self, uint32_t slot, uint64_t nonce) { return leases_of(self).holds(slot, nonce); },
          py::arg("slot"), py::arg("nonce"))
      .def("lease_at", of_leases(&LeaseTable::lease_at), py::arg("slot"), py::arg("settle_nonce"))
      .def("withdraw_soft", of_leases(&LeaseTable::withdraw_soft), py::arg("slot"), py::arg("nonce"))
      .def("soft_lease_counts",
           [](Engine& self) {
             const SoftLeaseCounts counts =
                 on_leases(self, 0, [&self] { return self.leases().soft_counts(); });
             return py::make_tuple(counts.active, counts.granted, counts.evicted, counts.displaced,
                                   counts.expired);
           })
      .def(
          "set_ready",
          [](Engine& self, uint64_t lease, uint64_t ready) {
            return on_leases(self, 0, [&] { return self.set_ready(lease, ready); });
          },
          py::arg("lease"), py::arg("ready"))
      .def(
          "extend",
          [](Engine& self, uint64_t lease, double ttl_s) {
            return on_leases(self, 0, [&] { return self.leases().extend(lease, to_ns(ttl_s), now_ns()); });
          },
          py::arg("lease"), py::arg("ttl_s"))
      .def(
          "set_ttl",
          [](Engine& self, uint64_t lease, double ttl_s) {
            return on_leases(self, 0, [&] { return self.leases().set_ttl(lease, to_ns(ttl_s), now_ns()); });
          },
          py::arg("lease"), py::arg("ttl_s"))
      .def(
          "renew",
          [](Engine& self, uint32_t slot, uint64_t nonce) {
            return on_leases(self, 0, [&] { return self.leases().renew(slot, nonce, now_ns()); });
          },
          py::arg("slot"), py::arg("settle_nonce"))
      .def("abort", of_leases(static_cast<bool (LeaseTable::*)(uint64_t)>(&LeaseTable::abort)),
           py::arg("lease"))
      .def("settle_local", of_leases(&LeaseTable::settle), py::arg("slot"), py::arg("settle_nonce"))
      .def("take_ended",
           [](Engine& self) {
             check(self.process().check());
             py::list rows;
             for (const EndedLease& lease : without_gil([&self] { return self.take_ended(); })) {
               rows.append(py::make_tuple(lease.lease, static_cast<int>(lease.how),
                                          static_cast<double>(lease.held_ns) / 1e9));
             }
             return rows;
           })
      .def("watch_ended", own(&Engine::watch_ended), py::arg("queue"))
      .def("set_control", &Engine::set_control, py::arg("queue"))
      .def("ports",
           [](const Engine& self) {
             check(self.process().check());
             py::list rows;
             for (const PortState& port : self.ports())
               rows.append(py::make_tuple(port.name, port.away, port.times_away, port.held));
             return rows;
           })
      .def("watch_ports", own(&Engine::watch_ports), py::arg("queue"))
      .def("lease_counts",
           [](Engine& self) {
             const LeaseTable& leases = leases_of(self);
             const LeaseCounts counts = without_gil([&leases] { return leases.counts(now_ns()); });
             return py::make_tuple(counts.active, counts.granted, counts.settled, counts.expired,
                                   counts.aborted, counts.fenced_readers,
                                   static_cast<double>(counts.oldest_ns) / 1e9);
           })
      .def("close", [](Engine& self) { run_whole([&self] { self.close(); }); });
}

}  // namespace
}  // namespace kvlink

PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
  using namespace kvlink;
  m.doc() = "The data plane of kvlink; kvlink.transfer.engine is the way in.";
  m.attr("NIC_SLICE_BYTES") = kNicSliceBytes;
  m.def("transports", [] {
    py::list rows;
    for (const TransportInfo& info : transports()) {
      const Status probed = without_gil(info.probe);  // loads libraries, opens devices
      rows.append(py::make_tuple(info.name, info.summary, info.default_lanes, probed.what(), probed.fix()));
    }
    return rows;
  });
  m.def(
      "probe",
      [](const std::string& transport) {
        const TransportInfo* const info = find_transport(transport);
        const Status probed = info ? without_gil(info->probe) : Status::Config("there is no such transport");
        return py::make_tuple(probed.what(), probed.fix());
      },
      py::arg("transport"));
  m.def(
      "fabric_providers",
      [](const std::string& host) {
        py::list rows;
        for (const FabricProvider& each : take(without_gil([&] { return fabric_providers(host); })))
          rows.append(py::make_tuple(each.name, each.facts, each.why_not));
        return rows;
      },
      py::arg("host"));
  m.def(
      "prior_cost",
      [](const std::string& transport) {
        const Cost prior = prior_cost(transport);
        return py::make_tuple(prior.start_us, prior.op_ns, prior.gib_per_s);
      },
      py::arg("transport"));
  register_ticket(m);
  register_memory(m);
  register_kernel(m);
  register_plan(m);
  register_transfer(m);
  register_pull(m);
  register_path_stats(m);
  register_connection(m);
  register_rdma_options(m);
  register_engine(m);
  register_channel(m);
}

// SPDX-License-Identifier: Apache-2.0
// Bindings of connections and the transfers on them. Calls that may wait release the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <deque>

#include "base/clock.h"
#include "bindings/bindings.h"
#include "bindings/lease_seat.h"
#include "bindings/plan.h"
#include "bindings/wait.h"
#include "engine/engine.h"

namespace kvlink {
namespace {

/// A tuple with named fields, which is as cheap as a plain one.
py::object as_tuple(const TransferStats& stats) {
  static PyStructSequence_Field fields[] = {
      {"bytes", nullptr},     {"num_ops", nullptr},      {"num_segments", nullptr}, {"plan_ns", nullptr},
      {"post_ns", nullptr},   {"read_ns", nullptr},      {"validate_ns", nullptr},  {"settle_ns", nullptr},
      {"total_ns", nullptr},  {"ran_inline", nullptr},   {"staged", nullptr},       {"direct_us", nullptr},
      {"staged_us", nullptr}, {"predicted_us", nullptr}, {nullptr, nullptr},
  };
  static PyStructSequence_Desc about{"kvlink._core.TransferStats", "The work and the times of one transfer.",
                                     fields, static_cast<int>(std::size(fields)) - 1};
  static PyTypeObject* const type = PyStructSequence_NewType(&about);
  if (!type) throw py::error_already_set();
  auto made = py::reinterpret_steal<py::object>(PyStructSequence_New(type));
  if (!made) throw py::error_already_set();
  Py_ssize_t at = 0;
  const auto add = [&](auto value) {
    PyStructSequence_SetItem(made.ptr(), at++, py::cast(value).release().ptr());
  };
  for (const uint64_t count : {stats.bytes, stats.num_ops, stats.num_segments}) add(count);
  for (const int64_t ns :
       {stats.plan_ns, stats.post_ns, stats.read_ns, stats.validate_ns, stats.settle_ns, stats.total_ns}) {
    add(ns);
  }
  add(stats.ran_inline);
  add(stats.staged);
  add(stats.predicted.direct_us);
  add(stats.predicted.staged_us);
  add(stats.predicted_us);
  return made;
}

/// Starts a pull of so many bytes.
std::shared_ptr<Transfer> start(Connection& self, PullRequest& request, LeaseSeat seat, int stream,
                                double timeout_s, uint64_t bytes) {
  request.seat = seat;
  request.stream = static_cast<StreamUnit>(stream);
  request.deadline_ns = now_ns() + std::max(to_ns(timeout_s), Connection::kLeastNs);
  // A few microseconds of copying cost less than releasing the GIL and waiting for it again.
  if (self.runs_at_once(bytes) && request.stream == StreamUnit::kNone) return self.pull(request);
  return without_gil([&] { return self.pull(request); });
}

/// Returns the request of one cache group. The lists must outlive it.
PullRequest request_of(const PyPlanner& planner, const BlockIds& owner, const BlockIds& reader, Range tokens,
                       Range layers) {
  PullRequest request;
  request.planner = planner.planner;
  request.owner_blocks = owner;
  request.reader_blocks = reader;
  request.tokens = tokens;
  request.layers = layers;
  return request;
}

std::shared_ptr<Transfer> pull(Connection& self, const PyPlanner& planner, py::handle owner_blocks,
                               py::handle reader_blocks, Range tokens, Range layers, LeaseSeat seat,
                               int stream, double timeout_s) {
  check(self.process().check());
  const BlockIds owner(owner_blocks), reader(reader_blocks);
  PullRequest request = request_of(planner, owner, reader, tokens, layers);
  return start(self, request, seat, stream, timeout_s,
               request.planner->bytes(tokens.end - tokens.begin, layers));
}

using GroupRow = std::tuple<PyPlanner, py::object, py::object, Range, Range, bool>;

/// Pulls one cache group in batches, and offers it on under `lease` of the same worker, unless that is 0: the
/// lease's `ready` grows by `scale` for each unit that has validated. With `last`, the lease ends if the pull
/// fails.
std::shared_ptr<Transfer> relay(Connection& self, Engine& engine, uint64_t lease, uint64_t scale, bool last,
                                const GroupRow& row, LeaseSeat seat, int stream, uint32_t num_tokens,
                                uint64_t batch, double timeout_s) {
  check(self.process().check());
  if (static_cast<StreamUnit>(stream) == StreamUnit::kNone) raise(Status::Config("a relay streams"));
  const auto& [planner, owner_blocks, reader_blocks, tokens, layers, at_end] = row;
  const BlockIds owner(owner_blocks), reader(reader_blocks);
  PullRequest request = request_of(planner, owner, reader, tokens, layers);
  request.num_tokens = num_tokens;
  request.batch_units = batch;
  if (lease != 0) {
    // The table outlives the transfer's run: closing the engine closes its connections, which ends all
    // transfers.
    LeaseTable* const leases = &engine.leases();
    request.follower = std::make_shared<const Follower>(
        Follower{[=](uint64_t units) { leases->set_ready(lease, units * scale); },
                 [=] { last && leases->abort(lease); }});
  }
  return start(self, request, seat, stream, timeout_s,
               planner.planner->bytes(tokens.end - tokens.begin, layers));
}

/// Keeps the connection, whose numbers of regions its plan has.
struct PreparedPlan {
  std::shared_ptr<Connection> connection;
  std::shared_ptr<const Plan> plan;

  std::shared_ptr<Transfer> pull(LeaseSeat seat, double timeout_s) const {
    check(connection->process().check());
    PullRequest request;
    request.prepared = plan;
    return start(*connection, request, seat, 0, timeout_s, plan->bytes);
  }
};

PreparedPlan prepare(const std::shared_ptr<Connection>& self, const PyPlanner& planner,
                     py::handle owner_blocks, py::handle reader_blocks, Range tokens, Range layers) {
  check(self->process().check());
  const BlockIds owner(owner_blocks), reader(reader_blocks);
  const PullRequest request = request_of(planner, owner, reader, tokens, layers);
  return {self, take(without_gil([&] { return self->prepare(request); }))};
}

/// Each row: planner, owner's and reader's blocks, tokens, layers, whether a streaming pull reads it at the
/// end.
std::shared_ptr<Transfer> pull_groups(Connection& self, const std::vector<GroupRow>& rows, LeaseSeat seat,
                                      int stream, uint32_t num_tokens, double timeout_s) {
  check(self.process().check());
  if (rows.empty()) raise(Status::Config("a pull reads at least one cache group"));
  std::deque<BlockIds> ids;  // keeps its elements in place
  std::vector<GroupRead> groups;
  uint64_t bytes = 0;
  for (const auto& [planner, owner, reader, tokens, layers, at_end] : rows) {
    const std::span<const uint32_t> theirs = ids.emplace_back(owner), ours = ids.emplace_back(reader);
    groups.push_back({planner.planner, theirs, ours, tokens, layers, at_end});
    bytes += planner.planner->bytes(tokens.end - tokens.begin, layers);
  }
  PullRequest request;
  static_cast<GroupRead&>(request) = groups[0];
  request.more = std::span(groups).subspan(1);
  request.num_tokens = num_tokens;
  return start(self, request, seat, stream, timeout_s, bytes);
}

}  // namespace

void register_transfer(py::module_& m) {
  py::class_<CompletionQueue, std::shared_ptr<CompletionQueue>>(m, "CompletionQueue")
      .def(py::init([] { return take(CompletionQueue::make()); }))
      .def("fileno", &CompletionQueue::fd)
      .def("drain", &CompletionQueue::drain)
      .def("close", &CompletionQueue::close);
  py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer")
      .def_property_readonly("state",
                             [](const Transfer& self) {
                               check(self.check_process());
                               return static_cast<int>(self.state());
                             })
      .def_property_readonly("started_ns", &Transfer::started_ns)
      .def_property_readonly("proven_units", &Transfer::proven_units)
      .def("done",
           [](const Transfer& self) {
             check(self.check_process());
             return self.done();
           })
      .def(
          "wait",
          [](Transfer& self, double timeout_s) {
            check(self.check_process());
            return self.done() || wait_for(to_ns(timeout_s), [&self](int64_t ns) { return self.wait(ns); });
          },
          py::arg("timeout_s"))
      .def("failure",
           [](const Transfer& self) -> py::object {
             const Status status = with_lock_of(self, [&self] { return self.status(); });
             if (status.ok()) return py::none();
             return py::make_tuple(name_of(status.code()), status.what(), status.fix(),
                                   static_cast<int>(status.stale()));
           })
      .def("cancel",
           [](Transfer& self) {
             check(self.check_process());
             without_gil([&self] { self.cancel(); });
           })
      .def(
          "notify",
          [](Transfer& self, std::shared_ptr<CompletionQueue> queue, uint64_t token) {
            check(self.check_process());
            return with_lock_of(self, [&] { return self.notify(std::move(queue), token); });
          },
          py::arg("queue"), py::arg("token"))
      .def("stats", [](const Transfer& self) {
        return as_tuple(with_lock_of(self, [&self] { return self.stats(); }));
      });
}

void register_connection(py::module_& m) {
  // The last one to have a connection closes it, which waits for its lanes.
  constexpr py::release_gil_before_calling_cpp_dtor kCloses{};
  py::class_<PreparedPlan>(m, "PreparedPlan", kCloses)
      .def("pull", &PreparedPlan::pull, py::arg("seat"), py::arg("timeout_s"));
  py::class_<Connection, std::shared_ptr<Connection>>(m, "Connection", kCloses)
      .def("hellos", [](const Connection& self) { return bytes_list(self.hellos()); })
      .def(
          "establish",
          [](Connection& self, uint32_t connection_id, const std::vector<std::string>& replies,
             const std::vector<std::string>& pool_keys, const std::vector<std::string>& lease_keys,
             uint64_t epoch, double timeout_s) {
            check(self.process().check());
            return take(run_whole([&] {
              return self.establish(connection_id, replies, pool_keys, lease_keys, epoch, to_ns(timeout_s));
            }));
          },
          py::arg("connection_id"), py::arg("replies"), py::arg("pool_keys"), py::arg("lease_keys"),
          py::arg("epoch"), py::arg("timeout_s"))
      .def("pull", &pull, py::arg("planner"), py::arg("owner_blocks"), py::arg("reader_blocks"),
           py::arg("tokens"), py::arg("layers"), py::arg("seat"), py::arg("stream"), py::arg("timeout_s"))
      .def("prepare", &prepare, py::arg("planner"), py::arg("owner_blocks"), py::arg("reader_blocks"),
           py::arg("tokens"), py::arg("layers"))
      .def("pull_groups", &pull_groups, py::arg("groups"), py::arg("seat"), py::arg("stream"),
           py::arg("num_tokens"), py::arg("timeout_s"))
      .def("relay", &relay, py::arg("engine"), py::arg("lease"), py::arg("scale"), py::arg("last"),
           py::arg("group"), py::arg("seat"), py::arg("stream"), py::arg("num_tokens"), py::arg("batch"),
           py::arg("timeout_s"))
      .def(
          "settle",
          [](Connection& self, uint32_t slot, uint64_t nonce) {
            check(self.process().check());
            return without_gil([&] { return self.settle(slot, nonce); });  // a lane may copy meanwhile
          },
          py::arg("slot"), py::arg("settle_nonce"))
      .def_property_readonly("broken", own(&Connection::broken))
      .def_property_readonly("idle", own(&Connection::idle))
      .def_property_readonly("pending", own(&Connection::pending))
      .def(
          "time_read",
          [](Connection& self, uint32_t region, uint64_t offset, uintptr_t local, uint32_t bytes) {
            check(self.process().check());
            const Segment segment{reinterpret_cast<std::byte*>(local), bytes, 0};
            const ReadOp op{offset, bytes, region, 0, 1};
            return take(without_gil([&] { return self.time_read(op, segment); }));
          },
          py::arg("region"), py::arg("offset"), py::arg("local"), py::arg("bytes"))
      .def("predict_us", &Connection::predict_us, py::arg("num_ops"), py::arg("num_bytes"))
      .def("replace_soon", &Connection::replace_soon)
      .def("why_broken", own(&Connection::why_broken))
      .def("paths", own(&Connection::paths))
      .def("close", [](Connection& self) { run_whole([&self] { self.close(); }); });
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Bindings of connections and the transfers on them. Calls that may wait release the GIL.
#include "engine/pull.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <list>

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

using GroupRow = std::tuple<PyPlanner, py::object, py::object, Range, Range, bool>;

/// One or several cache groups of a pull: planner, owner's and reader's blocks, tokens, layers, and whether a
/// streaming pull reads it at the end. Borrows the block ids until own_ids().
class Reads {
 public:
  Reads(const PyPlanner& planner, py::handle owner, py::handle reader, Range tokens, Range layers) {
    add(planner, owner, reader, tokens, layers, false);
    finish();
  }
  explicit Reads(const std::vector<GroupRow>& rows) {
    if (rows.empty()) raise(Status::Config("a pull reads at least one cache group"));
    for (const auto& [planner, owner, reader, tokens, layers, at_end] : rows) {
      add(planner, owner, reader, tokens, layers, at_end);
    }
    finish();
  }

  PullRequest& request() { return request_; }
  uint64_t bytes() const { return bytes_; }
  /// Copies the ids, which the caller may change while it does not have the GIL.
  void own_ids() {
    size_t count = 0;
    for (const GroupRead& group : groups_) count += group.owner_blocks.size() + group.reader_blocks.size();
    ids_.reserve(count);
    const auto copy = [this](std::span<const uint32_t>& ids) {
      const size_t first = ids_.size();
      ids_.insert(ids_.end(), ids.begin(), ids.end());
      ids = {ids_.data() + first, ids.size()};
    };
    for (GroupRead& group : groups_) {
      copy(group.owner_blocks);
      copy(group.reader_blocks);
    }
    borrowed_.clear();
    finish();
  }

 private:
  void add(const PyPlanner& planner, py::handle owner, py::handle reader, Range tokens, Range layers,
           bool at_end) {
    const std::span<const uint32_t> theirs = borrowed_.emplace_back(owner),
                                    ours = borrowed_.emplace_back(reader);
    groups_.push_back({planner.planner, theirs, ours, tokens, layers, at_end});
    bytes_ += planner.planner->bytes(tokens.end - tokens.begin, layers);
  }
  void finish() {
    static_cast<GroupRead&>(request_) = groups_.front();
    request_.more = std::span(groups_).subspan(1);
  }

  std::list<BlockIds> borrowed_;
  std::vector<GroupRead> groups_;
  std::vector<uint32_t> ids_;
  PullRequest request_;
  uint64_t bytes_ = 0;
};

/// Starts a pull of one part. Returns null if the connection is broken.
std::shared_ptr<Pull> start(Connection& self, const PullRequest& request) {
  std::shared_ptr<Transfer> transfer = self.pull(request);
  return transfer ? Pull::started(std::move(transfer), self.control()) : nullptr;
}

int64_t deadline_in(double timeout_s) { return now_ns() + std::max(to_ns(timeout_s), Connection::kLeastNs); }

void prepare_request(PullRequest& request, const LeaseSeat& seat, int stream, double timeout_s) {
  request.seat = seat;
  request.stream = static_cast<StreamUnit>(stream);
  request.deadline_ns = deadline_in(timeout_s);
}

/// A few microseconds of copying cost less than releasing the GIL and waiting for it again.
bool keeps_gil(const Connection& self, const PullRequest& request, uint64_t bytes) {
  return self.runs_at_once(bytes) && request.stream == StreamUnit::kNone;
}

std::shared_ptr<Pull> start_reads(Connection& self, Reads& reads) {
  if (keeps_gil(self, reads.request(), reads.bytes())) return start(self, reads.request());
  reads.own_ids();
  return without_gil([&] { return start(self, reads.request()); });
}

std::shared_ptr<Pull> pull(Connection& self, const PyPlanner& planner, py::handle owner_blocks,
                           py::handle reader_blocks, Range tokens, Range layers, LeaseSeat seat, int stream,
                           double timeout_s) {
  check(self.process().check());
  std::shared_ptr<Pull> started;
  if (self.runs_at_once(planner.planner->bytes(tokens.end - tokens.begin, layers)) && stream == 0) {
    const BlockIds owner(owner_blocks), reader(reader_blocks);  // without Reads, which allocates
    PullRequest request;
    static_cast<GroupRead&>(request) = {planner.planner, owner, reader, tokens, layers};
    prepare_request(request, seat, stream, timeout_s);
    started = start(self, request);
    if (started && !started->done()) started->keep_blocks(reader);
  } else {
    Reads reads(planner, owner_blocks, reader_blocks, tokens, layers);
    prepare_request(reads.request(), seat, stream, timeout_s);
    started = start_reads(self, reads);
    if (started && !started->done()) started->keep_blocks(reads.request().reader_blocks);
  }
  return started;
}

std::shared_ptr<Pull> pull_groups(Connection& self, const std::vector<GroupRow>& rows, LeaseSeat seat,
                                  int stream, uint32_t num_tokens, double timeout_s) {
  check(self.process().check());
  Reads reads(rows);
  prepare_request(reads.request(), seat, stream, timeout_s);
  reads.request().num_tokens = num_tokens;
  return start_reads(self, reads);
}

/// Keeps the connection, whose numbers of regions its plan has.
struct PreparedPlan {
  std::shared_ptr<Connection> connection;
  std::shared_ptr<const Plan> plan;

  std::shared_ptr<Pull> pull(LeaseSeat seat, double timeout_s) const {
    check(connection->process().check());
    PullRequest request;
    request.prepared = plan;
    prepare_request(request, seat, 0, timeout_s);
    if (keeps_gil(*connection, request, plan->bytes)) return start(*connection, request);
    return without_gil([&] { return start(*connection, request); });
  }
};

PreparedPlan prepare(const std::shared_ptr<Connection>& self, const PyPlanner& planner,
                     py::handle owner_blocks, py::handle reader_blocks, Range tokens, Range layers) {
  check(self->process().check());
  Reads reads(planner, owner_blocks, reader_blocks, tokens, layers);
  reads.own_ids();
  return {self, take(without_gil([&] { return self->prepare(reads.request()); }))};
}

/// Returns a pull that waits for its owners. With `num_sources` it is a relay, whose `lease`, unless that is
/// 0, is aborted if it fails.
std::shared_ptr<Pull> waiting_pull(Engine& engine, double timeout_s, uint32_t num_sources, uint64_t lease) {
  check(engine.process().check());
  RelayContext relaying;
  if (num_sources > 0) {
    LeaseTable* const leases = &engine.leases();  // the caller keeps the engine
    relaying = {num_sources, [=] { lease != 0 && leases->abort(lease); }};
  }
  return Pull::waiting(deadline_in(timeout_s), engine.control(), std::move(relaying));
}

/// Says what is read from one owner, see _core.pyi.
using PartRow = std::tuple<std::shared_ptr<Connection>, std::vector<GroupRow>, LeaseSeat, int, uint32_t>;

StartReads start_of(const PartRow& row, uint32_t attempt, std::function<void(uint64_t)> on_proven = {},
                    uint64_t batch_units = 0) {
  const auto& [connection, rows, seat, stream, num_tokens] = row;
  auto reads = std::make_shared<Reads>(rows);
  reads->own_ids();
  prepare_request(reads->request(), seat, stream, 0);
  reads->request().num_tokens = num_tokens;
  reads->request().looks_first = attempt > 0;
  reads->request().batch_units = batch_units;
  reads->request().on_proven = std::move(on_proven);
  return [connection = connection, reads = std::move(reads)](int64_t deadline_ns) {
    reads->request().deadline_ns = deadline_ns;
    return connection->pull(reads->request());
  };
}

bool connected(Pull& self, uint32_t attempt, const std::vector<PartRow>& rows) {
  check(self.check_process());
  std::vector<StartReads> reads;
  for (const PartRow& row : rows) reads.push_back(start_of(row, attempt));
  return without_gil([&] { return self.connected(attempt, reads); });
}

/// Like connected(), for a relay. The `ready` of its lease grows by `scale` for each unit that has validated.
bool connected_relay(Pull& self, uint32_t attempt, const PartRow& row, uint64_t batch_units, uint64_t scale,
                     Engine& engine, uint64_t lease) {
  check(self.check_process());
  // The transfer calls it until it ends, and keeps the pull until then.
  const auto on_proven = [pull = &self, leases = &engine.leases(), lease, scale](uint64_t units) {
    if (lease != 0) leases->set_ready(lease, units * scale);
    pull->prove(units * scale);
  };
  const std::vector<StartReads> reads{start_of(row, attempt, on_proven, batch_units)};
  return without_gil([&] { return self.connected(attempt, reads); });
}

py::object failure_of(const Status& status) {
  if (status.ok()) return py::none();
  return py::make_tuple(name_of(status.code()), status.what(), status.fix(),
                        static_cast<int>(status.stale()));
}

py::list actions_of(Pull& self) {
  py::list actions;
  for (const PullAction& action : with_lock_of(self, [&] { return self.take_actions(); })) {
    actions.append(py::make_tuple(static_cast<int>(action.kind), action.number,
                                  static_cast<double>(action.until_ns) / 1e9));
  }
  return actions;
}

}  // namespace

void register_transfer(py::module_& m) {
  py::class_<CompletionQueue, std::shared_ptr<CompletionQueue>>(m, "CompletionQueue")
      .def(py::init([] { return take(CompletionQueue::make()); }))
      .def("fileno", &CompletionQueue::fd)
      .def("drain", &CompletionQueue::drain)
      .def("close", &CompletionQueue::close);
  py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer")
      .def_property_readonly("state", [](const Transfer& self) { return static_cast<int>(self.state()); })
      .def_property_readonly("started_ns", &Transfer::started_ns)
      .def_property_readonly("proven_units", &Transfer::proven_units)
      .def("failure",
           [](const Transfer& self) {
             return failure_of(with_lock_of(self, [&self] { return self.status(); }));
           })
      .def("stats", [](const Transfer& self) {
        return as_tuple(with_lock_of(self, [&self] { return self.stats(); }));
      });
}

/// Wraps `method`, which takes the lock of the pull for a moment.
template <typename Returned, typename... Arguments>
auto briefly(Returned (Pull::*method)(Arguments...) const) {
  return [method](const Pull& self, Arguments... arguments) {
    return with_lock_of(self, [&] { return (self.*method)(arguments...); });
  };
}

void register_pull(py::module_& m) {
  py::class_<Pull, std::shared_ptr<Pull>>(m, "Pull")
      .def_static("empty", &Pull::empty)
      .def("begin", [](Pull& self) { with_lock_of(self, [&self] { self.begin(); }); })
      .def_property_readonly("is_open", briefly(&Pull::is_open))
      .def_property_readonly("token", &Pull::token)
      .def_property_readonly("state",
                             [](const Pull& self) {
                               check(self.check_process());
                               return static_cast<int>(self.state());
                             })
      .def_property_readonly("proven_tokens", &Pull::proven_tokens)
      .def("done",
           [](const Pull& self) {
             check(self.check_process());
             return self.done();
           })
      .def(
          "wait",
          [](Pull& self, double timeout_s) {
            check(self.check_process());
            return self.done() || wait_for(to_ns(timeout_s), [&self](int64_t ns) { return self.wait(ns); });
          },
          py::arg("timeout_s"))
      .def("cancel",
           [](Pull& self) {
             check(self.check_process());
             without_gil([&self] { self.cancel(); });
           })
      .def("request_cancel",
           [](Pull& self) {
             check(self.check_process());
             without_gil([&self] { self.request_cancel(); });
           })
      .def("close", [](Pull& self) { without_gil([&self] { self.close(); }); })
      .def(
          "notify",
          [](Pull& self, std::shared_ptr<CompletionQueue> queue, uint64_t token) {
            check(self.check_process());
            return with_lock_of(self, [&] { return self.notify(std::move(queue), token); });
          },
          py::arg("queue"), py::arg("token"))
      .def(
          "failure",
          [](const Pull& self) { return failure_of(with_lock_of(self, [&self] { return self.failure(); })); })
      .def("kept_blocks",
           [](const Pull& self) {
             const std::vector<uint32_t>& ids = self.kept_blocks();
             return py::bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(uint32_t));
           })
      .def("transfer", briefly(&Pull::transfer), py::arg("part"))
      .def("cut", briefly(&Pull::cut), py::arg("part"))
      .def("wanted", briefly(&Pull::wanted))
      .def("take_actions", &actions_of)
      .def("connected", &connected, py::arg("attempt"), py::arg("parts"))
      .def("connected_relay", &connected_relay, py::arg("attempt"), py::arg("part"), py::arg("batch_units"),
           py::arg("scale"), py::arg("engine"), py::arg("lease"))
      .def(
          "refused",
          [](Pull& self, uint32_t attempt, const std::string& why, bool another) {
            without_gil([&] { self.refused(attempt, Status::Unreachable(why), another); });
          },
          py::arg("attempt"), py::arg("why"), py::arg("another"));
  m.def("waiting_pull", &waiting_pull, py::keep_alive<0, 1>(), py::arg("engine"), py::arg("timeout_s"),
        py::arg("num_sources") = 0, py::arg("lease") = 0);
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
      .def(
          "settle",
          [](Connection& self, uint32_t slot, uint64_t nonce) {
            check(self.process().check());
            return without_gil([&] { return self.settle(slot, nonce); });
          },
          py::arg("slot"), py::arg("settle_nonce"))
      .def_property_readonly("token", &Connection::token)
      .def("take_lost",
           [](Connection& self) {
             py::list words;
             for (const LaneWord& word : self.take_lost())
               words.append(py::make_tuple(word.slot, word.value));
             return words;
           })
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
      .def_property_readonly("num_missing", &Connection::num_missing)
      .def_property_readonly("lost_large", &Connection::lost_large)
      .def("why_broken", own(&Connection::why_broken))
      .def("paths", own(&Connection::paths))
      .def("close", [](Connection& self) { run_whole([&self] { self.close(); }); });
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Shared by the binding files: Status to exception, and conversions.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace py = pybind11;

namespace kvlink {

// The exceptions of kvlink.errors, by Code.
inline constexpr const char* kExceptions[] = {"",
                                              "ConfigError",
                                              "LayoutMismatch",
                                              "TransportUnavailable",
                                              "PeerUnreachable",
                                              "AccessDenied",
                                              "TransferTimeout",
                                              "Cancelled",
                                              "StaleBlocks"};
static_assert(std::size(kExceptions) == static_cast<size_t>(Code::kStaleBlocks) + 1);

inline const char* name_of(Code code) { return kExceptions[static_cast<size_t>(code)]; }

[[noreturn]] inline void raise(const Status& status) {
  const py::object type = py::module_::import("kvlink.errors").attr(name_of(status.code()));
  const std::string text = status.fix().empty() ? status.what() : status.what() + ". " + status.fix();
  if (status.code() == Code::kTransportUnavailable) {
    PyErr_SetObject(type.ptr(), type(status.what(), status.fix()).ptr());
  } else if (status.code() == Code::kStaleBlocks) {
    const py::object why =
        py::module_::import("kvlink.errors").attr("StaleReason")(static_cast<int>(status.stale()));
    PyErr_SetObject(type.ptr(), type(text, why).ptr());
  } else {
    PyErr_SetString(type.ptr(), text.c_str());
  }
  throw py::error_already_set();
}

inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}

/// Wraps `method` so that it raises in a forked child of the process that made the object.
template <typename Object, typename Returned, typename... Arguments>
auto own(Returned (Object::*method)(Arguments...)) {
  return [method](Object& self, Arguments... arguments) {
    check(self.process().check());
    return (self.*method)(std::forward<Arguments>(arguments)...);
  };
}
template <typename Object, typename Returned, typename... Arguments>
auto own(Returned (Object::*method)(Arguments...) const) {
  return [method](const Object& self, Arguments... arguments) {
    check(self.process().check());
    return (self.*method)(std::forward<Arguments>(arguments)...);
  };
}

template <typename T>
T take(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(*result);
}

/// Converts a small struct from and to a tuple of its fields, in this order; anything else is a TypeError.
/// The caster of std::tuple takes any sequence and costs every pull 0.3 us more.
template <typename Struct, auto... fields>
struct TupleCaster {
  PYBIND11_TYPE_CASTER(Struct, py::detail::const_name("tuple"));

  bool load(py::handle source, bool convert) {
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != sizeof...(fields)) return false;
    Py_ssize_t at = 0;
    return (load_field(value.*fields, PyTuple_GET_ITEM(source.ptr(), at++), convert) && ...);
  }
  static py::handle cast(const Struct& from, py::return_value_policy, py::handle) {
    return py::make_tuple(from.*fields...).release();
  }

 private:
  template <typename Field>
  static bool load_field(Field& field, py::handle source, bool convert) {
    py::detail::make_caster<Field> caster;
    if (!caster.load(source, convert)) return false;
    field = py::detail::cast_op<Field>(caster);
    return true;
  }
};

inline int64_t to_ns(double seconds) {
  return seconds >= 0 ? static_cast<int64_t>(std::min(seconds, 1e9) * 1e9) : -1;
}

inline py::list bytes_list(const std::vector<std::string>& blobs) {
  py::list list;
  for (const std::string& blob : blobs) list.append(py::bytes(blob));
  return list;
}

/// bindings/plan.cc: layouts, plans and planners.
void register_plan(py::module_& m);
/// bindings/pull.cc: connections, and pulls over them.
void register_transfer(py::module_& m);
void register_pull(py::module_& m);
void register_connection(py::module_& m);
/// bindings/channel.cc: the native channel.
void register_channel(py::module_& m);
/// bindings/ticket.cc: the codec of tickets.
void register_ticket(py::module_& m);
/// bindings/memory.cc: memory that kvlink allocates.
void register_memory(py::module_& m);
/// bindings/rdma_options.cc: the options of RDMA connections.
void register_rdma_options(py::module_& m);
/// bindings/kernel.cc: the kernel for GPUs.
void register_kernel(py::module_& m);

}  // namespace kvlink

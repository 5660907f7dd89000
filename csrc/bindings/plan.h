// SPDX-License-Identifier: Apache-2.0
// Shared by the bindings of plans and pulls.
#pragma once

#include <memory>
#include <span>

#include "bindings/bindings.h"
#include "plan/planner.h"

namespace kvlink {

/// A borrowed contiguous buffer of uint32.
class BlockIds {
 public:
  explicit BlockIds(py::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT) != 0) throw py::error_already_set();
    const char* const format = view_.format ? view_.format : "";
    if (view_.ndim == 1 && view_.itemsize == 4 && (*format == 'I' || *format == 'L')) return;
    PyBuffer_Release(&view_);
    raise(Status::Config("block ids must be a contiguous one-dimensional buffer of uint32"));
  }
  ~BlockIds() { PyBuffer_Release(&view_); }
  BlockIds(const BlockIds&) = delete;
  BlockIds& operator=(const BlockIds&) = delete;

  operator std::span<const uint32_t>() const {
    return {static_cast<const uint32_t*>(view_.buf), static_cast<size_t>(view_.len) / 4};
  }

 private:
  Py_buffer view_;
};

struct PyPlanner {
  std::shared_ptr<const Planner> planner;
};

}  // namespace kvlink

template <>
struct py::detail::type_caster<kvlink::Range>
    : kvlink::TupleCaster<kvlink::Range, &kvlink::Range::begin, &kvlink::Range::end> {};

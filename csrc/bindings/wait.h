// SPDX-License-Identifier: Apache-2.0
// Calls that wait, without the GIL. Only the main thread runs Python's signal handlers, so it must not wait
// long in one piece: Ctrl-C would have no effect until the deadline.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/sys.h"
#include "bindings/bindings.h"

namespace kvlink {

/// Runs `call` without the GIL.
template <typename Call>
auto without_gil(Call call) {
  py::gil_scoped_release release;
  return call();
}

/// Runs `call`, which takes the lock of `object` for a moment. While nobody holds the lock, it keeps the GIL:
/// to get that back costs milliseconds beside a thread that computes in Python.
template <typename Object, typename Call>
auto with_lock_of(const Object& object, Call call) {
  if (!object.busy()) return call();
  return without_gil(call);
}

inline constexpr int64_t kSignalsNs = 20'000'000;  // between two looks for signals

/// Returns whether this is Python's main thread, with which the process or a forked child began.
inline bool on_main_thread() { return ::gettid() == ::getpid(); }

/// Calls `wait(ns)` until it returns true or `timeout_ns` have passed (negative: never), in which case it
/// returns false. Throws what a signal handler raised. Does not call Python before kSignalsNs have passed.
template <typename Wait>
bool wait_for(int64_t timeout_ns, const Wait& wait) {
  const auto piece = [&wait](int64_t ns) {
    py::gil_scoped_release release;
    return wait(ns);
  };
  const int64_t until = timeout_ns < 0 ? INT64_MAX : now_ns() + timeout_ns;
  for (;;) {
    const int64_t left = timeout_ns < 0 ? INT64_MAX : std::max<int64_t>(until - now_ns(), 0);
    if (left <= kSignalsNs) return piece(left);
    if (piece(kSignalsNs)) return true;
    if (!on_main_thread()) return piece(timeout_ns < 0 ? -1 : std::max<int64_t>(until - now_ns(), 0));
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

/// Runs `call`, which cannot be interrupted, without the GIL. The main thread lets another thread run it, and
/// runs signal handlers meanwhile; what they raise is thrown after `call` has returned.
template <typename Call>
auto run_whole(Call call) {
  const auto here = [&call] {
    py::gil_scoped_release release;
    return call();
  };
  if (!on_main_thread()) return here();
  std::packaged_task<decltype(call())()> task(call);
  auto done = task.get_future();
  Result<std::thread> thread =
      sys::start_thread("cannot wait beside a call", "kvlink-call", [&task] { task(); });
  if (!thread.ok()) return here();
  std::optional<py::error_already_set> raised;
  const auto ended = [&done](int64_t ns) {
    py::gil_scoped_release release;
    return done.wait_for(std::chrono::nanoseconds(ns)) == std::future_status::ready;
  };
  while (!ended(kSignalsNs)) {
    if (PyErr_CheckSignals() == 0) continue;
    py::error_already_set error;
    if (!raised) raised.emplace(std::move(error));
  }
  thread->join();
  if (raised) throw py::error_already_set(*raised);
  return done.get();
}

}  // namespace kvlink

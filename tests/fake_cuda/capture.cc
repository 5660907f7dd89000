// SPDX-License-Identifier: Apache-2.0
// Captures of graphs, as far as they forbid calls to other threads: cuThreadExchangeStreamCaptureMode's
// rules.
#include <mutex>
#include <thread>

#include "fake.h"

namespace fake {
namespace {

enum Mode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

/// The capture under way, one at most.
struct Capture {
  CUstream_st* stream = nullptr;
  int mode = kGlobal;
  std::thread::id by;
  bool broken = false;
};
std::mutex mutex;
Capture capture;
thread_local int thread_mode = kGlobal;

}  // namespace

int may_wait() {
  if (const int error = ready()) return error;
  return breaks_capture();
}

int breaks_capture() {
  std::lock_guard lock(mutex);
  if (capture.stream == nullptr || thread_mode == kRelaxed) return kSuccess;
  const bool own = capture.by == std::this_thread::get_id() && capture.mode != kRelaxed;
  const bool others = thread_mode == kGlobal && capture.mode == kGlobal;
  if (!own && !others) return kSuccess;
  capture.broken = true;
  return kCaptureUnsupported;
}

}  // namespace fake

using namespace fake;  // NOLINT: the C functions below

#pragma GCC visibility push(default)
extern "C" {

int fake_cuda_capture_mode() { return thread_mode; }

int cuThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < kGlobal || *mode > kRelaxed) return kInvalidValue;
  std::swap(*mode, thread_mode);
  return kSuccess;
}

int cuStreamBeginCapture_v2(CUstream_st* stream, int mode) {
  std::lock_guard lock(mutex);
  if (capture.stream != nullptr) return kInvalidValue;
  capture = {stream, mode, std::this_thread::get_id(), false};
  return kSuccess;
}

int cuStreamEndCapture(CUstream_st* stream, void** graph) {
  std::lock_guard lock(mutex);
  *graph = nullptr;
  if (capture.stream != stream) return kInvalidValue;
  capture.stream = nullptr;
  return capture.broken ? kCaptureInvalidated : kSuccess;
}

}  // extern "C"
#pragma GCC visibility pop

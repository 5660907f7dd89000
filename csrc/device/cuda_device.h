// SPDX-License-Identifier: Apache-2.0
// A GPU, and a stream on it that numbers its work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/process_mark.h"
#include "base/status.h"
#include "device/cuda_api.h"

namespace kvlink::cuda {

inline Address address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

/// Lets this thread make calls that may wait, while any thread captures a graph. Without it such a call
/// fails, and ends the capture: engines capture graphs with torch's default mode, which forbids them to all
/// threads.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Api& api)
      : api_(api), changed_(api_.exchange_capture_mode(&mode_) == kSuccess) {}
  ~RelaxedCapture() {
    if (changed_) api_.exchange_capture_mode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Api& api_;
  int mode_ = kRelaxedCapture;  // and then the previous one
  const bool changed_;
};

/// Keeps a GPU's primary context, which is also torch's. Any thread.
class Device {
 public:
  /// Returns the GPU that has `memory`.
  static Result<std::shared_ptr<const Device>> of(const std::byte* memory);
  /// Returns the GPU with CUDA's number in this process.
  static Result<std::shared_ptr<const Device>> at(int ordinal);
  Device(const Api& api, int ordinal, int device, Context context, const Uuid& uuid)
      : api(api), ordinal(ordinal), device(device), context(context), uuid(uuid) {}
  ~Device() {
    if (process.inherited()) return;
    const RelaxedCapture relaxed(api);
    api.primary_context_release(device);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const ProcessMark process;
  const Api& api;
  const int ordinal, device;
  const Context context;
  const Uuid uuid;
};

/// Makes the context current on this thread, for calls that no capture of a graph minds, and restores the
/// previous one.
class Current {
 public:
  explicit Current(const Device& device)
      : api_(device.api),
        relaxed_(api_),
        status_(api_.check(api_.context_push(device.context), "cuCtxPushCurrent")) {}
  ~Current() {
    Context popped;
    if (status_.ok()) api_.context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  const Status& status() const { return status_; }

 private:
  const Api& api_;
  const RelaxedCapture relaxed_;
  const Status status_;
};

/// A non-blocking stream of the lowest priority. It waits for no other kernels, because a worker that offers
/// blocks has waited for its own, and the engine's kernels that wait for a free multiprocessor go first. Not
/// thread safe, and not tied to a thread. Every call requires the device to be Current, except done() of an
/// ended number.
class MarkedStream {
 public:
  static Result<std::unique_ptr<MarkedStream>> open(std::shared_ptr<const Device> device);
  /// Waits until nothing is under way.
  ~MarkedStream();
  MarkedStream(const MarkedStream&) = delete;
  MarkedStream& operator=(const MarkedStream&) = delete;

  const Device& device() const { return *device_; }
  Stream get() const { return stream_; }
  /// Numbers everything started so far. If it fails, nothing is under way.
  Result<uint64_t> mark();
  /// Returns whether that work has ended, for the CPU and for what the device starts from now on. Never
  /// blocks. An error means that the device is lost.
  Result<bool> done(uint64_t number);
  /// Blocks until nothing is under way.
  void drain();

 private:
  MarkedStream(std::shared_ptr<const Device> device, Stream stream)
      : device_(std::move(device)), api_(device_->api), stream_(stream) {}
  Status record();

  const std::shared_ptr<const Device> device_;
  const Api& api_;
  const Stream stream_;
  uint64_t num_done_ = 0;      // a stream ends what it was given in order
  std::deque<Event> pending_;  // of what was started after that
  std::vector<Event> spare_;
};

}  // namespace kvlink::cuda

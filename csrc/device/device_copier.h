// SPDX-License-Identifier: Apache-2.0
// The interface of a device with its own memory: copies between a pool and slots, which are in pinned host
// memory or on the device as well. Tests and device/cuda_copier.cc implement it; the rest of the core does
// not know what a device is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/status.h"

namespace kvlink {

enum class CopyTo : uint8_t { kDevice, kSlot };

/// One contiguous piece. `slot` is in memory passed to DeviceCopier::pin(), or in the device's.
struct CopyPiece {
  std::byte* device = nullptr;
  std::byte* slot = nullptr;
  uint64_t bytes = 0;
};

/// A queue of copies. Not thread safe, and not tied to a thread.
class CopyQueue {
 public:
  /// Waits for the copies under way.
  virtual ~CopyQueue() = default;
  /// Starts copying at most a slot of bytes (memory/slot_ring.h) and returns at once. Pieces may land in any
  /// order; done() takes the number returned for all of them. If it fails, none of them is under way.
  virtual Result<uint64_t> start(CopyTo to, std::span<const CopyPiece> pieces) = 0;
  /// Returns whether they have landed, for the CPU and for what the device starts from now on. Never blocks.
  /// An error means that the device is lost and nothing copies any more.
  virtual Result<bool> done(uint64_t number) = 0;
  /// Blocks until nothing is under way.
  virtual void drain() = 0;
};

/// One device. Any thread.
class DeviceCopier {
 public:
  /// Unpins the memory.
  virtual ~DeviceCopier() = default;
  /// Pins host memory for copies. The caller keeps it until this object is destroyed.
  virtual Status pin(std::byte* host, uint64_t bytes) = 0;
  /// More pieces at a time are copied one by one, which is slow.
  virtual uint32_t most_pieces() const { return UINT32_MAX; }
  /// The queue may not outlive this object.
  virtual Result<std::unique_ptr<CopyQueue>> open_queue() = 0;
};

/// Makes a copier for the device that has `memory`. kTransportUnavailable, reason and fix, if there is none.
using MakeDeviceCopier = std::function<Result<std::shared_ptr<DeviceCopier>>(const std::byte* memory)>;

}  // namespace kvlink

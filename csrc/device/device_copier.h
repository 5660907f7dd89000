// SPDX-License-Identifier: Apache-2.0
// All that is asked of a device that has memory of its own: copies between a pool and slots, which are in
// pinned host memory or on the device as well. Tests and device/cuda_copier.cc implement it; nothing else
// here knows what a device is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/status.h"

namespace kvlink {

enum class CopyTo : uint8_t { kDevice, kSlot };

/// One contiguous piece. `slot` is in memory that DeviceCopier::pin() took, or in the device's.
struct CopyPiece {
  std::byte* device = nullptr;
  std::byte* slot = nullptr;
  uint64_t bytes = 0;
};

/// Copies under way. Not thread safe, and not tied to a thread.
class CopyQueue {
 public:
  /// Waits for the copies under way.
  virtual ~CopyQueue() = default;
  /// Starts copying and returns at once, at most a slot of bytes (memory/slot_ring.h). Pieces may land in any
  /// order; done() knows them together by the number returned. When it fails, none of them is under way.
  virtual Result<uint64_t> start(CopyTo to, std::span<const CopyPiece> pieces) = 0;
  /// Whether they have landed: for the CPU, or for what the device starts from now on. Never blocks. Not ok:
  /// the device is lost, and nothing copies any more.
  virtual Result<bool> done(uint64_t number) = 0;
  /// Blocks until nothing is under way.
  virtual void drain() = 0;
};

/// One device. Any thread.
class DeviceCopier {
 public:
  /// Of pinned host memory for each slot, for the list of its pieces.
  static constexpr uint64_t kTableBytes = 24 << 10;

  /// Ends what pin() did.
  virtual ~DeviceCopier() = default;
  /// Takes host memory for copies, locked in place. The caller keeps it until this is destroyed.
  virtual Status pin(std::byte* host, uint64_t bytes) = 0;
  /// More of them at a time are copied one by one, which is slow.
  virtual uint32_t most_pieces() const { return UINT32_MAX; }
  /// May not outlive this.
  virtual Result<std::unique_ptr<CopyQueue>> open_queue() = 0;
};

/// Finds the device that `memory` belongs to, for so many slots. kTransportUnavailable, reason and fix, where
/// there is none.
using MakeDeviceCopier =
    std::function<Result<std::shared_ptr<DeviceCopier>>(const std::byte* memory, uint32_t num_slots)>;

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// How the owner sends from the memory of a device: a response's payload is copied into slots of the bounce
// buffer, a few ahead of the one that the socket takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "staging/bounce_buffer.h"
#include "transports/tcp/send_queue.h"

namespace kvlink::tcp {

/// Shared by all connections of an owner, under its lock.
struct DeviceSource {
  std::shared_ptr<Bounce> bounce;
  std::unique_ptr<CopyQueue> queue;
};

class DevicePayload {
 public:
  explicit DevicePayload(DeviceSource& source) : source_(source) {}
  ~DevicePayload() { clear(); }
  DevicePayload(const DevicePayload&) = delete;
  DevicePayload& operator=(const DevicePayload&) = delete;

  /// Nothing is left to hand out, nor in the outbox.
  bool empty() const { return pieces_.empty(); }
  /// Behind all that was added since it was last empty.
  void add(std::byte* device, uint64_t bytes);
  bool touches(const ExportedRegion& region) const;
  /// What was handed out before is with the kernel.
  bool has_turn(const Outbox& outbox) const { return !empty() && (!handed_out_ || outbox.empty()); }
  /// More will be handed out after what was last.
  bool goes_on() const { return next_ < pieces_.size() || filled_.size() > 1; }
  /// Puts the next slot into the outbox, or becomes empty. kCopies: that has to wait; kEnd: the device is
  /// lost.
  Wants hand_out(Outbox& outbox);
  /// On return nothing of it is being copied.
  void clear();

 private:
  struct Piece {
    std::byte* device;
    uint64_t bytes;
  };
  struct Filled {
    SlotRing::Slot slot;
    uint64_t bytes;
    uint64_t copy;  // its number
  };

  Status fetch_ahead();
  Status fill(SlotRing::Slot slot);

  DeviceSource& source_;
  std::vector<Piece> pieces_;
  size_t next_ = 0;       // of pieces_, the first not yet copied as a whole
  uint64_t in_next_ = 0;  // bytes of it that are
  std::deque<Filled> filled_;
  bool handed_out_ = false;  // the first of them
  std::vector<CopyPiece> copies_;
};

}  // namespace kvlink::tcp

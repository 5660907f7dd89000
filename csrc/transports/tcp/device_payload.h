// SPDX-License-Identifier: Apache-2.0
// Sends device memory: a response's payload is copied into slots of the bounce buffer, a few ahead of the one
// that the socket takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "staging/bounce_buffer.h"
#include "transports/tcp/send_queue.h"

namespace kvlink::tcp {

/// State that all connections of an owner share, under its lock.
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

  /// Returns whether nothing is left to send, the outbox included.
  bool empty() const { return pieces_.empty(); }
  /// Appends to what was added since it was last empty.
  void add(std::byte* device, uint64_t bytes);
  bool touches(const ExportedRegion& region) const;
  /// Returns whether the kernel has everything passed to the outbox before.
  bool has_turn(const Outbox& outbox) const { return !empty() && (!handed_out_ || outbox.empty()); }
  /// Returns whether more follows the slot that was last.
  bool goes_on() const { return next_ < pieces_.size() || filled_.size() > 1; }
  /// Puts the next slot into the outbox, or becomes empty. kCopies: the slot is still being copied. kEnd: the
  /// device is lost.
  Wants hand_out(Outbox& outbox);
  /// On return nothing is being copied.
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

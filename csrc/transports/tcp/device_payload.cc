// SPDX-License-Identifier: Apache-2.0
#include "transports/tcp/device_payload.h"

#include <algorithm>

namespace kvlink::tcp {
namespace {

// One slot is with the socket, and two are being copied in twice the time that one slot takes. A connection
// that stalls holds no more.
constexpr size_t kSlots = 3;

}  // namespace

void DevicePayload::add(std::byte* device, uint64_t bytes) {
  if (bytes == 0) return;
  if (!pieces_.empty() && pieces_.back().device + pieces_.back().bytes == device) {
    pieces_.back().bytes += bytes;
    return;
  }
  pieces_.push_back({device, bytes});
}

bool DevicePayload::touches(const ExportedRegion& region) const {
  return std::any_of(pieces_.begin(), pieces_.end(),
                     [&](const Piece& piece) { return region.meets(piece.device, piece.bytes); });
}

Wants DevicePayload::hand_out(Outbox& outbox) {
  if (handed_out_) filled_.pop_front();
  handed_out_ = false;
  if (!fetch_ahead().ok()) return Wants::kEnd;
  if (filled_.empty()) {
    if (next_ < pieces_.size()) return Wants::kCopies;  // others have all the slots
    clear();
    return Wants::kRequests;
  }
  const Result<bool> done = source_.queue->done(filled_.front().copy);
  if (!done.ok()) return Wants::kEnd;
  if (!*done) return Wants::kCopies;
  if (outbox.empty()) outbox.clear();  // what is over must not be extended
  outbox.add(filled_.front().slot.get(), filled_.front().bytes);
  handed_out_ = true;
  return Wants::kRequests;
}

Status DevicePayload::fetch_ahead() {
  while (filled_.size() < kSlots && next_ < pieces_.size()) {
    SlotRing::Slot slot = source_.bounce->sending().take();
    if (!slot) return {};
    if (Status status = fill(std::move(slot)); !status.ok()) return status;
  }
  return {};
}

Status DevicePayload::fill(SlotRing::Slot slot) {
  uint64_t used = 0;
  copies_.clear();
  const uint32_t most = source_.bounce->copier().most_pieces();
  while (used < SlotRing::kSlotBytes && copies_.size() < most && next_ < pieces_.size()) {
    const Piece& piece = pieces_[next_];
    const uint64_t bytes = std::min<uint64_t>(piece.bytes - in_next_, SlotRing::kSlotBytes - used);
    copies_.push_back({piece.device + in_next_, slot.get() + used, bytes});
    used += bytes;
    in_next_ += bytes;
    if (in_next_ < piece.bytes) break;
    in_next_ = 0;
    ++next_;
  }
  const Result<uint64_t> copy = source_.queue->start(CopyTo::kSlot, copies_);
  if (!copy.ok()) return copy.status();
  filled_.push_back({std::move(slot), used, *copy});
  return {};
}

void DevicePayload::clear() {
  if (!filled_.empty()) source_.queue->drain();
  filled_.clear();
  pieces_.clear();
  next_ = 0;
  in_next_ = 0;
  handed_out_ = false;
}

}  // namespace kvlink::tcp

// SPDX-License-Identifier: Apache-2.0
#include "bench/bounce_baseline.h"

#include <algorithm>
#include <deque>
#include <random>
#include <vector>

#include "base/clock.h"
#include "bench/baselines.h"
#include "device/cuda_copier.h"
#include "device/cuda_device.h"
#include "staging/bounce_buffer.h"

namespace kvlink {
namespace {

constexpr uint64_t kBounceBytes = 64 << 20;  // what KVLINK_BOUNCE_BYTES is unless set
constexpr size_t kUnderWay = 4;

/// Returns the offsets of the pieces in the order of their copies.
std::vector<uint64_t> places(uint64_t bytes, uint32_t piece_bytes) {
  std::vector<uint64_t> places(bytes / piece_bytes);
  for (uint64_t at = 0; at < places.size(); ++at) places[at] = at * piece_bytes;
  std::shuffle(places.begin(), places.end(), std::mt19937_64(1));
  return places;
}

struct Moving {
  SlotRing::Slot slot;
  uint64_t number;
};

Status wait_for_first(CopyQueue& queue, std::deque<Moving>& moving) {
  for (;;) {
    const Result<bool> done = queue.done(moving.front().number);
    if (!done.ok()) return done.status();
    if (*done) break;
  }
  moving.pop_front();
  return {};
}

Status bounce_all(Bounce& bounce, CopyQueue& queue, CopyTo to, std::byte* base,
                  const std::vector<uint64_t>& places, uint32_t piece_bytes) {
  SlotRing& ring = to == CopyTo::kDevice ? bounce.receiving()->ring() : bounce.sending();
  const size_t a_slot = std::min<size_t>(SlotRing::kSlotBytes / piece_bytes, bounce.copier().most_pieces());
  std::deque<Moving> moving;
  std::vector<CopyPiece> pieces;
  for (size_t next = 0; next < places.size();) {
    if (moving.size() == kUnderWay) {
      if (Status status = wait_for_first(queue, moving); !status.ok()) return status;
    }
    SlotRing::Slot slot = ring.take();
    pieces.clear();
    for (size_t i = 0; i < a_slot && next < places.size(); ++i) {
      pieces.push_back({base + places[next++], slot.get() + i * piece_bytes, piece_bytes});
    }
    const Result<uint64_t> number = queue.start(to, pieces);
    if (!number.ok()) return number.status();
    moving.push_back({std::move(slot), *number});
  }
  queue.drain();
  return {};
}

/// Returns pieces that cover all of `memory`, each as large as the pinned memory.
std::vector<BaselinePiece> plain_pieces(const MemoryRange& memory, const MemoryRange& pinned, CopyTo to) {
  std::vector<BaselinePiece> pieces;
  for (uint64_t at = 0; at < memory.bytes; at += pinned.bytes) {
    const uint64_t there = cuda::address_of(memory.base + at), here = cuda::address_of(pinned.base);
    const bool in = to == CopyTo::kDevice;
    pieces.push_back({in ? here : there, in ? there : here, std::min(memory.bytes - at, pinned.bytes)});
  }
  return pieces;
}

}  // namespace

Result<BounceTimes> time_bounce(const MemoryRange& memory, uint32_t piece_bytes, CopyTo to,
                                std::shared_ptr<const GatherKernel> kernel) {
  if (piece_bytes == 0 || piece_bytes > SlotRing::kSlotBytes) {
    return Status::Config("pieces have 1 to " + std::to_string(SlotRing::kSlotBytes) + " bytes");
  }
  const MakeDeviceCopier copiers = [kernel](const std::byte* of) { return make_cuda_copier(of, kernel, 0); };
  Result<std::shared_ptr<Bounce>> bounce = Bounce::make(memory.base, kBounceBytes, copiers);
  if (!bounce.ok()) return bounce.status();
  Result<std::unique_ptr<CopyQueue>> queue = (*bounce)->copier().open_queue();
  if (!queue.ok()) return queue.status();
  const std::vector<uint64_t> order = places(memory.bytes, piece_bytes);
  const std::vector<BaselinePiece> plainly = plain_pieces(memory, (*bounce)->receiving()->memory(), to);
  BounceTimes times;
  for (int round = 0; round < 2; ++round) {  // the first finds everything cold
    const int64_t start = now_ns();
    if (Status status = bounce_all(**bounce, **queue, to, memory.base, order, piece_bytes); !status.ok()) {
      return status;
    }
    times.bounced_ns = now_ns() - start;
    const Result<int64_t> plain_ns = baseline_cuda_copies(plainly);
    if (!plain_ns.ok()) return plain_ns.status();
    times.plain_ns = *plain_ns;
  }
  return times;
}

}  // namespace kvlink

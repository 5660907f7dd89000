// SPDX-License-Identifier: Apache-2.0
// The words by which an owner and its readers communicate about leases. They are in two regions of the owner:
// slots, which peers may only read, and peer words, which peers may only write.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "base/sync.h"

namespace kvlink {

/// One reader's part of a lease, as the ticket has it. The reader settles it by storing settle_nonce, or
/// settle_nonce ^ n (1 to kMaxSeats) to say that only n readers come: the seats from n on then end, too.
struct LeaseSeat {
  uint32_t slot = 0;
  uint64_t nonce = 0;
  uint64_t settle_nonce = 0;  // or kSharedSeat

  constexpr bool is_shared() const;
  /// Returns whether a reader that has read its blocks tells the owner.
  constexpr bool settles() const;
};
inline constexpr uint64_t kMaxSeats = 255;
/// Smaller values are tombstones, or look like a settle nonce of few readers.
inline constexpr uint64_t kSmallestNonce = kMaxSeats + 1;
/// In place of a settle nonce: the seat of a soft lease. Any number of readers read under it. They store no
/// word, because they would overwrite each other's.
inline constexpr uint64_t kSharedSeat = 1;
constexpr bool LeaseSeat::is_shared() const { return settle_nonce == kSharedSeat; }
constexpr bool LeaseSeat::settles() const { return settle_nonce >= kSmallestNonce; }

/// One reader's slot; slot 0 is the header. Little-endian, 8-byte aligned.
struct LeaseSlot {
  Atomic<uint64_t> nonce;  // 0: never granted; a LeaseEnd: ended, until the slot is granted again
  Atomic<uint64_t> ready;  // units (blocks or layers) already written by the owner
  uint64_t reserved[6];
};
static_assert(sizeof(LeaseSlot) == 64);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

/// Slot 0. A reader checks it when it connects, so that it notices a recycled pid or address at once.
struct LeaseTableHeader {
  uint64_t magic;  // kMagic
  uint64_t epoch;  // of the owner
  uint64_t num_slots;
  uint64_t reserved[5];
  static constexpr uint64_t kMagic = 0x32'65736165'4c564bULL;  // "KVLease2"
};
static_assert(sizeof(LeaseTableHeader) == sizeof(LeaseSlot));

/// The words that a reader stores, one entry per slot. The owner takes a word that it has seen, and leaves 0.
struct PeerWords {
  Atomic<uint64_t> settled;  // the ticket's settle nonce; anything else is ignored
  Atomic<uint64_t> reader;   // an Announcement
};
static_assert(sizeof(PeerWords) == 16);

constexpr uint64_t slot_offset(uint32_t slot) { return uint64_t{slot} * sizeof(LeaseSlot); }
constexpr uint64_t settled_offset(uint32_t slot) { return uint64_t{slot} * sizeof(PeerWords); }
constexpr uint64_t reader_offset(uint32_t slot) { return settled_offset(slot) + sizeof(uint64_t); }

/// "This connection reads under the lease with this nonce", stored before the first read, or that it no
/// longer does.
struct Announcement {
  uint32_t connection = 0;  // 1 to kLastConnection
  uint32_t tag = 0;         // of the nonce: the words of a slot outlive its leases
  bool withdrawn = false;

  static constexpr uint32_t kLastConnection = std::numeric_limits<int32_t>::max();
  /// Never 0, which is the tag of slots that were never granted.
  static constexpr uint32_t tag_of(uint64_t nonce) { return static_cast<uint32_t>(nonce >> 32) | 1; }

  constexpr uint64_t word() const { return uint64_t{tag} << 32 | uint64_t{withdrawn} << 31 | connection; }
  static constexpr Announcement of(uint64_t word) {
    const auto low = static_cast<uint32_t>(word);
    return {low & kLastConnection, static_cast<uint32_t>(word >> 32), low > kLastConnection};
  }
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The lease table: why a reader can never take stale bytes for good ones.
//
// One slot of 64 bytes per reader of a lease, in memory that peers read (and write `settled`, `reader`)
// one-sidedly. A lease ends (settle, expiry, abort) by storing a tombstone in place of the nonce and only
// then giving the blocks back. A reader loads the slot after its data: the nonce of its ticket still there
// means the blocks were pinned during the whole read, a tombstone says why they were not. Only the lease
// whose nonce stands in a slot stores to it. No clock is ever compared between hosts: the owner alone counts
// the time to live.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "free_slots.h"
#include "status.h"
#include "transport.h"

namespace kvlink {

/// What lies in the shared memory, slot 0 being the header. Little-endian, 8-byte aligned.
struct LeaseSlot {
  std::atomic<uint64_t> nonce;  // 0: never granted; a LeaseEnd: ended, until the slot is granted again
  std::atomic<uint64_t> ready;  // units (blocks or layers) already written by the owner
  std::atomic<uint64_t>
      settled;                   // the reader stores the ticket's settle nonce here; anything else is ignored
  std::atomic<uint64_t> reader;  // the reader stores its connection id before its first read, for fencing
  uint64_t reserved[4];
};
static_assert(sizeof(LeaseSlot) == 64);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

/// Slot 0. A reader checks it when it connects, so that a recycled pid or address is noticed at once.
struct LeaseTableHeader {
  uint64_t magic;  // kMagic
  uint64_t epoch;  // of the owner
  uint64_t num_slots;
  uint64_t reserved[5];
  static constexpr uint64_t kMagic = 0x31'65736165'4c564bULL;  // "KVLease1"
};
static_assert(sizeof(LeaseTableHeader) == sizeof(LeaseSlot));

/// One reader's part of a lease, as it goes into the ticket. The reader settles it by storing settle_nonce,
/// or settle_nonce ^ n (1 to kMaxSeats) to say that n readers come in all: the seats from n on then end, too.
struct LeaseSeat {
  uint32_t slot = 0;
  uint64_t nonce = 0;
  uint64_t settle_nonce = 0;
};
inline constexpr uint64_t kMaxSeats = 255;
/// Smaller values are tombstones, or look like a settle nonce of few readers.
inline constexpr uint64_t kSmallestNonce = kMaxSeats + 1;

/// How a seat or a lease ended. As a number it is the tombstone in the slot.
enum class LeaseEnd : uint8_t { kSettled = 1, kExpired = 2, kAborted = 3, kEvicted = 4 };

struct EndedLease {
  uint64_t lease = 0;
  LeaseEnd how = LeaseEnd::kSettled;  // kExpired when any seat expired
  std::vector<uint64_t> readers;      // connection ids to fence: readers of seats that expired unsettled
  int64_t held_ns = 0;
};

struct LeaseCounts {
  uint64_t active = 0, granted = 0, settled = 0, expired = 0, aborted = 0, fenced_readers = 0;
  int64_t oldest_ns = 0;
};

/// Leases age by this at most between two looks at the clock. Sweeps are a millisecond apart: more time has
/// passed only if the owner stood still. They do age by this then, so an owner that is always late keeps
/// none for ever.
inline constexpr int64_t kMostAgeingNs = 100'000'000;

/// Fills the words with random bits, or says why it cannot.
using DrawRandom = std::function<Status(std::span<uint64_t>)>;
Status draw_from_kernel(std::span<uint64_t> words);

/// Owns the slots; every method may be called from any thread. Takes the time as a value, so tests own the
/// clock. Leases hardly age while their owner stands still (a suspended process, a paused machine): what
/// readers said to renew them meanwhile lies in its sockets, unread.
class LeaseTable {
 public:
  /// `memory` is zeroed, 64-byte aligned, and outlives the table. REQUIRES memory.size() >= 2 slots.
  LeaseTable(std::span<std::byte> memory, uint64_t epoch, DrawRandom draw = draw_from_kernel);

  /// Takes one slot per reader, the longest unused first. kConfig when the table is full or the kernel gives
  /// no random numbers (nothing is taken then).
  Result<std::vector<LeaseSeat>> grant(uint64_t lease, uint32_t readers, uint64_t ready, int64_t ttl_ns,
                                       int64_t now_ns);
  /// As grant(), at seats that the caller chose: a server's scheduler writes the tickets of its workers.
  /// kConfig when a slot is taken or does not exist (nothing is taken then).
  Status grant_at(uint64_t lease, std::span<const LeaseSeat> seats, uint64_t ready, int64_t ttl_ns,
                  int64_t now_ns);
  /// Publishes how many units are written. Never goes back. False: no such lease, or it has ended.
  bool set_ready(uint64_t lease, uint64_t ready);
  /// Pushes the deadline to now + ttl. False: no such lease, or it has ended.
  bool extend(uint64_t lease, int64_t ttl_ns, int64_t now_ns);
  /// Sets the deadline to now + ttl, sooner or later than it was. False: no such lease, or it has ended.
  bool set_ttl(uint64_t lease, int64_t ttl_ns, int64_t now_ns);
  /// A reader asks for time: pushes the deadline to now + the lease's ttl. False: wrong slot or nonce.
  bool renew(uint32_t slot, uint64_t settle_nonce, int64_t now_ns);
  /// Ends every open seat now. The lease is reported by the next sweep, which gives its slots back. False: no
  /// such lease, or it has ended.
  bool abort(uint64_t lease);
  /// Ends every lease: the owner is closing, and what readers fetch from now on must not pass for valid.
  void abort_all();
  /// Stores `settled` on behalf of a reader whose data path is gone. False: wrong slot or value.
  bool settle(uint32_t slot, uint64_t settled);
  /// Ends seats that were settled or ran out and appends the leases all of whose seats have ended.
  /// On return tombstones stand in their slots: their blocks may be written again (after fencing `readers`).
  void sweep(int64_t now_ns, std::vector<EndedLease>& ended);

  LeaseCounts counts(int64_t now_ns) const;
  uint32_t num_active() const { return num_active_.load(std::memory_order_relaxed); }

 private:
  enum class SeatState : uint8_t {
    kOpen,   // the slot has the seat's nonce
    kEnded,  // the slot has a tombstone, and nobody else
    kGone,   // the slot may be another lease's
  };
  struct Seat {
    uint32_t slot;
    uint64_t settle_nonce;
    SeatState state;
    bool open() const { return state == SeatState::kOpen; }
  };
  struct Lease {
    std::vector<Seat> seats;
    int64_t granted_ns, ttl_ns, deadline_ns;
    LeaseEnd how;
    std::vector<uint64_t> readers;
    uint32_t num_open = 0, num_ended = 0;  // seats in these states
    bool open() const { return num_open > 0; }
  };

  friend struct LeaseTableState;  // tests/cpp/lease_model.h: copies and compares tables

  LeaseSlot& slot(uint32_t index) { return slots_[index]; }
  void open_seat(Lease& lease, const LeaseSeat& seat, uint64_t ready);
  void add(uint64_t id, Lease lease);
  void look_at_clock(int64_t now_ns);
  void end_seat(Lease& lease, Seat& seat, LeaseEnd how);
  void end_settled(Lease& lease);
  void end_expired(Lease& lease);
  void give_slots_back(Lease& lease);
  bool abort(Lease& lease);
  Lease* open_lease(uint64_t id);
  Lease* lease_at(uint32_t slot, uint64_t settled);
  Status draw_nonces(size_t num);
  uint64_t take_nonce();

  mutable std::mutex mutex_;
  LeaseSlot* slots_;
  FreeSlots free_;
  std::vector<uint64_t> lease_of_slot_;  // the last one that had it
  std::unordered_map<uint64_t, Lease> leases_;
  DrawRandom draw_;
  std::vector<uint64_t> random_;  // drawn in batches
  int64_t looked_ns_ = 0;         // when the clock was last looked at
  LeaseCounts counts_;
  std::atomic<uint32_t> num_active_{0};
};

}  // namespace kvlink

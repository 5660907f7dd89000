// SPDX-License-Identifier: Apache-2.0
// The lease table: why a reader can never take stale bytes for good ones.
//
// One slot of 64 bytes per reader of a lease, which peers read one-sidedly, and two words beside it, which
// peers write. A lease ends (settle, expiry, abort) by storing a tombstone in place of the nonce and only
// then releasing the blocks. A reader loads the slot after its data: the nonce of its ticket still there
// means the blocks were pinned during the whole read, a tombstone says why they were not. Only the lease
// whose nonce stands in a slot stores to it. No clock is ever compared between hosts: the owner alone counts
// the time to live.
//
// A soft lease pins nothing. The owner revokes it before it writes one of its blocks, so a nonce that is
// still there after the data means that the read came before the write. It has one seat for all its readers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/check.h"
#include "base/free_slots.h"
#include "base/status.h"
#include "base/sync.h"
#include "lease/lease_words.h"
#include "lease/soft_leases.h"

namespace kvlink {

/// The readers by slot. Empty, and free of cost, if no transport fences.
class LeaseReaders {
 public:
  void add(uint32_t slot, const Announcement& said) {
    std::vector<uint64_t>& known = readers_[slot];
    const auto found = std::find(known.begin(), known.end(), said.connection);
    if (said.withdrawn && found != known.end()) known.erase(found);
    if (!said.withdrawn && found == known.end()) known.push_back(said.connection);
    if (known.empty()) readers_.erase(slot);
  }
  const std::map<uint32_t, std::vector<uint64_t>>& all() const { return readers_; }
  void forget(uint32_t slot) { readers_.erase(slot); }
  /// Appends the readers of the slot, and forgets them.
  void take(uint32_t slot, std::vector<uint64_t>& taken) {
    const auto found = readers_.find(slot);
    if (found == readers_.end()) return;
    taken.insert(taken.end(), found->second.begin(), found->second.end());
    readers_.erase(found);
  }

 private:
  std::map<uint32_t, std::vector<uint64_t>> readers_;
};

/// The deadline of each slot's seat while it is open. To find those that have passed costs one comparison per
/// group of slots in which none has, so idle seats are not read one by one.
class SeatDeadlines {
 public:
  /// The deadline of a seat that does not expire.
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max() - 1;

  explicit SeatDeadlines(size_t num_slots)
      : by_slot_(num_slots, kNone), earliest_((num_slots + kGroup - 1) / kGroup, kNone) {}

  bool has(uint32_t slot) const { return by_slot_[slot] != kNone; }
  int64_t at(uint32_t slot) const {
    KVLINK_CHECK(has(slot));
    return by_slot_[slot];
  }
  void set(uint32_t slot, int64_t deadline_ns) {
    by_slot_[slot] = deadline_ns;
    int64_t& earliest = earliest_[slot / kGroup];
    earliest = std::min(earliest, deadline_ns);
  }
  void remove(uint32_t slot) { by_slot_[slot] = kNone; }
  /// Calls `expire` for each slot whose deadline has passed, the lowest first. It removes that deadline, and
  /// may remove others.
  template <typename Expire>
  void take_passed(int64_t now_ns, Expire expire) {
    for (size_t group = 0; group < earliest_.size(); ++group) {
      if (now_ns < earliest_[group]) continue;
      const size_t first = group * kGroup, end = std::min(first + kGroup, by_slot_.size());
      for (size_t slot = first; slot < end; ++slot) {
        if (now_ns >= by_slot_[slot]) expire(static_cast<uint32_t>(slot));
      }
      const auto begin = by_slot_.begin();
      earliest_[group] =
          *std::min_element(begin + static_cast<ptrdiff_t>(first), begin + static_cast<ptrdiff_t>(end));
    }
  }
  const std::vector<int64_t>& all() const { return by_slot_; }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  static constexpr size_t kGroup = 256;

  std::vector<int64_t> by_slot_;
  std::vector<int64_t> earliest_;  // by group: no deadline in it is earlier
};

/// How a seat or a lease ended. Its number is the tombstone in the slot.
enum class LeaseEnd : uint8_t { kSettled = 1, kExpired = 2, kAborted = 3, kEvicted = 4 };

struct EndedLease {
  uint64_t lease = 0;
  LeaseEnd how = LeaseEnd::kSettled;  // kExpired when any seat expired
  int64_t held_ns = 0;
};

/// The result of one sweep.
struct Swept {
  std::vector<EndedLease> ended;
  /// Connections that may still read the ended blocks, once per seat. Cut them off before the blocks are
  /// returned.
  std::vector<uint64_t> to_fence;
};

struct LeaseCounts {
  uint64_t active = 0, granted = 0, settled = 0, expired = 0, aborted = 0, fenced_readers = 0;
  int64_t oldest_ns = 0;
};

/// The end of soft leases: `displaced` when a lease needed their slot, or they covered too many blocks.
struct SoftLeaseCounts {
  uint64_t active = 0, granted = 0, evicted = 0, displaced = 0, expired = 0;
};

struct Revoked {
  uint32_t num_ended = 0;         // soft leases that this call ended
  uint64_t all_ended_so_far = 0;  // soft leases, for whatever reason
};

/// The time to live of a soft lease that does not expire.
inline constexpr int64_t kNoExpiryNs = SeatDeadlines::kNever;

/// Leases age by at most this between two reads of the clock. Sweeps are a millisecond apart, so more time
/// has passed only if the owner was paused. Leases do age by this much then, so an owner that is always late
/// keeps none for ever.
inline constexpr int64_t kMostAgeingNs = 100'000'000;

/// The sleep of the thread that sweeps. It stores that it sleeps, and looks for leases; who grants one stores
/// their number, and looks whether it sleeps. All four are sequentially consistent: with less, both may look
/// before the other's store is visible, and the lease is never swept.
class SweeperSleep {
 public:
  /// Returns whether there is no work. awake() ends the sleep.
  template <typename HasWork>
  bool may_sleep(HasWork has_work) {
    asleep_.store(true);
    const bool works = has_work();
    if (works) asleep_.store(false);
    return !works;
  }
  void awake() { asleep_.store(false); }
  /// The thread that has made work wakes the sleeping one then.
  bool asleep() const { return asleep_.load(); }
  const void* flag() const { return &asleep_; }

 private:
  Atomic<bool> asleep_{false};
};

/// The pause before the next sweep, in ms. It doubles with each sweep that ended no lease: while leases stay
/// out, their owner wakes 125 times a second and not 1,000.
class SweepPause {
 public:
  static constexpr int kLeast = 1, kMost = 8;
  int ms() const { return ms_; }
  void swept(bool any_ended) { ms_ = any_ended ? kLeast : std::min(2 * ms_, kMost); }

 private:
  int ms_ = kLeast;
};

/// Fills the words, 32 at most, with random bits. Returns the reason if it cannot.
using DrawRandom = std::function<Status(std::span<uint64_t>)>;
Status draw_from_kernel(std::span<uint64_t> words);

/// Owns the slots. Any thread may call any method. Takes the time as a value, so tests control the clock. A
/// paused owner's leases do not expire because of the pause: readers' renewals wait unread in its sockets
/// meanwhile.
class LeaseTable {
 public:
  /// Each region begins with the header, followed by one entry per slot.
  static constexpr uint64_t slots_bytes(uint32_t num_slots) { return slot_offset(num_slots + 1); }
  static constexpr uint64_t words_bytes(uint32_t num_slots) { return settled_offset(num_slots + 1); }

  /// Both are zeroed, 64-byte aligned, and outlive the table. REQUIRES slots_bytes(n) and words_bytes(n) of
  /// the same n >= 1.
  LeaseTable(std::span<std::byte> slots, std::span<std::byte> words, uint64_t epoch,
             DrawRandom draw = draw_from_kernel);

  /// Takes one slot per reader, the longest unused first. Returns kConfig and takes nothing if the table is
  /// full or the kernel gives no random numbers.
  Result<std::vector<LeaseSeat>> grant(uint64_t lease, uint32_t readers, uint64_t ready, int64_t ttl_ns,
                                       int64_t now_ns);
  /// Grants at seats that the caller chose, because a server's scheduler writes the tickets of its workers.
  /// Returns kConfig and takes nothing if a slot is taken or does not exist.
  Status grant_at(uint64_t lease, std::span<const LeaseSeat> seats, uint64_t ready, int64_t ttl_ns,
                  int64_t now_ns);
  /// Takes one slot for any number of readers, without pinning the blocks. The lease ends by revoke(),
  /// expiry, abort_all(), or because another lease needs its slot: then the oldest soft lease ends first.
  /// Nothing reports its end. Returns kConfig if leases that pin blocks have all slots, or the blocks are too
  /// many.
  Result<LeaseSeat> grant_soft(std::span<const uint32_t> blocks, uint64_t ready, int64_t ttl_ns,
                               int64_t now_ns);
  /// Does the same at a shared seat that the caller chose. A soft lease that has the slot ends.
  Status grant_soft_at(const LeaseSeat& seat, std::span<const uint32_t> blocks, uint64_t ready,
                       int64_t ttl_ns, int64_t now_ns);
  /// Ends the soft leases that cover one of the blocks. On return their tombstones are in their slots, and
  /// writes that follow are ordered behind them. Costs a few nanoseconds for a block that none covers.
  Revoked revoke(std::span<const uint32_t> blocks);
  /// Ends the soft lease that has the slot under this nonce, because nobody got a ticket of it. Returns false
  /// if there is none.
  bool withdraw_soft(uint32_t slot, uint64_t nonce);
  SoftLeaseCounts soft_counts() const;
  /// Returns whether the slot still has this nonce, that is, whether a read that ended now would validate.
  bool holds(uint32_t slot, uint64_t nonce) const {
    return slot > 0 && slot < records_.size() && slots_[slot].nonce.load(std::memory_order_acquire) == nonce;
  }
  /// Returns the lease that the seat belongs to, which may have ended, or 0. A soft lease has none.
  uint64_t lease_at(uint32_t slot, uint64_t settle_nonce);
  /// Publishes how many units are written; the number never decreases. Returns false if there is no such
  /// lease, or it has ended.
  bool set_ready(uint64_t lease, uint64_t ready);
  /// Moves the deadline to now + ttl if that is later. Returns false if there is no such lease, or it has
  /// ended.
  bool extend(uint64_t lease, int64_t ttl_ns, int64_t now_ns);
  /// Sets the deadline to now + ttl, sooner or later than before. Returns false if there is no such lease, or
  /// it has ended.
  bool set_ttl(uint64_t lease, int64_t ttl_ns, int64_t now_ns);
  /// Moves the deadline to now + the lease's ttl, because a reader asks for time. Returns false if slot or
  /// nonce are wrong.
  bool renew(uint32_t slot, uint64_t settle_nonce, int64_t now_ns);
  /// Ends every open seat now. The next sweep reports the lease and returns its slots. Returns false if there
  /// is no such lease, or it has ended.
  bool abort(uint64_t lease);
  /// Ends every lease because the owner is closing: reads from now on must not validate.
  void abort_all();
  /// The same without a check of what it knows, which a BrokenContract has shown to be wrong.
  void void_all();
  /// Stores `settled` for a reader whose data path is gone. Returns false if slot or value are wrong.
  bool settle(uint32_t slot, uint64_t settled);
  /// Ends seats that were settled or expired, and reports the leases all of whose seats have ended. On return
  /// tombstones are in their slots, and their blocks may be written again once to_fence has been cut off.
  void sweep(int64_t now_ns, Swept& swept);

  LeaseCounts counts(int64_t now_ns) const;
  /// Returns whether another thread uses the table now. A sweep of the largest table takes a millisecond.
  bool busy() const { return !std::unique_lock(mutex_, std::try_to_lock); }
  /// Returns the number of leases that sweeps look after: not of soft leases that do not expire.
  uint32_t num_active() const { return num_active_.load(); }

 private:
  struct Seat {
    uint32_t slot;
    bool open;  // the slot has the seat's nonce
  };
  struct Lease {
    uint64_t id;
    std::vector<Seat> seats;
    int64_t granted_ns, ttl_ns;
    int64_t deadline_ns;  // by aged()
    LeaseEnd how;
    uint32_t num_open = 0;  // seats
  };
  /// The state of a slot that only the owner knows.
  struct SlotRecord {
    uint64_t lease = 0;         // the last one that had it; a soft lease leaves all three 0
    uint64_t settle_nonce = 0;  // of the last seat, as the next
    uint32_t tag = 0;           // of its nonce
  };

  friend struct LeaseTableState;  // tests/cpp/lease: copies and compares tables

  int64_t aged(int64_t now_ns);
  Lease make_lease(uint64_t id, int64_t ttl_ns, int64_t now_ns);
  void open_seat(Lease& lease, const LeaseSeat& seat, uint64_t ready);
  void publish(const LeaseSeat& seat, const SlotRecord& record, int64_t deadline_ns, uint64_t ready);
  void add(Lease lease);
  bool make_room(uint32_t num_slots);
  static Status check_soft(std::span<const uint32_t> blocks);
  void open_soft(const LeaseSeat& seat, std::span<const uint32_t> blocks, uint64_t ready, int64_t ttl_ns,
                 int64_t now_ns);
  void end_soft(uint32_t slot, LeaseEnd how, uint64_t& count);
  void count_active();
  void set_deadline(Lease& lease, int64_t deadline_ns);
  Lease* open_lease(uint64_t id);
  bool is_open(uint32_t slot) const { return deadlines_.has(slot); }
  bool is_settled_by(uint32_t slot, uint64_t settled) const;
  void add_reader(uint32_t slot);
  void take_settled(uint32_t slot);
  void end_seat(Lease& lease, Seat& seat, LeaseEnd how);
  void expire(uint32_t slot);
  bool abort(Lease& lease);
  void report(int64_t now_ns, Swept& swept);
  bool may_grant(uint64_t lease, size_t num_seats) const;
  Status why_not(uint64_t lease, size_t num_seats) const;
  Status draw_nonces(size_t num);
  uint64_t take_nonce();

  mutable Mutex mutex_;
  LeaseSlot* const slots_;
  PeerWords* const words_;
  FreeSlots free_;
  std::vector<SlotRecord> records_;  // by slot
  SeatDeadlines deadlines_;          // of open seats: their leases'
  std::unordered_map<uint64_t, Lease> leases_;
  LeaseReaders readers_;               // of open seats
  std::vector<uint64_t> to_fence_;     // for the next sweep to report, as the next three
  std::vector<uint32_t> ended_slots_;  // free from then on
  std::vector<uint32_t> late_slots_;   // ended ones where a reader announced itself since the last sweep
  std::vector<uint64_t> ended_leases_;
  DrawRandom draw_;
  std::vector<uint64_t> random_;  // drawn in batches
  int64_t looked_ns_ = 0;         // when the clock was last read
  int64_t paused_ns_ = 0;         // what of the time so far did not age leases
  LeaseCounts counts_;
  SoftLeases soft_;
  SoftLeaseCounts soft_counts_;
  uint64_t num_soft_ended_ = 0;
  uint32_t num_expiring_soft_ = 0;
  Atomic<uint32_t> num_active_{0};
};

}  // namespace kvlink

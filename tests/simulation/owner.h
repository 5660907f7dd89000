// SPDX-License-Identifier: Apache-2.0
// The owner of simulated connections: blocks that it writes, and the product's lease table over memory that
// readers' endpoints load from and store to. A thread of its own sweeps the table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "lease/lease_table.h"
#include "scheduler.h"

namespace kvlink::simulation {

constexpr uint32_t kBlockBytes = 64;
constexpr uint32_t kOwnerBlocks = 512;
constexpr uint32_t kReaderBlocks = 512;
constexpr uint32_t kSlots = 31;  // few: they are used again
constexpr uint64_t kEpoch = 42;
constexpr uint32_t kPoolRegion = 0, kLeaseRegion = 1, kWordRegion = 2;  // in order of import

/// Names the bytes of a block. kUnwritten: nobody may take them for good.
using Content = uint64_t;
constexpr Content kUnwritten = 0;
void write_block(std::byte* block, Content content);
bool has_content(const std::byte* block, Content content);

class Owner {
 public:
  /// `pool` outlives the owner.
  explicit Owner(std::span<std::byte> pool, uint64_t epoch = kEpoch);

  // The endpoints' side.
  const std::byte* at(uint32_t region, uint64_t offset, uint64_t bytes) const;
  void store(uint32_t region, uint64_t offset, uint64_t value);
  /// A read will see this then.
  void expect_read(uint32_t region, uint64_t offset, int64_t ns);
  /// The word is on its way, or lost with its connection.
  void note_posted(uint64_t value) { posted_.insert(value); }
  bool was_posted(uint64_t value) const { return posted_.contains(value); }

  // The side of its threads.
  std::byte* block(uint32_t number) { return pool_.data() + uint64_t{number} * kBlockBytes; }
  /// Takes blocks that no lease has had.
  std::vector<uint32_t> take_blocks(size_t num);
  size_t num_blocks_left() const { return pool_.size() / kBlockBytes - num_blocks_; }
  size_t num_slots_left() const { return kSlots - table_.num_active(); }
  LeaseTable& leases() { return table_; }
  /// Returns no seats if the table is full. `ended` is called by the owner's thread when the lease has ended.
  std::vector<LeaseSeat> grant(uint64_t lease, uint32_t readers, uint64_t ready, int64_t ttl_ns,
                               std::function<void()> ended);
  /// At a seat that a ticket had before. Does nothing if the slot is taken.
  void grant_at(uint64_t lease, const LeaseSeat& seat, uint64_t ready, int64_t ttl_ns,
                std::function<void()> ended);
  void extend(uint64_t lease, int64_t ttl_ns);
  /// As the owner's agent does. A seat is settled once.
  void settle(const LeaseSeat& seat);
  /// Calls `what` on the owner's thread.
  void later(int64_t ns, std::function<void()> what);
  /// Returns a slot whose last lease has ended, or any if there is none.
  uint32_t used_slot() const;
  /// Calls `what` on the owner's thread about when the next read of the slot sees it.
  void when_read(uint32_t slot, std::function<void()> what) { when_read_[slot] = std::move(what); }
  /// The body of the owner's thread.
  void run();
  void stop();

  /// Returns whether the connection has announced itself under this nonce and not withdrawn.
  bool has_reader(uint64_t nonce, uint32_t connection) const {
    return readers_.contains({Announcement::tag_of(nonce), connection});
  }
  /// How often a seat was settled, by whatever way.
  int num_settled(const LeaseSeat& seat) const;
  /// Returns whether the lease has ended, and its blocks have been released.
  bool has_ended(uint64_t lease) const { return !ends_.contains(lease); }

 private:
  struct Expected {
    int64_t not_before_ns;  // it may not expire
    std::function<void()> ended;
  };
  void note_settle(uint64_t value);
  void sweep();
  void wake();

  const std::span<std::byte> pool_;
  alignas(64) std::array<std::byte, LeaseTable::slots_bytes(kSlots)> slots_{};
  alignas(64) std::array<std::byte, LeaseTable::words_bytes(kSlots)> words_{};
  LeaseTable table_;
  uint32_t num_blocks_ = 0;
  std::map<uint64_t, Expected> ends_;  // by lease
  std::multimap<int64_t, std::function<void()>> tasks_;
  std::map<uint32_t, std::function<void()>> when_read_;  // by slot
  int64_t next_sweep_ns_ = 0;
  bool stored_ = false, stopped_ = false;
  Fiber* thread_ = nullptr;
  std::set<std::pair<uint32_t, uint32_t>> readers_;  // tag and connection
  std::set<uint64_t> posted_;
  std::map<uint64_t, int> settled_;  // by the nonce that settles
};

}  // namespace kvlink::simulation

// SPDX-License-Identifier: Apache-2.0
// The state of a lease table as a value that models copy and compare.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "lease/lease_table.h"

namespace kvlink {

/// The index of soft leases, where it decides what a table does next.
struct SoftLeasesState {
  static void add_to(std::string& key, const SoftLeases& soft) {
    for (uint32_t at = soft.leases_[0].newer; at != 0; at = soft.leases_[at].newer) {
      key += static_cast<char>(soft.leases_[at].slot);
      for (const auto& entry : soft.leases_[at].entries) key += static_cast<char>(entry.block);
    }
    key += static_cast<char>(-1);
  }
};

/// The words that a table shares with its readers, by slot.
using SharedWords = std::vector<std::array<uint64_t, 4>>;

inline SharedWords save_words(std::span<const LeaseSlot> slots, std::span<const PeerWords> peers) {
  SharedWords words;
  for (size_t slot = 0; slot < slots.size(); ++slot)
    words.push_back({slots[slot].nonce, slots[slot].ready, peers[slot].settled, peers[slot].reader});
  return words;
}

inline void restore_words(const SharedWords& words, std::span<LeaseSlot> slots, std::span<PeerWords> peers) {
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const auto& [nonce, ready, settled, reader] = words[slot];
    slots[slot].nonce = nonce;
    slots[slot].ready = ready;
    peers[slot].settled = settled;
    peers[slot].reader = reader;
  }
}

/// All of a table that decides what it does next, apart from the memory that it shares.
struct LeaseTableState {
  FreeSlots free;
  std::vector<LeaseTable::SlotRecord> records;
  SeatDeadlines deadlines;
  std::unordered_map<uint64_t, LeaseTable::Lease> leases;
  LeaseReaders readers;
  std::vector<uint64_t> to_fence, ended_leases, random;
  std::vector<uint32_t> ended_slots, late_slots;
  int64_t looked_ns, paused_ns;
  uint32_t num_active;
  SoftLeases soft;
  uint64_t num_soft_ended;
  uint32_t num_expiring_soft;

  static LeaseTableState of(const LeaseTable& table) {
    return {table.free_,        table.records_,    table.deadlines_,      table.leases_,
            table.readers_,     table.to_fence_,   table.ended_leases_,   table.random_,
            table.ended_slots_, table.late_slots_, table.looked_ns_,      table.paused_ns_,
            table.num_active(), table.soft_,       table.num_soft_ended_, table.num_expiring_soft_};
  }
  static const void* num_active_of(const LeaseTable& table) { return &table.num_active_; }
  size_t num_active_count() const { return leases.size() + num_expiring_soft; }
  void put_into(LeaseTable& table) const {
    table.free_ = free;
    table.records_ = records;
    table.deadlines_ = deadlines;
    table.leases_ = leases;
    table.readers_ = readers;
    table.to_fence_ = to_fence;
    table.ended_leases_ = ended_leases;
    table.random_ = random;
    table.ended_slots_ = ended_slots;
    table.late_slots_ = late_slots;
    table.looked_ns_ = looked_ns;
    table.paused_ns_ = paused_ns;
    table.num_active_ = num_active;
    table.soft_ = soft;
    table.num_soft_ended_ = num_soft_ended;
    table.num_expiring_soft_ = num_expiring_soft;
  }
  /// Equal for equal states. What is only reported (how long leases were held) does not count.
  void add_to(std::string& key) const {
    const auto add = [&key](auto value) { key += static_cast<char>(value); };
    for (FreeSlots left = free; left.size() > 0;) add(left.pop());
    for (const auto& record : records) {
      add(record.lease);
      add(record.tag);
    }
    for (const int64_t deadline_ns : deadlines.all()) add(deadline_ns);
    for (const auto& [slot, of_slot] : readers.all()) {
      add(slot);
      for (const uint64_t reader : of_slot) add(reader);
    }
    for (const std::vector<uint64_t>& list : {to_fence, ended_leases}) {
      add(-1);
      for (const uint64_t one : list) add(one);
    }
    for (const uint32_t slot : ended_slots) add(slot);
    add(-1);
    for (const auto& [id, lease] : std::map(leases.begin(), leases.end())) {
      add(id);
      add(lease.deadline_ns);
      add(lease.how);
      for (const auto& seat : lease.seats) add(seat.open);
    }
    SoftLeasesState::add_to(key, soft);
  }
};

}  // namespace kvlink

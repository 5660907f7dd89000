// SPDX-License-Identifier: Apache-2.0
// The owner of a simulated connection: memory that readers' endpoints load from and store to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "lease/lease_table.h"

namespace kvlink::simulation {

constexpr uint32_t kBlockBytes = 64;
constexpr uint32_t kOwnerBlocks = 64;
constexpr uint32_t kReaderBlocks = 512;
constexpr uint32_t kSlots = 64;
constexpr uint64_t kEpoch = 42;
constexpr uint32_t kPoolRegion = 0, kLeaseRegion = 1, kWordRegion = 2;  // in order of import

class Owner {
 public:
  Owner();

  const std::byte* at(uint32_t region, uint64_t offset, uint64_t bytes) const;
  void store(uint32_t region, uint64_t offset, uint64_t value);
  uint32_t grant(uint64_t nonce, uint64_t ready);
  void set_ready(uint32_t slot, uint64_t ready) { word(slot, offsetof(LeaseSlot, ready)) = ready; }
  void end_lease(uint32_t slot) { word(slot, offsetof(LeaseSlot, nonce)) = 0; }
  /// Connections that have announced themselves and not withdrawn.
  bool has_readers(uint32_t slot) const { return readers_.all().contains(slot); }
  /// Whether a reader stored it anywhere.
  bool has(uint64_t value) const { return stored_.contains(value); }

 private:
  uint64_t& word(uint32_t slot, uint64_t offset) {
    return leases_[(uint64_t{slot} * sizeof(LeaseSlot) + offset) / sizeof(uint64_t)];
  }

  std::array<uint64_t, LeaseTable::slots_bytes(kSlots) / sizeof(uint64_t)> leases_{};
  std::array<uint64_t, kSlots + 1> nonces_{};
  LeaseReaders readers_;
  std::set<uint64_t> stored_;
  uint32_t num_granted_ = 0;
};

/// The bytes of an owner's block, the same at every owner.
const std::byte* owner_block(uint32_t block);

}  // namespace kvlink::simulation

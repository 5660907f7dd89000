// SPDX-License-Identifier: Apache-2.0
#include "bench/lease_cost.h"

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <vector>

#include "bench/cpu_time.h"
#include "lease/lease_table.h"
#include "memory/host_memory.h"

namespace kvlink {
namespace {

constexpr int64_t kHourNs = 3'600'000'000'000;
constexpr int64_t kBetweenSweepsNs = 1'000'000;

/// A table in memory as the engine's.
class TableWithLeases {
 public:
  static Result<std::unique_ptr<TableWithLeases>> make(const LeasesOut& out) {
    if (out.num_leases >= out.num_slots) return Status::Config("one slot must be left");
    auto slots = HostMemory::allocate(LeaseTable::slots_bytes(out.num_slots), false);
    if (!slots.ok()) return slots.status();
    auto words = HostMemory::allocate(LeaseTable::words_bytes(out.num_slots), false);
    if (!words.ok()) return words.status();
    auto made = std::make_unique<TableWithLeases>(out, *slots, *words);
    for (uint32_t lease = 1; lease <= out.num_leases; ++lease) {
      if (const auto seats = made->leases.grant(lease, 1, 0, kHourNs, 0); !seats.ok()) return seats.status();
    }
    return made;
  }
  TableWithLeases(const LeasesOut& out, std::shared_ptr<HostMemory> slots, std::shared_ptr<HostMemory> words)
      : slots_(std::move(slots)),
        words_(std::move(words)),
        leases(std::span(slots_->range().base, LeaseTable::slots_bytes(out.num_slots)),
               std::span(words_->range().base, LeaseTable::words_bytes(out.num_slots)), 1) {}

 private:
  const std::shared_ptr<HostMemory> slots_, words_;

 public:
  LeaseTable leases;
};

}  // namespace

Result<int64_t> time_sweep(const LeasesOut& out, uint32_t rounds) {
  auto table = TableWithLeases::make(out);
  if (!table.ok()) return table.status();
  int64_t best = INT64_MAX;
  Swept swept;
  for (uint32_t round = 0; round < rounds; ++round) {
    const int64_t start = thread_cpu_ns();
    (*table)->leases.sweep(round * kBetweenSweepsNs, swept);
    best = std::min(best, thread_cpu_ns() - start);
  }
  return best;
}

Result<int64_t> time_grant_at(const LeasesOut& out, uint32_t rounds) {
  auto table = TableWithLeases::make(out);
  if (!table.ok()) return table.status();
  LeaseTable& leases = (*table)->leases;
  const uint32_t num_free = out.num_slots - out.num_leases;
  int64_t best = INT64_MAX;
  Swept swept;
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint64_t lease = uint64_t{out.num_leases} + 1 + round;
    const std::array seats{LeaseSeat{out.num_leases + 1 + round % num_free, 1000 + round, 1'000'000 + round}};
    const int64_t start = thread_cpu_ns();
    const Status status = leases.grant_at(lease, seats, 0, kHourNs, 0);
    best = std::min(best, thread_cpu_ns() - start);
    if (!status.ok()) return status;
    leases.abort(lease);
    leases.sweep(0, swept);
  }
  return best;
}

namespace {

constexpr uint32_t kVainBlocks = 1000;

std::vector<uint32_t> blocks_from(uint32_t first, uint32_t count) {
  std::vector<uint32_t> blocks(count);
  std::iota(blocks.begin(), blocks.end(), first);
  return blocks;
}

/// A table whose leases are soft, behind the blocks that none covers.
Result<std::unique_ptr<TableWithLeases>> table_with_soft_leases(const LeasesOut& out) {
  auto table = TableWithLeases::make({out.num_slots, 0});
  for (uint32_t lease = 0; table.ok() && lease < out.num_leases; ++lease) {
    const auto blocks = blocks_from(kVainBlocks + lease * kSoftBlocks, kSoftBlocks);
    const auto seat = (*table)->leases.grant_soft(blocks, kSoftBlocks, kNoExpiryNs, 0);
    if (!seat.ok()) return seat.status();
  }
  return table;
}

/// Prepares by `before()`, and times a revoke of the blocks.
template <typename Before>
Result<int64_t> time_revokes(const LeasesOut& out, uint32_t rounds, const std::vector<uint32_t>& blocks,
                             Before before) {
  auto table = table_with_soft_leases(out);
  if (!table.ok()) return table.status();
  LeaseTable& leases = (*table)->leases;
  int64_t best = INT64_MAX;
  for (uint32_t round = 0; round < rounds; ++round) {
    if (Status status = before(leases); !status.ok()) return status;
    const int64_t start = thread_cpu_ns();
    leases.revoke(blocks);
    best = std::min(best, thread_cpu_ns() - start);
  }
  return best;
}

}  // namespace

Result<int64_t> time_vain_revoke(const LeasesOut& out, uint32_t rounds) {
  return time_revokes(out, rounds, blocks_from(0, kVainBlocks), [](LeaseTable&) { return Status(); });
}

Result<int64_t> time_revoke(const LeasesOut& out, uint32_t rounds) {
  const auto covered = blocks_from(0, kSoftBlocks);
  return time_revokes(out, rounds, {kSoftBlocks / 2}, [&](LeaseTable& leases) {
    return leases.grant_soft(covered, kSoftBlocks, kNoExpiryNs, 0).status();
  });
}

}  // namespace kvlink

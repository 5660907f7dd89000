// SPDX-License-Identifier: Apache-2.0
#include "owner.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "coverage.h"
#include "simulated_sync.h"

namespace kvlink::simulation {
namespace {

// An idle owner's leases age as fast as the clock only if it checks at least every 100 ms.
constexpr int64_t kSweepNs = 50'000'000;
constexpr int64_t kGrantNs = 60'000;  // the most that a grant takes, beside other threads
constexpr int64_t kSoonNs = 300'000;  // a store is seen within a sweep

Status draw(std::span<uint64_t> words) {
  for (uint64_t& word : words) word = Scheduler::the().random().next();
  return {};
}

}  // namespace

void write_block(std::byte* block, Content content) {
  Random random(content);
  for (uint32_t at = 0; at < kBlockBytes; at += sizeof(uint64_t)) {
    const uint64_t word = random.next();
    std::memcpy(block + at, &word, sizeof word);
  }
}

bool has_content(const std::byte* block, Content content) {
  std::array<std::byte, kBlockBytes> expected;
  write_block(expected.data(), content);
  return std::memcmp(block, expected.data(), kBlockBytes) == 0;
}

Owner::Owner(std::span<std::byte> pool, uint64_t epoch) : pool_(pool), table_(slots_, words_, epoch, draw) {}

const std::byte* Owner::at(uint32_t region, uint64_t offset, uint64_t bytes) const {
  const std::span<const std::byte> memory =
      region == kPoolRegion ? std::span<const std::byte>(pool_) : slots_;
  if (region > kLeaseRegion || offset > memory.size() || bytes > memory.size() - offset) {
    fail("a read leaves its region");
  }
  return memory.data() + offset;
}

void Owner::store(uint32_t region, uint64_t offset, uint64_t value) {
  const auto slot = static_cast<uint32_t>(offset / sizeof(PeerWords));
  if (region != kWordRegion || offset % sizeof value != 0 || slot == 0 || slot > kSlots) {
    fail("a write leaves the peer words");
  }
  std::memcpy(words_.data() + offset, &value, sizeof value);
  stored_ = true;
  wake();
  if (offset != reader_offset(slot)) return note_settle(value);
  const Announcement said = Announcement::of(value);
  const std::pair reader{said.tag, said.connection};
  said.withdrawn ? void(readers_.erase(reader)) : void(readers_.insert(reader));
  if (Scheduler::the().traces()) {
    Scheduler::the().trace((said.withdrawn ? "withdraws from slot " : "announces slot ") +
                           std::to_string(slot));
  }
}

uint32_t Owner::used_slot() const {
  Random& random = Scheduler::the().random();
  const auto first = static_cast<uint32_t>(random.between(1, kSlots));
  for (uint32_t step = 0; step < kSlots; ++step) {
    const uint32_t slot = 1 + (first + step) % kSlots;
    uint64_t nonce;
    std::memcpy(&nonce, slots_.data() + slot_offset(slot), sizeof nonce);
    if (nonce != 0 && nonce < kSmallestNonce) return slot;
  }
  return first;
}

void Owner::expect_read(uint32_t region, uint64_t offset, int64_t ns) {
  if (region != kLeaseRegion) return;
  const auto found = when_read_.find(static_cast<uint32_t>(offset / sizeof(LeaseSlot)));
  if (found == when_read_.end()) return;
  later(ns - Scheduler::the().random().between(0, kGrantNs), std::move(found->second));
  when_read_.erase(found);
}

void Owner::note_settle(uint64_t value) {
  if (++settled_[value] > 1) fail("a seat is settled twice");
}

int Owner::num_settled(const LeaseSeat& seat) const {
  const auto found = settled_.find(seat.settle_nonce);
  return found == settled_.end() ? 0 : found->second;
}

void Owner::settle(const LeaseSeat& seat) {
  note_settle(seat.settle_nonce);
  table_.settle(seat.slot, seat.settle_nonce);
  stored_ = true;
  wake();
}

std::vector<uint32_t> Owner::take_blocks(size_t num) {
  std::vector<uint32_t> blocks(num);
  for (uint32_t& block : blocks) {
    block = num_blocks_++;
    write_block(this->block(block), kUnwritten);
  }
  return blocks;
}

std::vector<LeaseSeat> Owner::grant(uint64_t lease, uint32_t readers, uint64_t ready, int64_t ttl_ns,
                                    std::function<void()> ended) {
  const int64_t now = now_ns();
  ends_[lease] = {now + ttl_ns, std::move(ended)};
  Result<std::vector<LeaseSeat>> seats = table_.grant(lease, readers, ready, ttl_ns, now);
  if (!seats.ok()) {
    ends_.erase(lease);
    return {};
  }
  next_sweep_ns_ = std::min(next_sweep_ns_, now + ttl_ns);
  wake();
  return *std::move(seats);
}

void Owner::grant_at(uint64_t lease, const LeaseSeat& seat, uint64_t ready, int64_t ttl_ns,
                     std::function<void()> ended) {
  const int64_t now = now_ns();
  ends_[lease] = {now + ttl_ns, std::move(ended)};
  if (!table_.grant_at(lease, {{seat}}, ready, ttl_ns, now).ok()) {
    ends_.erase(lease);
  } else {
    note(Event::kLateGrant);
  }
}

void Owner::extend(uint64_t lease, int64_t ttl_ns) {
  const int64_t now = now_ns();
  if (!table_.extend(lease, ttl_ns, now)) return;
  note(Event::kExtended);
  if (const auto found = ends_.find(lease); found != ends_.end()) {
    found->second.not_before_ns = std::max(found->second.not_before_ns, now + ttl_ns);
  }
}

void Owner::later(int64_t ns, std::function<void()> what) {
  tasks_.emplace(ns, std::move(what));
  wake();
}

void Owner::wake() {
  if (thread_) Scheduler::the().unblock(thread_);
}

void Owner::stop() {
  stopped_ = true;
  wake();
}

void Owner::run() {
  Scheduler& scheduler = Scheduler::the();
  thread_ = scheduler.running();
  while (!stopped_) {
    const int64_t now = now_ns();
    while (!tasks_.empty() && tasks_.begin()->first <= now) tasks_.extract(tasks_.begin()).mapped()();
    if (std::exchange(stored_, false)) {
      next_sweep_ns_ = std::min(next_sweep_ns_, now + scheduler.random().between(0, kSoonNs));
    }
    if (now >= next_sweep_ns_) sweep();
    const bool sweeps = table_.num_active() > 0;
    int64_t next = sweeps ? next_sweep_ns_ : INT64_MAX;
    if (!tasks_.empty()) next = std::min(next, tasks_.begin()->first);
    scheduler.block(next);
  }
}

void Owner::sweep() {
  Swept swept;
  const int64_t now = now_ns();
  table_.sweep(now, swept);
  next_sweep_ns_ = now + kSweepNs;
  for (const auto& [lease, expected] : ends_) {
    if (expected.not_before_ns > now) next_sweep_ns_ = std::min(next_sweep_ns_, expected.not_before_ns);
  }
  for (const EndedLease& one : swept.ended) {
    const auto found = ends_.find(one.lease);
    if (found == ends_.end()) fail("a lease ends twice");
    if (one.how == LeaseEnd::kExpired) note(Event::kExpired);
    if (one.how == LeaseEnd::kAborted) note(Event::kAborted);
    if (one.how == LeaseEnd::kExpired && now < found->second.not_before_ns) {
      fail("a lease expires before its time");
    }
    if (Scheduler::the().traces())
      Scheduler::the().trace("lease " + std::to_string(one.lease) + " has ended");
    const auto ended = std::move(found->second.ended);
    ends_.erase(found);
    if (ended) ended();
  }
}

}  // namespace kvlink::simulation

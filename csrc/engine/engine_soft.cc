// SPDX-License-Identifier: Apache-2.0
// The engine's part of soft leases: it grants them, and stops transports that can be stopped before blocks
// that are revoked get new content.
#include "base/clock.h"
#include "engine/engine.h"

namespace kvlink {

Result<LeaseSeat> Engine::grant_soft(std::span<const uint32_t> blocks, uint64_t ready, int64_t ttl_ns) {
  if (Status status = check_serving(); !status.ok()) return status;
  auto seat = leases_->grant_soft(blocks, ready, ttl_ns, now_ns());
  if (owner_asleep_) wake_owner();
  return seat;
}

Status Engine::grant_soft_at(const LeaseSeat& seat, std::span<const uint32_t> blocks, uint64_t ready,
                             int64_t ttl_ns) {
  if (Status status = check_serving(); !status.ok()) return status;
  Status status = leases_->grant_soft_at(seat, blocks, ready, ttl_ns, now_ns());
  if (owner_asleep_) wake_owner();
  return status;
}

uint32_t Engine::revoke(std::span<const uint32_t> blocks) {
  if (!started()) return 0;
  const Revoked revoked = leases_->revoke(blocks);
  if (!is_enforced(revoked)) enforce(revoked);
  return revoked.num_ended;
}

/// Leases that expired or were displaced before may have slices under way, too, so their ends count as well.
bool Engine::is_enforced(const Revoked& revoked) const {
  return fenced_soft_ends_.load(std::memory_order_acquire) >= revoked.all_ended_so_far;
}

/// A second thread that revokes meanwhile waits for the same slices.
void Engine::enforce(const Revoked& revoked) {
  uint64_t fenced = fenced_soft_ends_.load(std::memory_order_acquire);
  enforce_guards();
  while (fenced < revoked.all_ended_so_far &&
         !fenced_soft_ends_.compare_exchange_weak(fenced, revoked.all_ended_so_far)) {
  }
}

/// On return nothing is sent under a lease that has ended, by transports that compare guards.
void Engine::enforce_guards() {
  for (const TransportState& state : transports_) {
    if (state.transport && state.transport->capabilities().guards) state.transport->fence(0);
  }
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The engine's part when leases end: it cuts off late readers, then notifies the threads that wait for
// blocks.
#include <algorithm>
#include <iterator>
#include <utility>

#include "base/clock.h"
#include "engine/engine.h"

namespace kvlink {
namespace {

// How long to look for readers that announce themselves late, after the last lease has ended.
constexpr int64_t kWatchEndedNs = 1'000'000'000;

}  // namespace

void Engine::sweep() {
  std::lock_guard whole(sweep_mutex_);  // take_ended() waits for a sweep under way
  const int64_t now = now_ns();
  Swept swept;
  leases_->sweep(now, swept);
  cut_off_readers(swept);
  if (swept.ended.empty()) return;
  if (announces_) watch_ended_until_ns_ = now + kWatchEndedNs;
  std::lock_guard lock(mutex_);
  tell(ended_watchers_, swept.ended.front().lease);
  std::move(swept.ended.begin(), swept.ended.end(), std::back_inserter(ended_));
}

/// This comes first: a block must not be written again while a late reader could still be sent its bytes. It
/// applies to settled leases too, because another reader may read under one again.
void Engine::cut_off_readers(const Swept& swept) {
  if (!swept.ended.empty()) enforce_guards();
  for (const uint64_t reader : swept.to_fence) {
    for (const TransportState& state : transports_) {
      if (state.transport) state.transport->fence(reader);
    }
  }
}

/// Forgets watchers that are gone. REQUIRES mutex_.
void Engine::tell(Watchers& watchers, uint64_t token) {
  std::erase_if(watchers, [token](const auto& known) {
    const std::shared_ptr<CompletionQueue> queue = known.lock();
    if (queue) queue->push(token);
    return !queue;
  });
}

std::vector<EndedLease> Engine::take_ended() {
  if (started() && !closing_) sweep();
  std::lock_guard lock(mutex_);
  return std::exchange(ended_, {});
}

void Engine::watch_ended(const std::shared_ptr<CompletionQueue>& queue) {
  std::lock_guard lock(mutex_);
  ended_watchers_.push_back(queue);
}

}  // namespace kvlink

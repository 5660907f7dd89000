// SPDX-License-Identifier: Apache-2.0
// What the callers of a run do: pulls that they wait for in every way, and calls that get in the way of
// others.
#include <algorithm>

#include "base/completion_queue.h"
#include "simulated_sync.h"
#include "world.h"

namespace kvlink::simulation {
namespace {

constexpr uint64_t kPullBlocks = 6;
constexpr int64_t kMillisecond = 1'000'000;

}  // namespace

void World::call(uint32_t) {
  for (int64_t left = random().between(2, 6); left > 0; --left) {
    if (chance(30)) {
      meddle();
    } else if (Pull* const pull = start_pull()) {
      wait_for(*pull);
    }
    if (chance(50))
      scheduler_.sleep(random().between(0, random().one_of<int64_t>({5'000, 200'000, 2'000'000})));
  }
}

PullRequest World::draw_request(Pull& pull) {
  const auto count = static_cast<uint64_t>(random().between(1, kPullBlocks));
  for (uint64_t index = 0; index < count; ++index) {
    pull.reader_blocks.push_back(num_blocks_++);
    pull.owner_blocks.push_back(static_cast<uint32_t>(random().between(0, kOwnerBlocks - 1)));
  }
  pull.streaming = chance(20);
  const uint64_t nonce = next_nonce_++;
  if (chance(70)) pull.settle_nonce = next_nonce_++;
  pull.slot = peers_[pull.peer]->owner.grant(nonce, pull.streaming ? 0 : UINT64_MAX);
  const int64_t timeout =
      random().one_of<int64_t>({kMillisecond / 10, kMillisecond, 5 * kMillisecond, 50 * kMillisecond,
                                150 * kMillisecond, 600 * kMillisecond});
  pull.deadline_ns = now() + random().between(timeout / 2, timeout);
  PullRequest request;
  request.planner = planner();
  request.owner_blocks = pull.owner_blocks;
  request.reader_blocks = pull.reader_blocks;
  request.tokens = {0, static_cast<uint32_t>(count)};
  request.stream = pull.streaming ? StreamUnit::kBlocks : StreamUnit::kNone;
  request.seat = {pull.slot, nonce, pull.settle_nonce};
  request.deadline_ns = pull.deadline_ns;
  return request;
}

/// Null: the connection is broken, or the reader has no blocks left.
Pull* World::start_pull() {
  if (num_blocks_ + kPullBlocks > kReaderBlocks) return nullptr;
  auto drawn = std::make_unique<Pull>();
  Pull& pull = *drawn;
  pull.peer = static_cast<size_t>(random().between(0, static_cast<int64_t>(peers_.size()) - 1));
  Peer& peer = *peers_[pull.peer];
  if (peer.closed) return nullptr;
  const PullRequest request = draw_request(pull);
  if (pull.streaming) grow(pull, 0, pull.owner_blocks.size());
  if (chance(3)) {
    scheduler_.at(now() + random().between(0, kMillisecond),
                  [&peer, slot = pull.slot] { peer.owner.end_lease(slot); });
  }
  for (const uint32_t block : pull.reader_blocks) pull_of_block_[block] = &pull;
  drawn_.push_back(std::move(drawn));  // its blocks are known from here on
  scheduler_.trace("pulls " + std::to_string(pull.reader_blocks.size()) + " blocks");
  pull.transfer = peer.connection->pull(request);
  if (!pull.transfer) return nullptr;
  pulls_.push_back(&pull);
  check_by(pull.deadline_ns, pull, "a pull does not end by its deadline");
  check_withdrawn(pull);
  check_under_way(peer);
  return &pull;
}

/// The owner writes one block after the other, or stops.
void World::grow(const Pull& pull, uint64_t ready, uint64_t num_units) {
  if (ready == num_units || chance(3)) return;
  scheduler_.at(now() + random().between(0, kMillisecond), [this, &pull, ready, num_units] {
    peers_[pull.peer]->owner.set_ready(pull.slot, ready + 1);
    grow(pull, ready + 1, num_units);
  });
}

void World::wait_for(Pull& pull) {
  if (chance(15)) {
    scheduler_.sleep(random().between(0, 2 * kMillisecond));
    cancel(pull);
  }
  switch (random().between(0, 4)) {
    case 0:
      pull.transfer->wait(-1);
      break;
    case 1:
      while (!pull.transfer->wait(random().between(kMillisecond, 20 * kMillisecond))) {
      }
      break;
    case 2:
      while (!pull.transfer->wait(0)) scheduler_.sleep(random().between(1, kMillisecond));
      break;
    case 3:
      return await(pull);
    default:
      return;  // nobody waits
  }
  if (!pull.transfer->done()) fail("a wait returns before the end");
}

/// As an event loop does, which works along with nobody.
void World::await(Pull& pull) {
  const auto queue = *CompletionQueue::make();
  if (!pull.transfer->notify(queue, 7)) return;
  for (bool told = false; !told;) {
    pollfd watched{queue->fd(), POLLIN, 0};
    wait_ready({&watched, 1}, INT64_MAX);
    told = !queue->drain().empty();
  }
  if (!pull.transfer->done()) fail("an await is told before the end");
}

void World::cancel(Pull& pull) {
  pull.transfer->cancel();
  check_by(now(), pull, "a cancelled pull goes on");
}

/// Calls that hold a lane, or ask about one.
void World::meddle() {
  Peer& peer = *peers_[static_cast<size_t>(random().between(0, static_cast<int64_t>(peers_.size()) - 1))];
  if (peer.closed) return;
  switch (random().between(0, 4)) {
    case 0:
    case 1:
      for (int64_t left = random().between(1, 20); left > 0 && !peer.closed; --left) {
        peer.connection->settle(1, 7);
      }
      break;
    case 2:
      peer.connection->look_after();
      break;
    case 3:
      if (!pulls_.empty()) {
        const auto last = static_cast<int64_t>(pulls_.size()) - 1;
        cancel(*pulls_[static_cast<size_t>(random().between(0, last))]);
      }
      break;
    default:
      static_cast<void>(peer.connection->why_broken());
      static_cast<void>(peer.connection->pending());
  }
}

}  // namespace kvlink::simulation

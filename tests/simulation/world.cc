// SPDX-License-Identifier: Apache-2.0
#include "world.h"

#include <algorithm>

#include "simulated_sync.h"

namespace kvlink::simulation {
namespace {

constexpr int64_t kPollNs = 5'000'000;

}  // namespace

World::World(uint64_t seed) : scheduler_(seed) { forget_fds(); }

void World::run() {
  scheduler_.spawn("main", [this] { main(); });
  scheduler_.run();
}

void World::main() {
  control_ = *CompletionQueue::make();
  scratch_ = make_scratch();
  answers_ = random().one_of(
      {Answers::kSoon, Answers::kSoon, Answers::kSoon, Answers::kLate, Answers::kSometimes, Answers::kDies});
  ticks_ = chance(65);
  const int64_t num_threads = random().between(1, 2);
  for (int64_t index = 0; index < num_threads; ++index) threads_.push_back(*ProgressThread::make());
  for (int64_t index = 0, last = random().between(1, 2); index <= last; ++index) {
    Peer& peer = make_peer(index == 0);
    if (index > 0 || chance(50)) make_link(peer);
  }
  helpers_.push_back(scheduler_.spawn("control", [this] { control(); }));
  std::vector<Fiber*> callers;
  for (int64_t left = random().between(1, 4); left > 0; --left) {
    callers.push_back(scheduler_.spawn("caller " + std::to_string(left), [this] { call(); }));
  }
  if (chance(25)) {
    scheduler_.sleep(random().between(0, 5'000'000));
    Link* const link = peers_.back()->link();
    chance(50) || !link ? close_all() : close(*link);
  }
  for (Fiber* const caller : callers) scheduler_.join(caller);
  for (const auto& call : calls_) {
    while (call->waited_for_ns != INT64_MAX && !call->pull->done())
      scheduler_.sleep(kPollNs);  // who waits sees to it
    call->pull->wait(-1);
    see(*call);
  }
  check_end();
  end_threads();
}

/// As a worker does.
void World::close_all() {
  closed_ = true;
  for (size_t index = 0; index < calls_.size(); ++index) {
    if (calls_[index]->pull) close_pull(*calls_[index]);
  }
  for (const auto& peer : peers_) {
    for (size_t index = 0; index < peer->links.size(); ++index) close(*peer->links[index]);
  }
}

void World::end_threads() {
  close_all();
  control_stopped_ = true;
  control_->push(0);
  for (size_t index = 0; index < helpers_.size(); ++index) scheduler_.join(helpers_[index]);
  control_->close();
  for (const auto& thread : threads_) thread->stop();
  for (const auto& peer : peers_) peer->owner->stop();
}

}  // namespace kvlink::simulation

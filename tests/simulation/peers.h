// SPDX-License-Identifier: Apache-2.0
// The owners that a run's pulls read from, and the connections to them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "endpoint.h"
#include "engine/connection.h"

namespace kvlink::simulation {

/// The blocks of the reader, in which all pulls land.
std::span<std::byte> reader_pool();
/// For one run at a time.
std::shared_ptr<ScratchPool> make_scratch();
/// How long a stopping pull may wait for reads that a NIC has, because it cannot cancel them.
int64_t recall_ns(Manner manner);

/// The first rail of some connections is set aside, and on some of these it is to be tried.
enum class Rails : uint8_t { kNone, kAllUsed, kOneAside, kOneToBeTried };

/// One connection.
struct Link {
  Owner* owner;
  uint32_t id = 0;  // 0: readers need not announce themselves
  std::vector<EndpointPlan> plans;
  std::vector<std::function<size_t()>> counters;                     // of the endpoints' posts
  std::vector<std::shared_ptr<const SimulatedEndpoint::Work>> work;  // of the endpoints
  std::shared_ptr<Connection> connection;
  std::shared_ptr<const Planner> planner;
  std::shared_ptr<PathStats> path_stats;
  Rails rails = Rails::kNone;
  std::vector<std::shared_ptr<Transfer>> transfers;    // that it carried
  std::set<const Transfer*> streaming, looking_first;  // of them
  bool established = false, closed = false;
  bool staged = false;       // a store waits behind the reads before it, and is lost if the connection breaks
  uint64_t num_settles = 0;  // asked for by callers
  uint64_t num_quiet = 0;    // times that nothing was under way any more

  bool healthy() const;
  bool usable() const { return established && !closed && !connection->broken(); }
  size_t num_posts() const;
};

/// One owner, whatever becomes of it.
struct Peer {
  std::vector<std::byte> pool;  // empty: the reader's own blocks, which its relays offer on
  std::unique_ptr<Owner> owner;
  std::unique_ptr<Owner> restarted;  // the process that has its address later
  Manner manner = Manner::kStream;
  int64_t delay_ns = 0, inline_ns = 0;
  bool steady =
      false;  // no lease of it ends early: an endpoint that breaks its promise may be wrong by itself
  // Times of faults; INT64_MAX: never.
  int64_t dies_at_ns = INT64_MAX, hangs_at_ns = INT64_MAX, refuses_at_ns = INT64_MAX;
  std::vector<std::unique_ptr<Link>> links;  // the last one may be usable

  bool is_self() const { return pool.empty(); }
  /// Returns whether it answers whoever connects now.
  bool healthy(int64_t now) const { return now < std::min({dies_at_ns, hangs_at_ns, refuses_at_ns}); }
  bool ever_fails() const { return !healthy(INT64_MAX - 1); }
  Link* link() const { return links.empty() ? nullptr : links.back().get(); }
};

}  // namespace kvlink::simulation

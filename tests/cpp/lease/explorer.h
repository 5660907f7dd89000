// SPDX-License-Identifier: Apache-2.0
// Explores every state that a model can reach, breadth first, so that a violation comes with the shortest
// way.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace kvlink::lease_tests {

struct Explored {
  size_t num_states = 0;
  size_t depth = 0;
  std::string violated;  // with the shortest way there
};

/// World has Snapshot, save(), restore(), key(), act(Action), violated(), check_all_end(), and actions(),
/// which returns every action with its name.
template <typename World>
class Explorer {
 public:
  template <typename Rules>
  explicit Explorer(const Rules& rules) : world_(rules) {}

  /// Until nothing new is found or a property is violated.
  Explored run() {
    visit(-1, 0);
    for (size_t at = 0; at < ways_.size() && explored_.violated.empty(); ++at) {
      const typename World::Snapshot from = std::move(frontier_.front());
      frontier_.pop_front();
      for (size_t action = 0; action < actions_.size(); ++action) {
        world_.restore(from);
        if (!world_.act(actions_[action].second)) continue;
        visit(static_cast<int64_t>(at), action);
        if (!explored_.violated.empty()) return explored_;
      }
    }
    explored_.num_states = ways_.size();
    return explored_;
  }

 private:
  struct Way {
    int64_t before;
    size_t action, depth;
  };

  void visit(int64_t before, size_t action) {
    const size_t depth = before < 0 ? 0 : ways_[static_cast<size_t>(before)].depth + 1;
    if (world_.violated().empty() && !seen_.insert(world_.key()).second) return;
    ways_.push_back({before, action, depth});
    explored_.depth = std::max(explored_.depth, depth);
    if (world_.violated().empty()) {
      frontier_.push_back(world_.save());
      world_.check_all_end();
    }
    if (!world_.violated().empty()) explored_.violated = world_.violated() + ":" + way_to(ways_.size() - 1);
  }

  std::string way_to(size_t at) const {
    std::string way;
    for (; ways_[at].before >= 0; at = static_cast<size_t>(ways_[at].before)) {
      way = " " + actions_[ways_[at].action].first + "," + way;
    }
    return way;
  }

  World world_;
  const decltype(World::actions()) actions_ = World::actions();
  std::unordered_set<std::string> seen_;
  std::vector<Way> ways_;
  std::deque<typename World::Snapshot> frontier_;  // of the ways not yet followed
  Explored explored_;
};

/// Explores with the rules, requires that everything holds, and records how many states there are.
template <typename World, typename Rules>
void expect_holds(const Rules& rules, size_t least_states) {
  const Explored explored = Explorer<World>(rules).run();
  EXPECT_EQ(explored.violated, "");
  EXPECT_GT(explored.num_states, least_states);
  ::testing::Test::RecordProperty("states", static_cast<int>(explored.num_states));
  ::testing::Test::RecordProperty("depth", static_cast<int>(explored.depth));
}

template <typename World, typename Rules>
std::string first_violation(const Rules& rules) {
  return Explorer<World>(rules).run().violated;
}

}  // namespace kvlink::lease_tests

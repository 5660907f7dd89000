// SPDX-License-Identifier: Apache-2.0
// Every state that two leases, their readers and their blocks can reach around the real LeaseTable.
#include "cpp/lease/lease_model.h"

#include <gtest/gtest.h>

#include <deque>
#include <unordered_set>

namespace kvlink::lease_model {
namespace {

struct Explored {
  size_t num_states = 0;
  size_t depth = 0;
  std::string violated;  // with the shortest way there
};

class Explorer {
 public:
  explicit Explorer(const Rules& rules) : world_(rules) {}

  /// Breadth first, until nothing new is found or a property is violated.
  Explored run() {
    visit(-1, {});
    for (size_t at = 0; at < ways_.size() && explored_.violated.empty(); ++at) {
      const World::Snapshot from = std::move(frontier_.front());
      frontier_.pop_front();
      for (size_t what = 0; what < kNames.size(); ++what) {
        for (uint8_t who = 0; who < World::kNumRequests; ++who) {
          const Action action{static_cast<Do>(what), who};
          world_.restore(from);
          if (!world_.act(action)) continue;
          visit(static_cast<int64_t>(at), action);
          if (!explored_.violated.empty()) return explored_;
        }
      }
    }
    explored_.num_states = ways_.size();
    return explored_;
  }

 private:
  struct Way {
    int64_t before;
    Action action;
    size_t depth;
  };

  void visit(int64_t before, Action action) {
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
      const Action& action = ways_[at].action;
      way = std::string(" ") + kNames[static_cast<size_t>(action.what)] + " " + "AB"[action.who] + "," + way;
    }
    return way;
  }

  World world_;
  std::unordered_set<std::string> seen_;
  std::vector<Way> ways_;
  std::deque<World::Snapshot> frontier_;  // of the ways not yet followed
  Explored explored_;
};

std::string first_violation(const Rules& rules) { return Explorer(rules).run().violated; }

struct LeaseModel : ::testing::TestWithParam<Rules> {};

TEST_P(LeaseModel, HoldsInEveryReachableState) {
  const Explored explored = Explorer(GetParam()).run();
  EXPECT_EQ(explored.violated, "");
  EXPECT_GT(explored.num_states, 10'000u);
  RecordProperty("states", static_cast<int>(explored.num_states));
  RecordProperty("depth", static_cast<int>(explored.depth));
}

INSTANTIATE_TEST_SUITE_P(Paths, LeaseModel,
                         ::testing::Values(Rules{.path = Path::kGuard}, Rules{.path = Path::kFence},
                                           Rules{.path = Path::kPlain},
                                           Rules{.path = Path::kPlain, .seats_of_first = 2}));

// Each rule of the owner is needed: without it a late byte reaches a reader that was promised none.

TEST(LeaseModelRules, BlocksGoBackOnlyBehindTheSlicesThatWereCompared) {
  EXPECT_EQ(first_violation({.path = Path::kGuard, .enforces_guards = false}).substr(0, 3), "(c)");
}

TEST(LeaseModelRules, StoresThatArriveAfterTheSlotsReuseHideItsReader) {
  EXPECT_EQ(first_violation({.path = Path::kFence, .stores_arrive = false}).substr(0, 3), "(c)");
}

}  // namespace
}  // namespace kvlink::lease_model

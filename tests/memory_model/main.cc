// SPDX-License-Identifier: Apache-2.0
// Explores the configurations to the end, and shows that each rule is needed. KVLINK_MODEL_LARGE=1: also the
// large ones. KVLINK_MODEL_ONLY: those whose name has this, for example "large".
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <string_view>
#include <unordered_set>

#include "base/check.h"
#include "world.h"

namespace kvlink::memory_model {
namespace {

struct Explored {
  size_t num_states = 0, depth = 0;
  std::string violated;                                            // with the shortest way there
  std::array<size_t, static_cast<size_t>(Do::kNumKinds)> taken{};  // actions, by kind
};

/// Breadth first, until nothing new is found or a property is violated.
class Explorer {
 public:
  explicit Explorer(const Config& config) : world_(config), actions_(World::actions(config)) {}

  Explored run() {
    visit(-1, {});
    for (size_t at = 0; at < ways_.size() && explored_.violated.empty(); ++at) {
      const World::State from = std::move(frontier_.front());
      frontier_.pop_front();
      for (const Action action : actions_) {
        for (size_t choice = 0, choices = 1; choice < choices && explored_.violated.empty(); ++choice) {
          world_.put(from);
          if (!world_.act(action, choice)) break;
          choices = world_.num_choices();
          ++explored_.taken[static_cast<size_t>(action.what)];
          visit(static_cast<int64_t>(at), action);
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
    uint32_t depth;
  };

  void visit(int64_t before, Action action) {
    const uint32_t depth = before < 0 ? 0 : ways_[static_cast<size_t>(before)].depth + 1;
    if (world_.violated().empty() && !seen_.insert(hash(world_.key())).second) return;
    ways_.push_back({before, action, depth});
    explored_.depth = std::max<size_t>(explored_.depth, depth);
    if (world_.violated().empty()) {
      frontier_.push_back(world_.state());
      world_.check_all_end();
    }
    if (world_.violated().empty()) return;
    std::string way;
    for (auto at = static_cast<int64_t>(ways_.size()) - 1; ways_[static_cast<size_t>(at)].before >= 0;
         at = ways_[static_cast<size_t>(at)].before)
      way = " " + world_.name_of(ways_[static_cast<size_t>(at)].action) + "," + way;
    explored_.violated = world_.violated() + ":" + way;
  }

  /// 128 bits: that two of a million states have the same is as good as impossible.
  struct Hash {
    uint64_t one, other;
    bool operator==(const Hash&) const = default;
  };
  struct First {
    size_t operator()(const Hash& hash) const { return hash.one; }
  };
  static Hash hash(const std::string& key) {
    Hash made{0xcbf29ce484222325, 0x9e3779b97f4a7c15};
    for (const char byte : key) {
      made.one = (made.one ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
      made.other = (made.other + static_cast<uint8_t>(byte) + 1) * 0xbf58476d1ce4e5b9;
      made.other ^= made.other >> 29;
    }
    return made;
  }

  World world_;
  const std::vector<Action> actions_;
  std::unordered_set<Hash, First> seen_;
  std::vector<Way> ways_;
  std::deque<World::State> frontier_;
  Explored explored_;
};

const Request kWritten{}, kStreams{.streams = true}, kSoft{.soft = true};

const Config kStreaming{.name = "two streaming leases, one slot",
                        .requests = {kStreams, kStreams},
                        .last_time = 1,
                        .aborts = true};
const Config kOldTicket{.name = "a ticket that is older than its lease",
                        .requests = {kStreams, {.block = 1, .streams = true, .late = true}},
                        .last_time = 1,
                        .settles = true};
const Config kSettled{.name = "two leases, settled, extended, renewed",
                      .requests = {kWritten, kWritten},
                      .last_time = 2,
                      .extends = true,
                      .renews = true,
                      .settles = true};
const Config kTwoReaders{.name = "a lease of two readers, then one of its slots",
                         .requests = {{.seats = 2, .readers = 2}, kWritten},
                         .num_slots = 2,
                         .last_time = 2,
                         .extends = true,
                         .renews = true,
                         .settles = true};
const Config kStandstill{.name = "a standstill of the owner",
                         .requests = {{.seats = 2}},
                         .num_slots = 2,
                         .last_time = 3,
                         .ttl = 2,
                         .extends = true,
                         .stands_still = true};
const Config kShared{.name = "soft leases of one block, two readers at a seat",
                     .requests = {{.readers = 2, .soft = true}, kSoft}};
const Config kMixed{.name = "soft and hard leases, one slot",
                    .requests = {{.soft = true, .expires = true}, {.block = 1}, kSoft},
                    .last_time = 1,
                    .aborts = true};
const Config kRelay{.name = "a relay",
                    .requests = {kWritten, {.block = 1, .streams = true, .relays = 0}, {.readers = 0}},
                    .num_slots = 2,
                    .last_time = 1,
                    .aborts = true};
const Config kAnnounced{.name = "late announcers and the reuse of their slot",
                        .requests = {kWritten, kWritten},
                        .last_time = 1,
                        .aborts = true,
                        .announces = true};
const Config kSleep{.name = "the sleep of the sweeper",
                    .requests = {{.readers = 0}, {.block = 1, .readers = 0}},
                    .num_slots = 2,
                    .last_time = 1,
                    .aborts = true,
                    .sleeps = true};

Config with(Config config, void (*change)(Config&)) {
  change(config);
  return config;
}

std::vector<Config> configs() {
  return {kStreaming,
          kOldTicket,
          kSettled,
          kTwoReaders,
          kStandstill,
          kShared,
          kMixed,
          kRelay,
          kAnnounced,
          kSleep,
          with(kOldTicket,
               [](Config& one) {
                 one.name = "large: a ticket that is older than its lease, aborts";
                 one.aborts = one.large = true;
               }),
          with(kMixed,
               [](Config& one) {
                 one.name = "large: soft and hard leases, settled, extended";
                 one.settles = one.extends = one.large = true;
               }),
          with(kRelay,
               [](Config& one) {
                 one.name = "large: a relay whose source's block is granted again";
                 one.requests.push_back({.block = 0});
                 one.settles = one.large = true;
               }),
          with(kTwoReaders, [](Config& one) {
            one.name = "large: two readers, aborts, late announcers";
            one.aborts = one.announces = one.large = true;
          })};
}

/// Each rule of the code around the table is needed.
std::vector<Config> without_a_rule() {
  return {with(kShared, [](Config& one) { one.reader_fences = false; }),
          with(kOldTicket, [](Config& one) { one.ready_behind_nonce = false; }),
          with(kSettled, [](Config& one) { one.taker_fences = false; }),
          with(kRelay, [](Config& one) { one.relay_proves = false; }),
          with(kAnnounced, [](Config& one) { one.stores_arrive = false; })};
}

bool explore(const Config& config, bool holds) {
  const std::clock_t start = std::clock();
  const Explored found = Explorer(config).run();
  const double took = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  const bool right = found.violated.empty() == holds;
  std::printf("%s%-58s %8zu states, depth %3zu, %5.1f CPU-s\n", holds ? "" : "without a rule: ", config.name,
              found.num_states, found.depth, took);
  if (!holds || !right) std::printf("  %s\n", found.violated.empty() ? "holds" : found.violated.c_str());
  if (holds) {
    for (const Action action : World::actions(config)) {
      if (found.taken[static_cast<size_t>(action.what)] == 0 && action.who == 0)
        std::printf("  never occurred: %s\n", kNames[static_cast<size_t>(action.what)]);
    }
  }
  std::fflush(stdout);
  return right;
}

int main() {
  const char* const only = std::getenv("KVLINK_MODEL_ONLY");
  const bool large = std::getenv("KVLINK_MODEL_LARGE") != nullptr;
  bool right = true;
  for (const Config& config : configs()) {
    if ((!only || std::string_view(config.name).find(only) != std::string_view::npos) &&
        (large || !config.large))
      right &= explore(config, true);
  }
  if (!only) {
    for (const Config& config : without_a_rule()) right &= explore(config, false);
  }
  return right ? 0 : 1;
}

}  // namespace
}  // namespace kvlink::memory_model

/// In place of csrc/base/check.cc.
void kvlink::broken_contract(const char* condition, const char* function) {
  std::printf("  (i) a contract is broken, %s() needs %s\n", function, condition);
  std::exit(1);
}

int main() { return kvlink::memory_model::main(); }

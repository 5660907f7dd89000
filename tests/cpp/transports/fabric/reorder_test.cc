// SPDX-License-Identifier: Apache-2.0
// The queue of a fabric endpoint over a provider that gives no order at all: operations read and store their
// bytes piece by piece at any time, and end in any order. A reader pulls through it from an owner that gives
// its blocks new content whenever a lease ends. KVLINK_SIMULATION_SEEDS: how many runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "transports/fabric/post_queue.h"

namespace kvlink::fabric {
namespace {

constexpr uint32_t kSlots = 2, kBlockWords = 8, kBlocksOfLease = 4;
constexpr uint32_t kPoolRegion = 0, kSlotRegion = 1, kWordRegion = 2;

/// Bugs that the test has to find, or it could not fail.
enum class Bug : uint8_t { kNone, kSlotReadWithData, kStoreEndsEarly, kReadEndsEarly };

struct Run {
  explicit Run(uint64_t seed) : random(seed) {}
  bool chance(uint32_t percent) { return random() % 100 < percent; }
  uint32_t below(size_t n) { return static_cast<uint32_t>(random() % n); }
  void fail(const std::string& what) {
    if (why.empty()) why = what;
  }

  std::mt19937_64 random;
  std::string why;
};

/// Each lease has a slot and the blocks of that slot, filled with its nonce.
class Owner {
 public:
  explicit Owner(Run& run) : run_(run) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) grant(slot);
  }

  struct Ticket {
    uint32_t slot;
    uint64_t nonce;
  };
  Ticket ticket(uint32_t slot) const { return {slot, slots[slot]}; }
  /// Ends leases that were settled, and others. New content follows the end, and a grant the content.
  void step() {
    const uint32_t slot = run_.below(kSlots);
    if (filling_[slot] == kBlocksOfLease * kBlockWords) return grant(slot);
    if (filling_[slot] > 0 || words[slot] == slots[slot] || run_.chance(3)) {
      slots[slot] = 1;
      pool[slot][filling_[slot]++] = next_;
    }
  }

  std::array<std::array<uint64_t, kBlocksOfLease * kBlockWords>, kSlots> pool{};
  std::array<uint64_t, kSlots> slots{}, words{};

 private:
  void grant(uint32_t slot) {
    filling_[slot] = 0;
    pool[slot].fill(next_);
    slots[slot] = next_++;
  }

  Run& run_;
  uint64_t next_ = 256;
  std::array<uint32_t, kSlots> filling_{};  // words that have new content
};

class DisorderlyWire final : public Wire {
 public:
  DisorderlyWire(Run& run, Owner& owner, Bug bug) : run_(run), owner_(owner), bug_(bug) {}

  Taken read(uint32_t op, const RemoteRegion& from, uint64_t offset,
             std::span<const Segment> pieces) override {
    if (run_.chance(10)) return Taken::kLater;
    Op made{.op = op, .number = next_++};
    const auto* source = reinterpret_cast<const uint64_t*>(from.base + offset);
    for (const Segment& piece : pieces) {
      for (uint32_t at = 0; at < piece.bytes; at += 8)
        made.words.push_back({source++, reinterpret_cast<uint64_t*>(piece.local + at)});
    }
    std::shuffle(made.words.begin(), made.words.end(), run_.random);
    return take(std::move(made));
  }
  Taken write(uint32_t op, const RemoteRegion& to, uint64_t offset, uint64_t value) override {
    if (run_.chance(10)) return Taken::kLater;
    Op made{
        .op = op, .number = next_++, .store = reinterpret_cast<uint64_t*>(to.base + offset), .value = value};
    return take(std::move(made));
  }
  Status poll(std::vector<uint32_t>& ended) override {
    for (size_t i = 0; i < ops_.size(); ++i) {
      Op& op = ops_[i];
      const bool early = op.store ? bug_ == Bug::kStoreEndsEarly : bug_ == Bug::kReadEndsEarly;
      if (op.ended || !(op.done() || early) || run_.chance(50)) continue;
      op.ended = true;
      ended.push_back(op.op);
      --under_way;
    }
    std::shuffle(ended.begin(), ended.end(), run_.random);
    std::erase_if(ops_, [](const Op& op) { return op.ended && op.done(); });
    return {};
  }
  Status why() const override { return {}; }

  /// Something happens to one operation.
  void step() {
    if (ops_.empty()) return;
    Op& op = ops_[run_.below(ops_.size())];
    if (op.done()) return;
    for (const Op& other : ops_) {
      if (other.number < op.number && other.store && !other.visible)
        run_.fail("an operation overtook a store");
    }
    if (op.store) {
      *op.store = op.value;
      op.visible = true;
      return;
    }
    for (uint32_t left = 1 + run_.below(op.words.size()); left > 0; --left) {
      *op.words.back().second = *op.words.back().first;
      op.words.pop_back();
    }
  }

  uint32_t under_way = 0, most_under_way = 0;

 private:
  struct Op {
    uint32_t op;
    uint64_t number;
    std::vector<std::pair<const uint64_t*, uint64_t*>> words = {};  // from and to
    uint64_t* store = nullptr;
    uint64_t value = 0;
    bool visible = false, ended = false;
    bool done() const { return store ? visible : words.empty(); }
  };
  Taken take(Op op) {
    for (const Op& other : ops_) {
      if (other.op == op.op && !other.ended) run_.fail("two operations have one context");
    }
    ops_.push_back(std::move(op));
    most_under_way = std::max(most_under_way, ++under_way);
    return Taken::kYes;
  }

  Run& run_;
  Owner& owner_;
  const Bug bug_;
  uint64_t next_ = 0;
  std::vector<Op> ops_;
};

/// Pulls as the engine does over an endpoint without order: the slot is read when all data has arrived, and
/// the settle goes out while the next pull begins.
class Puller {
 public:
  Puller(Run& run, Owner& owner, DisorderlyWire& wire, Bug bug, const OpLimits& limits)
      : run_(run), owner_(owner), wire_(wire), bug_(bug), limits_(limits), queue_(wire, limits) {
    const auto region = [](Access access, void* base, size_t bytes) {
      return RemoteRegion{access, bytes, reinterpret_cast<uintptr_t>(base), 0};
    };
    remotes_ = {region(Access::kRead, owner.pool.data(), sizeof owner.pool),
                region(Access::kReadWords, owner.slots.data(), sizeof owner.slots),
                region(Access::kWriteWords, owner.words.data(), sizeof owner.words)};
  }

  void step() {
    if (!pulling_) begin();
    std::vector<Completion> ended;
    bool progressed = false;
    static_cast<void>(queue_.drive(remotes_, ended, progressed));
    for (const Completion& completion : ended) {
      if (awaited_.erase(completion.token) != 1) run_.fail("a token ended that nobody awaits");
    }
    if (wire_.most_under_way > limits_.ops) run_.fail("more operations than the provider takes");
    if (pulling_ && !looking_ && run_.chance(1)) return give_up();
    const bool read = std::none_of(awaited_.begin(), awaited_.end(),
                                   [this](const auto& token) { return token.first >= first_token_; });
    if (pulling_ && read) looking_ ? validate() : look();
    check_abandoned();
  }
  bool idle() const { return awaited_.empty(); }
  void stop() { stopped_ = true; }
  uint32_t num_valid = 0, num_stale = 0;

 private:
  /// Kept until the end: a late byte would be seen.
  struct Pull {
    Owner::Ticket ticket;
    std::vector<uint64_t> data = std::vector<uint64_t>(kBlocksOfLease * kBlockWords);
    std::vector<uint64_t> slot = {0};
    std::array<std::vector<ReadOp>, 3> ops = {};
    std::vector<Segment> segments = {};
    bool abandoned = false;
  };

  void begin() {
    if (stopped_) return;
    const uint32_t slot = run_.below(kSlots);
    if (owner_.slots[slot] < 256) return;
    pulls_.push_back(std::make_unique<Pull>(Pull{.ticket = owner_.ticket(slot)}));
    Pull& pull = *pulls_.back();
    pulling_ = true;
    looking_ = false;
    first_token_ = next_token_;
    uint64_t offset = slot * sizeof owner_.pool[0];
    auto* local = reinterpret_cast<std::byte*>(pull.data.data());
    for (uint32_t block = 0; block < kBlocksOfLease; ++block) {
      ReadOp op{offset, kBlockWords * 8, kPoolRegion, static_cast<uint32_t>(pull.segments.size()), 0};
      for (uint32_t left = kBlockWords; left > 0; ++op.num_segments) {
        const uint32_t words = 1 + run_.below(left);
        pull.segments.push_back({local, words * 8, 0});
        local += words * 8;
        left -= words;
      }
      offset += op.bytes;
      pull.ops[block % 2].push_back(op);
    }
    pull.segments.push_back({reinterpret_cast<std::byte*>(pull.slot.data()), 8, 0});
    pull.ops[2].push_back({slot * 8, 8, kSlotRegion, static_cast<uint32_t>(pull.segments.size() - 1), 1});
    for (uint32_t post = 0; post < 2; ++post) read(pull.ops[post]);
    if (bug_ == Bug::kSlotReadWithData) look();
  }
  void read(const std::vector<ReadOp>& ops) {
    queue_.read(next_token_, {ops, pulls_.back()->segments.data()});
    awaited_[next_token_++] = true;
  }
  void look() {
    looking_ = true;
    read(pulls_.back()->ops[2]);
  }
  void validate() {
    const Pull& pull = *pulls_.back();
    pulling_ = false;
    if (pull.slot[0] != pull.ticket.nonce) {
      ++num_stale;
      return;
    }
    ++num_valid;
    for (const uint64_t word : pull.data) {
      if (word != pull.ticket.nonce) return run_.fail("a valid pull has bytes of another lease");
    }
    queue_.write(next_token_, kWordRegion, pull.ticket.slot * 8, pull.ticket.nonce);
    awaited_[next_token_++] = true;
  }
  /// Cancels. If every read could be recalled, nothing lands any more.
  void give_up() {
    bool recalled = true;
    for (uint64_t token = first_token_; token < next_token_; ++token) {
      if (!awaited_.contains(token)) continue;
      if (queue_.cancel(token)) {
        awaited_.erase(token);
      } else {
        recalled = false;
      }
    }
    pulling_ = false;
    Pull& pull = *pulls_.back();
    pull.abandoned = recalled;
    if (recalled) std::fill(pull.data.begin(), pull.data.end(), 7);
  }
  void check_abandoned() {
    for (const auto& pull : pulls_) {
      if (pull->abandoned && std::any_of(pull->data.begin(), pull->data.end(), [](auto w) { return w != 7; }))
        run_.fail("bytes landed after a read was recalled");
    }
  }

  Run& run_;
  Owner& owner_;
  DisorderlyWire& wire_;
  const Bug bug_;
  const OpLimits limits_;
  PostQueue queue_;
  std::vector<RemoteRegion> remotes_;
  std::vector<std::unique_ptr<Pull>> pulls_;
  std::map<uint64_t, bool> awaited_;
  uint64_t next_token_ = 0, first_token_ = 0;
  bool pulling_ = false, looking_ = false, stopped_ = false;
};

struct Total {
  uint64_t num_valid = 0, num_stale = 0;
};

/// Returns what went wrong, or nothing.
std::string run(uint64_t seed, Bug bug, Total& total) {
  Run run(seed);
  Owner owner(run);
  DisorderlyWire wire(run, owner, bug);
  const OpLimits limits{.ops = 1 + run.below(6), .pieces = 1 + run.below(3), .bytes = 8 * (1 + run.below(8))};
  Puller puller(run, owner, wire, bug, limits);
  for (int i = 0; i < 600 && run.why.empty(); ++i) {
    const uint32_t what = run.below(10);
    what < 3 ? puller.step() : what < 9 ? wire.step() : owner.step();
  }
  puller.stop();
  for (int i = 0; i < 5000 && run.why.empty() && !puller.idle(); ++i) {
    puller.step();
    wire.step();
  }
  if (!puller.idle()) run.fail("a post never ended");
  total.num_valid += puller.num_valid;
  total.num_stale += puller.num_stale;
  return run.why;
}

uint64_t num_seeds() {
  const char* const text = std::getenv("KVLINK_SIMULATION_SEEDS");
  return text ? std::strtoull(text, nullptr, 10) : 2'000;
}

TEST(FabricOrder, NoReorderingMakesAWrongPullValid) {
  Total total;
  for (uint64_t seed = 1; seed <= num_seeds(); ++seed) {
    const std::string why = run(seed, Bug::kNone, total);
    ASSERT_EQ(why, "") << "seed " << seed;
  }
  EXPECT_GT(total.num_valid, num_seeds());
  EXPECT_GT(total.num_stale, num_seeds() / 10) << "the race was not provoked";
}

TEST(FabricOrder, FindsPlantedBugs) {
  for (const Bug bug : {Bug::kSlotReadWithData, Bug::kStoreEndsEarly, Bug::kReadEndsEarly}) {
    Total total;
    uint64_t seed = 1;
    while (seed <= 2'000 && run(seed, bug, total).empty()) ++seed;
    EXPECT_LE(seed, 2'000) << "bug " << static_cast<int>(bug);
  }
}

}  // namespace
}  // namespace kvlink::fabric

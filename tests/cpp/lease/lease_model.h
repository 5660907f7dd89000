// SPDX-License-Identifier: Apache-2.0
// The life of leases as a state machine around the real LeaseTable, for lease_model_test.cc to explore. What
// it models, and what the four properties mean, is in docs/design/leases.md.
#pragma once

#include <array>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cpp/lease/lease_table_state.h"

namespace kvlink {
namespace lease_model {

enum class Path : uint8_t {
  kGuard,  // the owner's thread compares the nonce before each slice that it sends: tcp, bounce
  kFence,  // the reader announces itself, and the owner cuts it off: verbs
  kPlain,  // nobody can stop the reader: shm, cma, cuda
};

/// The model's assumptions about the code around the table. Each is a rule that (c) depends on.
struct Rules {
  Path path = Path::kGuard;
  bool enforces_guards = true;  // before blocks go back, slices that were compared before the end are gone
  bool stores_arrive = true;    // a reader's stores arrive before its slot is granted again
  uint32_t seats_of_first = 1;  // the first lease's; only one of them has a reader
};

inline void PrintTo(const Rules& rules, std::ostream* out) {
  *out << "path " << static_cast<int>(rules.path) << ", seats " << rules.seats_of_first;
}

enum class Do : uint8_t {
  kOffer,
  kOfferWritten,
  kWrite,
  kSetReady,
  kExtend,
  kAbort,
  kTime,
  kSweep,
  kBlocksBack,
  kStart,
  kAnnounce,
  kPeek,
  kCompare,
  kSend,
  kValidate,
  kSettle,
  kWithdraw,
};  // clang-format off
inline constexpr std::array kNames{
    "offer", "offer written", "write", "set ready", "extend", "abort", "time", "sweep", "blocks back",
    "start", "announce", "peek", "compare", "send", "validate", "settle", "withdraw"};
// clang-format on

struct Action {
  Do what;
  uint8_t who = 0;  // the request, and its reader
};

class World {
 public:
  static constexpr int kNumRequests = 2;

  explicit World(const Rules& rules)
      : rules_(rules),
        memory_(1 + rules.seats_of_first),
        words_(memory_.size()),
        table_(std::as_writable_bytes(std::span(memory_)), std::as_writable_bytes(std::span(words_)), 1,
               [this](std::span<uint64_t> drawn) {
                 // Its tag differs from the last one's, too.
                 for (uint64_t& nonce : drawn) nonce = next_nonce_ += (uint64_t{2} << 32) + 1000;
                 return Status();
               }) {}

  struct Snapshot;
  Snapshot save() const;
  void restore(const Snapshot& snapshot);
  std::string key() const;

  static std::vector<std::pair<std::string, Action>> actions();
  /// False: the action is not possible here, nothing was done.
  bool act(Action action);
  /// Every lease ends once more time has passed, and is reported once.
  void check_all_end();
  /// The property that was violated and how; empty: none.
  const std::string& violated() const { return violated_; }

 private:
  enum class Phase : uint8_t { kNone, kPeeking, kReading, kValid, kFailed, kSettled };
  struct Request {
    LeaseSeat seat;
    uint8_t block = 0, reports = 0;
    bool granted = false, written = false, streams = false, back = false;
  };
  struct Reader {
    Phase phase = Phase::kNone;
    uint8_t num_slices = 0;
    std::array<uint8_t, 2> got{};
    bool compared = false;  // the owner is about to send a slice
    bool announced = false, in_time = false, withdrew = false;
    bool cut = false;
  };
  struct Blocks {
    std::array<uint8_t, kNumRequests> content{}, holder{};  // a request's number + 1; 0: nobody's
  };

  LeaseSlot& slot_of(int who) { return memory_[requests_[who].seat.slot]; }
  PeerWords& words_of(int who) { return words_[requests_[who].seat.slot]; }
  bool stands(int who) { return requests_[who].granted && slot_of(who).nonce == requests_[who].seat.nonce; }
  /// Its slot was granted again.
  bool reused(int who) {
    return who == 0 && requests_[1].granted && requests_[1].seat.slot == requests_[0].seat.slot;
  }
  bool may_store(int who) { return !rules_.stores_arrive || !reused(who); }
  void violate(const std::string& how) {
    if (violated_.empty()) violated_ = how;
  }
  using Seats = std::vector<LeaseSeat>;
  bool offer(int who, bool written);
  bool write(int who);
  template <typename Call>
  void on_behalf_of(int who, Call call);
  void sweep();
  bool give_blocks_back(int who);
  bool start(int who);
  bool announce(int who);
  bool withdraw(int who);
  bool peek(int who);
  bool compare(int who);
  bool send(int who);
  bool validate(int who);
  bool is_left_out(Do what) const;

  const Rules rules_;
  uint64_t next_nonce_ = 0;
  std::vector<LeaseSlot> memory_;
  std::vector<PeerWords> words_;
  LeaseTable table_;
  int64_t now_ = 0;
  std::array<Request, kNumRequests> requests_;
  std::array<Seats, kNumRequests> seats_;
  std::array<Reader, kNumRequests> readers_;
  Blocks blocks_;
  std::string violated_;
};

struct World::Snapshot {
  LeaseTableState table;
  SharedWords words;
  uint64_t next_nonce;
  int64_t now;
  std::array<Request, kNumRequests> requests;
  std::array<std::vector<LeaseSeat>, kNumRequests> seats;
  std::array<Reader, kNumRequests> readers;
  Blocks blocks;
};

}  // namespace lease_model
}  // namespace kvlink

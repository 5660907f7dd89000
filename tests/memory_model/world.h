// SPDX-License-Identifier: Apache-2.0
// The life of leases around the real LeaseTable, one access to shared memory at a time, on a machine that may
// order accesses as weakly as the product allows. docs/design/memory-ordering.md says what it covers.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpp/lease/lease_table_state.h"
#include "memory.h"

namespace kvlink::memory_model {

constexpr size_t kMostRequests = 4, kMostReaders = 3, kMostSeats = 2, kMostSlots = 2, kMostBlocks = 2;

/// A lease and the blocks under it.
struct Request {
  uint8_t block = 0;
  uint8_t seats = 1;
  uint8_t readers = 1;   // one for each of the first seats; of a soft lease, all at its seat
  bool soft = false;     // pins nothing
  bool expires = false;  // a soft one; others always do
  bool streams = false;  // its block is written after the grant
  bool late = false;     // a scheduler has written the ticket before the grant
  int8_t relays = -1;    // the reader whose block it offers on
};

/// The parts of one exploration, and the rules of the code around the table. Each rule is needed.
struct Config {
  const char* name = "";
  std::vector<Request> requests;
  uint8_t num_slots = 1, last_time = 0, ttl = 1;
  bool extends = false, renews = false, aborts = false, settles = false, announces = false;
  bool stands_still = false;  // the owner is stopped for longer than leases age
  bool sleeps = false;        // the thread that sweeps sleeps while there is no lease
  bool large = false;         // explored by the lane `simulate` only
  // Rules.
  bool reader_fences = true;       // a reader's slot load is behind an acquire fence
  bool ready_behind_nonce = true;  // a reader loads the nonce, and `ready` behind it
  bool taker_fences = true;        // who takes ended leases issues a release fence
  bool relay_proves = true;        // before it sets `ready`
  bool stores_arrive = true;       // a reader's words arrive before its slot is granted again
};

enum class Do : uint8_t {
  kGrant,
  kWrite,
  kSetReady,
  kExtend,
  kRenew,
  kAbort,
  kRevoke,
  kTime,
  kStandStill,
  kSweep,
  kTake,
  kSleep,
  kReader,
  kContinue,
  kNumKinds,
};
constexpr std::array kNames{"grant", "write",      "set ready", "extend",     "renew", "abort",  "revoke",
                            "time",  "standstill", "sweep",     "take ended", "sleep", "reader", "..."};

struct Action {
  Do what;
  uint8_t who = 0;  // a request, a reader, or of kContinue a thread
};

class World {
 public:
  explicit World(const Config& config);

  struct State;
  static std::vector<Action> actions(const Config& config);
  void put(const State& state);
  const State& state() const { return *state_; }
  /// Returns false if the action is not possible here. `choice`: which value its load takes.
  bool act(Action action, size_t choice);
  size_t num_choices() const { return num_choices_; }
  std::string key() const;
  std::string name_of(Action action) const;
  /// Every lease can be ended, and leaves nothing behind.
  void check_all_end();
  const std::string& violated() const { return violated_; }

 private:
  enum class Phase : uint8_t { kNone, kNonce, kReady, kAnnounce, kData, kValidate, kValid, kFailed, kDone };
  struct Lease;
  struct Reader;
  static constexpr size_t kScheduler = 0, kOwner = 1, kFirstReader = 2;

  void violate(const std::string& how) {
    if (violated_.empty()) violated_ = how;
  }
  size_t nonce_at(size_t slot) const { return (slot - 1) * words_per_slot_; }
  size_t ready_at(size_t slot) const { return nonce_at(slot) + 1; }
  size_t settled_at(size_t slot) const { return nonce_at(slot) + 2; }
  size_t reader_at(size_t slot) const { return nonce_at(slot) + 2 + config_.settles; }
  size_t block_at(size_t block) const { return config_.num_slots * words_per_slot_ + block; }
  void share_memory();
  void reset_table();
  uint64_t content_of(size_t request) const;
  uint64_t load(size_t thread, size_t location, std::memory_order order);
  void note_store(size_t location, uint64_t before, uint64_t after);
  bool begin(size_t thread, Action action, bool locks);
  bool advance(size_t thread);
  void call(Action action);
  void finish(Action action);
  bool free_block(const Request& request) const;
  bool grant(uint8_t who);
  bool write(uint8_t who);
  bool take(uint8_t who);
  void report();
  bool step_reader(uint8_t who);
  bool read_ready(uint8_t who, const LeaseSeat& seat);
  bool read_data(uint8_t who);
  void end_read(uint8_t who, bool valid);
  void look_at_clock();

  const Config config_;
  const size_t words_per_slot_;
  std::vector<std::pair<uint8_t, uint8_t>> readers_of_;  // request and seat
  alignas(64) std::array<std::byte, LeaseTable::slots_bytes(kMostSlots)> slots_{};
  alignas(64) std::array<std::byte, LeaseTable::words_bytes(kMostSlots)> words_{};
  SweeperSleep sleep_;
  LeaseTable table_;
  uint64_t next_nonce_ = 0;
  std::unique_ptr<State> state_;
  size_t choice_ = 0, num_choices_ = 1;
  // Results of the call that runs.
  std::vector<LeaseSeat> seats_;
  Swept swept_;
  bool result_ = false;
  std::string violated_;
};

struct World::Lease {
  std::array<LeaseSeat, kMostSeats> seats{};
  bool granted = false, written = false, ready = false, aborted = false, taken = false, revoked = false;
  uint8_t reports = 0, renewals = 0;
  int64_t deadline = 0;
};

struct World::Reader {
  Phase phase = Phase::kNone;
  bool in_time = false, cut = false, settled = false;
  uint64_t got = 0;
};

struct World::State {
  struct Call {
    bool active = false, locks = false;
    Action action{};
    Log log;
  };
  Memory memory;
  std::shared_ptr<const LeaseTableState> table;  // before the call that is under way
  uint64_t next_nonce = 0;
  int64_t now = 0, looked = 0, aged = 0;  // in units of kMostAgeingNs
  std::array<Lease, kMostRequests> leases;
  std::array<Reader, kMostReaders> readers;
  std::array<Call, kMostThreads> calls;
  bool asleep = false, woken = false;
  uint8_t sleeps = 0;
};

}  // namespace kvlink::memory_model

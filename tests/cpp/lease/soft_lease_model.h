// SPDX-License-Identifier: Apache-2.0
// The life of soft leases as a state machine around the real LeaseTable, for soft_lease_model_test.cc to
// explore. What it models, and what the properties mean, is in docs/design/leases.md.
#pragma once

#include <array>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cpp/lease/lease_table_state.h"

namespace kvlink::soft_lease_model {

/// Which ends of soft leases make the owner wait for slices that were compared before.
enum class Enforced : uint8_t {
  kAll,      // those since it waited last, as Engine::revoke does
  kOwnOnly,  // those of the same call
  kNone,
};

/// The model's assumptions about the code around the table. Each is a rule that a property depends on.
struct Rules {
  uint32_t num_slots = 2;
  bool guards = true;                  // the owner's thread compares before each slice: tcp, loopback
  Enforced enforced = Enforced::kAll;  // with guards
  bool disturbs = false;      // leases expire, and settles arrive late, with one reader instead of three
  bool revokes_first = true;  // a block is written only after it was revoked
  bool writes_after_tombstone = true;  // readers see tombstones before what is written after them
  bool looks_last = true;              // a reader loads the slot after its data
};

inline void PrintTo(const Rules& rules, std::ostream* out) {
  *out << rules.num_slots << " slots, guards " << rules.guards << ", disturbs " << rules.disturbs;
}

enum class Do : uint8_t {
  kOffer,
  kRevoke,
  kOverwrite,
  kAbort,
  kTime,
  kSweep,
  kArrive,
  kStart,
  kCompare,
  kSend,
  kLook,
  kSettle,
};

struct Action {
  Do what;
  uint8_t who = 0;  // a lease, a block or a reader
};

/// The leases: `old` covers block 0, `grown` covers blocks 0 and 1, `hard` pins other blocks and needs a
/// slot. The first two readers share the seat of `old`, the third one reads under `grown`.
class World {
 public:
  enum : uint8_t { kOld, kGrown, kHard, kNumLeases };
  static constexpr uint8_t kNumBlocks = 2, kNumReaders = 3, kNumSlices = 2;

  explicit World(const Rules& rules)
      : rules_(rules),
        memory_(1 + rules.num_slots),
        words_(memory_.size()),
        seen_(memory_.size()),
        table_(std::as_writable_bytes(std::span(memory_)), std::as_writable_bytes(std::span(words_)), 1,
               [this](std::span<uint64_t> drawn) {
                 for (uint64_t& nonce : drawn) nonce = next_nonce_ += 1000;
                 return Status();
               }) {}

  struct Snapshot;
  Snapshot save() const;
  void restore(const Snapshot& snapshot);
  std::string key() const;

  static std::vector<std::pair<std::string, Action>> actions();
  /// Returns false, and does nothing, if the action is not possible here.
  bool act(Action action);
  /// Every lease can be ended, and leaves nothing behind.
  void check_all_end();
  const std::string& violated() const { return violated_; }

 private:
  struct Lease {
    LeaseSeat seat;
    bool granted = false, ended = false;  // ended: by something that ends it, whatever the slot says
    uint8_t number = 0;                   // in the order of grants
    int64_t deadline = INT64_MAX;
    std::array<uint8_t, kNumBlocks> offered{};  // the content of its blocks
  };
  struct Reader {
    enum : uint8_t { kNone, kReading, kEnded } phase = kNone;
    uint8_t num_slices = 0;
    bool compared = false, looked = false, nonce_stood = false;
    bool foreign = false;  // a slice had other content than was offered
  };
  struct Block {
    uint8_t content = 0;
    bool revoked = false;  // since it was last offered
  };

  bool stands(const Lease& lease) const {
    return lease.granted && memory_[lease.seat.slot].nonce == lease.seat.nonce;
  }
  bool seen_standing(const Lease& lease) const { return seen_[lease.seat.slot] == lease.seat.nonce; }
  bool stands(uint8_t lease) const { return stands(leases_[lease]); }
  const Lease& lease_of(uint8_t reader) const { return leases_[reader == 2 ? kGrown : kOld]; }
  static uint8_t block_of(uint8_t reader, uint8_t slice) { return reader == 2 ? slice : 0; }
  static bool covers(uint8_t lease, uint8_t block) {
    return lease == kGrown || (lease == kOld && block == 0);
  }
  void violate(const std::string& how) {
    if (violated_.empty()) violated_ = how;
  }
  template <typename Call>
  void call(Call call);
  void arrive();
  uint32_t num_taken() const;
  bool displace();
  bool is_left_out(Action action) const;
  bool offer(uint8_t lease);
  void sweep();
  bool settle(uint8_t who);
  bool revoke(uint8_t block);
  bool overwrite(uint8_t block);
  void enforce_guards();
  bool compare(uint8_t reader);
  bool send(uint8_t reader);
  bool look(uint8_t reader);
  void end(Reader& reader);

  const Rules rules_;
  uint64_t next_nonce_ = 0;
  std::vector<LeaseSlot> memory_;
  std::vector<PeerWords> words_;
  std::vector<uint64_t> seen_;  // the nonces that readers see
  LeaseTable table_;
  int64_t now_ = 0;
  uint64_t num_enforced_ = 0;  // ends of soft leases after which guards were enforced
  uint8_t num_granted_ = 0;
  bool hard_reported_ = false;
  std::array<bool, 2> settled_{};
  std::array<Lease, kNumLeases> leases_;
  std::array<Reader, kNumReaders> readers_;
  std::array<Block, kNumBlocks> blocks_;
  std::string violated_;
};

struct World::Snapshot {
  LeaseTableState table;
  SharedWords words;
  std::vector<uint64_t> seen;
  uint64_t next_nonce;
  int64_t now;
  uint64_t num_enforced;
  uint8_t num_granted;
  bool hard_reported;
  std::array<bool, 2> settled;
  std::array<Lease, kNumLeases> leases;
  std::array<Reader, kNumReaders> readers;
  std::array<Block, kNumBlocks> blocks;
};

}  // namespace kvlink::soft_lease_model

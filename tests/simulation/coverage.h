// SPDX-License-Identifier: Apache-2.0
// What has occurred in all runs so far: each kind of event, by the state of the pull that it met.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvlink::simulation {

enum class Kind : uint8_t {
  kConnected,
  kRefused,
  kCancel,
  kRequestCancel,
  kClose,
  kTick,
  kWait,
  kAwait,
  kPartCut,
  kProves,
  kNumKinds,
};  // clang-format off
inline constexpr std::array kKindNames{"connected", "refused", "cancel", "request_cancel", "close", "tick", "wait",
                                       "await", "a part is cut", "a relay proves"};

/// Events of a connection or an owner.
enum class Event : uint8_t {
  kStagedRead, kRecalledRead, kUnrecalledRead, kRefusedRead, kRefusedPost, kRefusedWrite, kLostWrite, kBreak,
  kReorderedCompletion, kBrokenOrder, kSharedOffer, kSharedSoftOffer, kSoftRevoked, kExtended, kExpired, kAborted,
  kLateGrant, kRelayOfRelay, kThreeParts, kThreeLanes, kPrepared, kRestarted, kReturnedSettle,
  kRailAside, kRailToBeTried, kNumEvents,
};
inline constexpr std::array kEventNames{
    "a read is staged", "a read is called back", "a read cannot be called back", "a read is refused",
    "a post is refused", "a store is refused", "a store is lost", "a connection breaks", "completions change order",
    "a promise of order is broken", "two read one offer", "two read one soft offer", "a soft lease is revoked",
    "a lease is extended", "a lease expires", "a lease is aborted", "a lease is granted after its ticket",
    "a relay reads from a relay", "a pull has three parts", "a connection has three lanes", "a pull is prepared",
    "another process has the address", "a queued settle is returned", "a rail is set aside",
    "a rail is to be tried"};
// clang-format on
static_assert(kKindNames.size() == static_cast<size_t>(Kind::kNumKinds));
static_assert(kEventNames.size() == static_cast<size_t>(Event::kNumEvents));

class Coverage {
 public:
  static constexpr std::array kStates{"Waiting", "Starting", "Reading", "Failed", "Valid", "Settled"};

  static Coverage& the();
  void note(Kind kind, size_t state) { ++by_state_[static_cast<size_t>(kind)][state]; }
  void note(Event event) { ++events_[static_cast<size_t>(event)]; }
  void note_work(uint64_t transfers, uint64_t posts, uint64_t most) {
    transfers_ += transfers;
    posts_ += posts;
    most_posts_ += most;
  }
  /// Adds what the engine was asked for and did in a run, and the steps and allocations that it took.
  void note_effort(uint64_t events, uint64_t steps, uint64_t allocations) {
    events_of_engine_ += events;
    steps_ += steps;
    allocations_ += allocations;
  }
  /// Prints how often each has occurred, and at the end what never has.
  void print() const;

 private:
  std::array<std::array<uint64_t, kStates.size()>, kKindNames.size()> by_state_{};
  std::array<uint64_t, kEventNames.size()> events_{};
  uint64_t transfers_ = 0, posts_ = 0, most_posts_ = 0;
  uint64_t events_of_engine_ = 0, steps_ = 0, allocations_ = 0;
};

inline void note(Event event) { Coverage::the().note(event); }

}  // namespace kvlink::simulation

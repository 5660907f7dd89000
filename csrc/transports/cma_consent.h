// SPDX-License-Identifier: Apache-2.0
// How a process consents to be read over cma.
//
// A card names a process and an address in it, and whoever published the card may lie. A reader that believed
// it would read, and write, memory of a third process for the liar. So the reader believes only the process:
//
//   reader -> owner:  hello with a challenge, drawn for this connection
//   owner:            accept() stores the challenge in its Consent
//   reader:           finds a Consent at the address that the card names; it is of the process, the worker
//   and
//                     the epoch that the reader means, and has the challenge; the regions are those in it
//
// A liar that passes the hello on to another worker gets the consent of that worker, which names it. A peer
// can make an owner hold bytes of the peer's choice (a pull copies them there), but cannot make it map
// memory: so a Consent counts only as a private mapping of this name, which the kernel tells.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "memory/memory_range.h"
#include "transport_api/traits.h"

namespace kvlink::cma {

inline constexpr uint32_t kMagic = 0x3161'6d63;  // "cma1"
inline constexpr size_t kMaxWorkerBytes = 512;   // of the name
inline constexpr uint32_t kNumChallenges = 1024, kMostOfOneCaller = 256;
inline constexpr uint32_t kMaxRegions = 8192;
inline constexpr char kMappingName[] = "kvlink-cma-consent";

/// Random, and known to one reader and those that pass its hello on.
using Challenge = std::array<char, 32>;

/// One region; a remote key is the same. `memfd` names a descriptor of the owner, or none.
struct Region {
  uint64_t address = 0, bytes = 0, access = 0;
  uint64_t memfd = UINT64_MAX, memfd_inode = 0, memfd_offset = 0;

  bool operator==(const Region&) const = default;
  std::string key() const;
  static Result<Region> parse(std::string_view key);
};

/// The run of a worker that consents.
struct Identity {
  uint64_t magic = kMagic;
  uint64_t pid = 0;
  uint64_t epoch = 0, worker_bytes = 0;
  std::array<char, kMaxWorkerBytes> worker{};

  static Result<Identity> of(uint64_t pid, const WorkerRun& run);
  bool operator==(const Identity&) const = default;
};

/// As it is in the owner's memory, where readers in other processes read it.
struct ConsentMemory {
  Identity identity;
  uint64_t stamp = 0;  // random, 0 after the owner has closed
  std::atomic<uint64_t> num_regions = 0;
  std::array<Challenge, kNumChallenges> challenges;
  std::array<Region, kMaxRegions> regions;
};

/// Any thread may call any method.
class Consent {
 public:
  static Result<std::shared_ptr<Consent>> make(const WorkerRun& self);
  ~Consent();
  Consent(const Consent&) = delete;
  Consent& operator=(const Consent&) = delete;

  uint64_t address() const { return reinterpret_cast<uint64_t>(memory_); }
  /// Returns where the challenge is. Of a caller that has too many, it replaces the oldest, so that a flood
  /// by one caller costs no other caller anything.
  uint32_t admit(uint64_t caller, const Challenge& challenge);
  Status add(const Region& region);
  /// Ends the consent to this region. Readers that have checked it before keep it.
  void remove(const Region& region);
  void withdraw();

 private:
  struct Held {
    uint64_t caller = 0, since = 0;
  };
  explicit Consent(ConsentMemory* memory) : memory_(memory) {}
  uint32_t place_for(uint64_t caller) const;

  ConsentMemory* const memory_;
  std::mutex mutex_;
  uint64_t num_admitted_ = 0;
  std::vector<Held> held_;  // by place
};

/// Returns whether process `pid` has a Consent at `address`, as the kernel tells. kTransportUnavailable if it
/// does not tell.
Result<bool> has_consent_at(int pid, uint64_t address);

}  // namespace kvlink::cma

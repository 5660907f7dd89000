// SPDX-License-Identifier: Apache-2.0
// Finds the rails of a path that are far slower than their equals, by what pulls measured. They are set
// aside, and single pulls try them again.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/sync.h"
#include "transport_api/traits.h"

namespace kvlink {

/// A pair of ports, and the lanes of one connection that it carries.
struct Rail {
  std::string name;    // "mlx5_0:1->mlx5_1:1"
  uint64_t lanes = 0;  // a bit for each, by its index
  /// Its share of the bytes under way is as large as its part of this among all rails. Two chunks take far
  /// longer than a round trip.
  uint64_t chunk_bytes = 0;

  uint64_t enough_bytes() const { return 2 * chunk_bytes; }
};

/// The bytes that a pull read over one rail, and the time that took.
struct RailWork {
  uint64_t bytes = 0;
  int64_t ns = 0;
};

/// The rails that a pull does not use as any other, by their index.
struct RailChoice {
  uint64_t aside = 0;  // not at all
  uint64_t trial = 0;  // for Rail::enough_bytes()
};

/// Adds a lane to the rail that its path names.
void add_lane(std::vector<Rail>& rails, uint32_t lane, const Traits& traits);

/// Remembers rails by their name, so that a new connection knows what pulls over an older one found. Any
/// thread.
class RailRates {
 public:
  static constexpr int64_t kFirstPauseNs = 10'000'000'000, kLongestPauseNs = 300'000'000'000;
  /// A rail is set aside if it was so many times slower than the others in so many pulls in a row, and used
  /// again once it is not so many times slower.
  static constexpr double kFarSlower = 10, kHardlySlower = 3;
  static constexpr uint32_t kPulls = 3;

  /// Returns the rails that the next pull does not use, at least one being left. A pull that `measures` may
  /// try one.
  RailChoice choose(std::span<const Rail> rails, bool measures, int64_t now_ns);
  /// Adds what a valid pull measured by rail.
  void add(std::span<const Rail> rails, std::span<const RailWork> work, const RailChoice& choice,
           int64_t now_ns);
  /// Returns whether a rail is set aside now.
  bool is_aside(std::string_view name) const;
  /// Returns how often a rail was set aside.
  uint64_t num_set_aside() const;

 private:
  static constexpr size_t kMostRails = 256;  // the owner says how its ports are named

  struct State {
    uint32_t num_slow = 0;    // pulls in a row
    int64_t trial_at_ns = 0;  // 0: it is used
    int64_t pause_ns = kFirstPauseNs;
    int64_t back_at_ns = 0;  // when it was used again
  };

  State& state_of(const Rail& rail);
  void judge(State& state, double times_slower, int64_t now_ns);
  void set_aside(State& state, int64_t now_ns);

  mutable Mutex mutex_;
  std::unordered_map<std::string, State> states_;  // of rails that were slow once
  Atomic<uint64_t> num_set_aside_{0};
};

}  // namespace kvlink

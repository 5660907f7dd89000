// SPDX-License-Identifier: Apache-2.0
#include "engine/rail_rates.h"

#include <algorithm>
#include <optional>

namespace kvlink {
namespace {

std::string_view name_of(std::string_view path) { return path.substr(0, path.find(' ')); }

/// Returns the upper median of how fast the other rails are that are used, so that of two the other decides.
std::optional<double> rate_of_others(std::span<const double> rates, uint64_t used, size_t but) {
  std::vector<double> others;
  for (size_t rail = 0; rail < rates.size(); ++rail) {
    if (rail != but && (used >> rail & 1) != 0 && rates[rail] > 0) others.push_back(rates[rail]);
  }
  if (others.empty()) return {};
  const auto middle = others.begin() + static_cast<ptrdiff_t>(others.size() / 2);
  std::nth_element(others.begin(), middle, others.end());
  return *middle;
}

}  // namespace

void add_lane(std::vector<Rail>& rails, uint32_t lane, const Traits& traits) {
  const std::string_view name = name_of(traits.path);
  auto found = std::ranges::find(rails, name, &Rail::name);
  if (found == rails.end()) {
    rails.push_back({.name = std::string(name), .chunk_bytes = traits.window.chunk_bytes});
    found = rails.end() - 1;
  }
  found->lanes |= 1ull << lane;
}

RailRates::State& RailRates::state_of(const Rail& rail) {
  if (states_.size() >= kMostRails && !states_.contains(rail.name)) states_.clear();
  return states_[rail.name];
}

RailChoice RailRates::choose(std::span<const Rail> rails, bool measures, int64_t now_ns) {
  if (num_set_aside_ == 0) return {};
  const std::lock_guard lock(mutex_);
  RailChoice choice;
  State* tried = nullptr;
  for (size_t index = 0; index < rails.size(); ++index) {
    const auto found = states_.find(rails[index].name);
    if (found == states_.end() || found->second.trial_at_ns == 0) continue;
    const bool tries = measures && !tried && found->second.trial_at_ns <= now_ns;
    if (tries) tried = &found->second;
    (tries ? choice.trial : choice.aside) |= 1ull << index;
  }
  if ((choice.aside | choice.trial) == ~0ull >> (64 - rails.size())) return {};
  if (tried) tried->trial_at_ns = now_ns + tried->pause_ns;  // if this pull tells nothing, another one tries
  return choice;
}

void RailRates::add(std::span<const Rail> rails, std::span<const RailWork> work, const RailChoice& choice,
                    int64_t now_ns) {
  std::vector<double> rates(rails.size());
  for (size_t rail = 0; rail < rails.size(); ++rail) {
    if (work[rail].bytes < rails[rail].enough_bytes()) continue;
    const double chunks =
        static_cast<double>(work[rail].bytes) / static_cast<double>(rails[rail].chunk_bytes);
    rates[rail] = chunks / static_cast<double>(std::max<int64_t>(work[rail].ns, 1));
  }
  const uint64_t used = ~(choice.aside | choice.trial);
  const std::lock_guard lock(mutex_);
  for (size_t rail = 0; rail < rails.size(); ++rail) {
    const std::optional<double> others = rate_of_others(rates, used, rail);
    if (rates[rail] == 0 || !others) continue;
    const double times_slower = *others / rates[rail];
    State* state = nullptr;
    if (const auto found = states_.find(rails[rail].name); found != states_.end()) state = &found->second;
    if (!state && times_slower < kFarSlower) continue;
    if (!state) state = &state_of(rails[rail]);
    // Pulls that began before it was set aside tell nothing new.
    if (state->trial_at_ns == 0 || (choice.trial >> rail & 1) != 0) judge(*state, times_slower, now_ns);
  }
}

void RailRates::judge(State& state, double times_slower, int64_t now_ns) {
  if (state.trial_at_ns != 0) {  // it was tried
    if (times_slower > kHardlySlower) return set_aside(state, now_ns);
    state.trial_at_ns = 0;
    state.back_at_ns = now_ns;
    return;
  }
  if (now_ns - state.back_at_ns >= state.pause_ns) state.pause_ns = kFirstPauseNs;
  state.num_slow = times_slower < kFarSlower ? 0 : state.num_slow + 1;
  if (state.num_slow < kPulls) return;
  num_set_aside_.fetch_add(1);
  state.num_slow = 0;
  set_aside(state, now_ns);
}

void RailRates::set_aside(State& state, int64_t now_ns) {
  state.trial_at_ns = now_ns + state.pause_ns;
  state.pause_ns = std::min(2 * state.pause_ns, kLongestPauseNs);
}

bool RailRates::is_aside(std::string_view path) const {
  const std::lock_guard lock(mutex_);
  const auto found = states_.find(std::string(name_of(path)));
  return found != states_.end() && found->second.trial_at_ns != 0;
}

uint64_t RailRates::num_set_aside() const { return num_set_aside_; }

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "coverage.h"

#include <cinttypes>
#include <cstdio>
#include <string>

namespace kvlink::simulation {

Coverage& Coverage::the() {
  static Coverage coverage;
  return coverage;
}

void Coverage::print() const {
  std::string never;
  std::printf("%-40s", "event by the state that it met");
  for (const char* state : kStates) std::printf("%10s", state);
  for (size_t kind = 0; kind < by_state_.size(); ++kind) {
    std::printf("\n%-40s", kKindNames[kind]);
    for (size_t state = 0; state < kStates.size(); ++state) {
      std::printf("%10" PRIu64, by_state_[kind][state]);
      if (by_state_[kind][state] == 0)
        never += std::string("\n  ") + kKindNames[kind] + " in " + kStates[state];
    }
  }
  for (size_t event = 0; event < events_.size(); ++event) {
    std::printf("\n%-40s%10" PRIu64, kEventNames[event], events_[event]);
    if (events_[event] == 0) never += std::string("\n  ") + kEventNames[event];
  }
  std::printf("\nreads posted by %" PRIu64 " transfers: %" PRIu64 " of at most %" PRIu64, transfers_, posts_,
              most_posts_);
  std::printf("\nof its threads %.0f steps, and %.1f allocations, for each of %" PRIu64
              " pulls, posts and looks",
              static_cast<double>(steps_) / static_cast<double>(events_of_engine_),
              static_cast<double>(allocations_) / static_cast<double>(events_of_engine_), events_of_engine_);
  std::printf("\nnever occurred:%s\n", never.empty() ? " nothing" : never.c_str());
}

}  // namespace kvlink::simulation

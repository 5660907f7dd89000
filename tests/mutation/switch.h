// SPDX-License-Identifier: Apache-2.0
// Included by files that tests/mutation has rewritten. KVLINK_MUTANT: which mutant is switched on.
// KVLINK_MUTATION_REACHED: a file that gets the mutants which this process reached.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace mutation {

struct Switch {
  static constexpr int kMost = 4096;
  const int active = std::getenv("KVLINK_MUTANT") ? std::atoi(std::getenv("KVLINK_MUTANT")) : 0;
  const char* const path = std::getenv("KVLINK_MUTATION_REACHED");
  bool reached[kMost] = {};

  ~Switch() {
    std::FILE* const file = path ? std::fopen(path, "a") : nullptr;
    if (file == nullptr) return;
    for (int i = 0; i < kMost; ++i) {
      if (reached[i]) std::fprintf(file, "%d\n", i);
    }
    std::fclose(file);
  }
};

inline Switch the;

inline bool on(int number) {
  if (the.path != nullptr) the.reached[number] = true;
  return number == the.active;
}

/// Returns the mutex, or one that nobody else locks.
template <typename Mutex>
Mutex& unless_dropped(int number, Mutex& mutex) {
  return on(number) ? *new Mutex : mutex;
}

}  // namespace mutation

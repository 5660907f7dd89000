// SPDX-License-Identifier: Apache-2.0
// Runs the reader's engine under many seeds. KVLINK_SIMULATION_SEEDS: how many. KVLINK_SIMULATION_FIRST:
// which is the first. KVLINK_SIMULATION_TRACE: prints what happens.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "base/check.h"
#include "coverage.h"
#include "world.h"

namespace kvlink::simulation {
namespace {

uint64_t seed_now = 0, first_seed = 0;
// They lie behind those of the gate, and failed once: lanes that wait for a slot of another one, and one that
// breaks a moment before the other. A change of the simulation gives them other runs.
constexpr std::array<uint64_t, 2> kKeptSeeds{14'548, 26'285};

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace

void fail(const std::string& what) {
  const double at_ms = Scheduler::exists() ? static_cast<double>(Scheduler::the().since_start_ns()) / 1e6 : 0;
  std::fprintf(stderr,
               "seed %llu at %.3f ms: %s\nreplay: KVLINK_SIMULATION_TRACE=1 KVLINK_SIMULATION_SEEDS=1 "
               "KVLINK_SIMULATION_FIRST=%llu %s\nfound by %llu seeds in %.2f CPU-s\n",
               static_cast<unsigned long long>(seed_now), at_ms, what.c_str(),
               static_cast<unsigned long long>(seed_now), program_invocation_name,
               static_cast<unsigned long long>(seed_now - first_seed + 1),
               static_cast<double>(std::clock()) / CLOCKS_PER_SEC);
  std::_Exit(1);
}

int main() {
  const uint64_t num_seeds = setting("KVLINK_SIMULATION_SEEDS", 10'000);
  first_seed = setting("KVLINK_SIMULATION_FIRST", 1);
  uint64_t num_pulls = 0, num_valid = 0;
  const auto run = [&](uint64_t seed) {
    World world(seed_now = seed);
    world.run();
    num_pulls += world.num_pulls();
    num_valid += world.num_valid();
  };
  for (uint64_t seed = first_seed; seed < first_seed + num_seeds; ++seed) run(seed);
  if (!std::getenv("KVLINK_SIMULATION_FIRST")) {
    for (const uint64_t seed : kKeptSeeds) run(seed);
  }
  if (std::getenv("KVLINK_SIMULATION_COVERAGE") || num_seeds > 50'000) Coverage::the().print();
  std::printf("simulation: %llu seeds, %llu pulls, %llu of them valid\n",
              static_cast<unsigned long long>(num_seeds), static_cast<unsigned long long>(num_pulls),
              static_cast<unsigned long long>(num_valid));
  return 0;
}

}  // namespace kvlink::simulation

/// In place of csrc/base/check.cc: every broken contract ends the run.
void kvlink::broken_contract(const char* condition, const char* function) {
  simulation::fail(std::string("a contract is broken: ") + function + "() needs " + condition);
}

int main() { return kvlink::simulation::main(); }

// SPDX-License-Identifier: Apache-2.0
#include "engine/prior_cost.h"

#include <algorithm>
#include <array>
#include <utility>

#include "staging/device_staging.h"

namespace kvlink {
namespace {

// Medians of `kvlink bench pull` on a 2-core cloud machine.
constexpr std::array<std::pair<std::string_view, Cost>, 4> kMeasured{
    {{"loopback", {3, 40, 10}}, {"shm", {3, 40, 10}}, {"cma", {5, 100, 5}}, {"tcp", {35, 100, 3}}}};

constexpr std::string_view kFault = "fault+";

}  // namespace

Cost prior_cost(std::string_view transport) {
  if (transport.starts_with(kFault)) transport.remove_prefix(kFault.size());
  for (const auto& [name, cost] : kMeasured) {
    if (name == transport) return cost;
  }
  const WayCost& direct = prior_costs(transport).direct;  // assumptions
  return {direct.start_us, std::max(direct.op_ns, direct.piece_ns), direct.gib_per_s};
}

}  // namespace kvlink

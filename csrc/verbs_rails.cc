// SPDX-License-Identifier: Apache-2.0
#include "verbs_rails.h"

#include <algorithm>

namespace kvlink::verbs {
namespace {

bool reach(const NicAddress& a, const NicAddress& b) {
  return (a.ethernet != 0) == (b.ethernet != 0) && a.by_cm == b.by_cm;
}

std::vector<uint32_t> reaching(const NicAddress& kind, std::span<const NicAddress> nics) {
  std::vector<uint32_t> found;
  for (uint32_t index = 0; index < nics.size(); ++index) {
    if (reach(nics[index], kind)) found.push_back(index);
  }
  return found;
}

void join(const std::vector<uint32_t>& local, const std::vector<uint32_t>& remote, std::vector<Rail>& rails) {
  if (local.empty() || remote.empty()) return;
  for (size_t i = 0; i < std::max(local.size(), remote.size()); ++i) {
    rails.push_back({local[i % local.size()], remote[i % remote.size()]});
  }
}

}  // namespace

std::vector<Rail> pair(std::span<const NicAddress> local, std::span<const NicAddress> remote) {
  std::vector<Rail> rails;
  for (const uint32_t ethernet : {0, 1}) {
    for (const bool by_cm : {false, true}) {
      const NicAddress kind{.name = {}, .ethernet = ethernet, .by_cm = by_cm};
      join(reaching(kind, local), reaching(kind, remote), rails);
    }
  }
  std::vector<uint32_t> at_local(local.size()), at_remote(remote.size());
  for (const Rail& rail : rails) {
    ++at_local[rail.local];
    ++at_remote[rail.remote];
  }
  for (Rail& rail : rails) {
    const double here = double(local[rail.local].mbps) / at_local[rail.local];
    const double there = double(remote[rail.remote].mbps) / at_remote[rail.remote];
    rail.mbps = std::min(here, there);
  }
  std::stable_sort(rails.begin(), rails.end(), [](const Rail& a, const Rail& b) { return a.mbps > b.mbps; });
  return rails;
}

Status why_apart(const NicAddress& local, const NicAddress& remote) {
  if ((local.ethernet != 0) != (remote.ethernet != 0)) {
    return Status::Unavailable(local.name + " and the owner's " + remote.name +
                                   " are on different kinds of fabric (Ethernet and InfiniBand)",
                               "name the ports that belong together in KVLINK_NICS");
  }
  const auto way = [](const NicAddress& nic) { return nic.by_cm ? " through rdma_cm" : " directly"; };
  return Status::Unavailable(
      local.name + " connects" + way(local) + ", and the owner's " + remote.name + way(remote),
      "set KVLINK_RDMA_CONNECT to the same at both ends");
}

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/rails.h"

#include <algorithm>

#include "transports/verbs/gid.h"

namespace kvlink::verbs {
namespace {

/// Only ports of one kind reach each other. A RoCE port is known by one IP address, and the kernel finds no
/// route between IPv4 and IPv6.
struct Kind {
  bool ethernet, by_cm, v4;
  bool operator==(const Kind&) const = default;
};

Kind kind_of(const NicAddress& nic) {
  const bool ethernet = nic.ethernet != 0;
  return {ethernet, nic.by_cm, ethernet && !nic.by_cm && is_v4(nic.gid)};
}

std::vector<uint32_t> all_of(Kind kind, std::span<const NicAddress> nics) {
  std::vector<uint32_t> found;
  for (uint32_t index = 0; index < nics.size(); ++index) {
    if (kind_of(nics[index]) == kind) found.push_back(index);
  }
  return found;
}

void join(const std::vector<uint32_t>& local, const std::vector<uint32_t>& remote, std::vector<Rail>& rails) {
  if (local.empty() || remote.empty()) return;
  for (size_t i = 0; i < std::max(local.size(), remote.size()); ++i) {
    rails.push_back({local[i % local.size()], remote[i % remote.size()]});
  }
}

/// Ports of one network reach each other for certain. On a fabric whose rails are apart others do not, so
/// they are only joined if both sides have some that are left over.
void join_by_network(std::vector<uint32_t> here, std::vector<uint32_t> there,
                     std::span<const NicAddress> local, std::span<const NicAddress> remote,
                     std::vector<Rail>& rails) {
  std::vector<uint32_t> alone;
  while (!here.empty()) {
    const NicAddress& first = local[here.front()];
    const auto take = [&first](std::vector<uint32_t>& from, std::span<const NicAddress> of) {
      std::vector<uint32_t> taken;
      std::erase_if(from, [&](uint32_t index) {
        const bool same = &of[index] == &first ||
                          (first.net_bits > 0 && same_prefix(first.gid, of[index].gid, first.net_bits));
        if (same) taken.push_back(index);
        return same;
      });
      return taken;
    };
    const std::vector<uint32_t> peers = take(there, remote), mine = take(here, local);
    if (peers.empty()) alone.insert(alone.end(), mine.begin(), mine.end());
    join(mine, peers, rails);
  }
  std::ranges::sort(alone);
  join(alone, there, rails);
}

}  // namespace

std::vector<Rail> pair(std::span<const NicAddress> local, std::span<const NicAddress> remote) {
  std::vector<Rail> rails;
  for (const bool ethernet : {false, true}) {
    for (const bool by_cm : {false, true}) {
      for (const bool v4 : {false, true}) {
        const Kind kind{ethernet, by_cm, v4};
        join_by_network(all_of(kind, local), all_of(kind, remote), local, remote, rails);
      }
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
  if (local.by_cm == remote.by_cm) {
    const auto at = [](const NicAddress& nic) { return nic.name + " is " + ip_text(nic.gid); };
    return Status::Unavailable(
        "RoCE does not route between IPv4 and IPv6: " + at(local) + ", and the owner's " + at(remote),
        "give the interfaces of both ends addresses of the same kind; IPv4 is taken where there is one");
  }
  const auto way = [](const NicAddress& nic) { return nic.by_cm ? " through rdma_cm" : " directly"; };
  return Status::Unavailable(
      local.name + " connects" + way(local) + ", and the owner's " + remote.name + way(remote),
      "set KVLINK_RDMA_CONNECT to the same at both ends");
}

}  // namespace kvlink::verbs

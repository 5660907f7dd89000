// SPDX-License-Identifier: Apache-2.0
// The only file that names the transports.
#include "transports/registry.h"

#include <algorithm>
#include <array>
#include <string>

#include "transports/factories.h"

namespace kvlink {

#ifdef KVLINK_NO_VERBS
Status verbs_probe() {
  return Status::Unavailable("kvlink was built without RDMA (-DKVLINK_VERBS=OFF)",
                             "install a wheel of a release, or build again without that option");
}
Result<std::unique_ptr<Transport>> verbs_make(const TransportOptions&) { return verbs_probe(); }
#endif

#ifdef KVLINK_NO_FABRIC
Status fabric_probe() {
  return Status::Unavailable(
      "kvlink was built without libfabric",
      "install libfabric-dev (dnf install libfabric-devel) and build again, without -DKVLINK_FABRIC=OFF");
}
Result<std::unique_ptr<Transport>> fabric_make(const TransportOptions&) { return fabric_probe(); }
Result<std::vector<FabricProvider>> fabric_providers(const std::string&) { return fabric_probe(); }
#endif

namespace {

constexpr std::array<TransportInfo, 7> kTransports{{
    {"loopback", "copies inside this process", 1, loopback_probe, loopback_make},
    {"shm", "copies from a pool that both processes map; pools that kvlink allocated, same host", 1,
     shm_probe, shm_make},
    {"cma", "process_vm_readv out of the owner's memory; any memory, same host", 1, cma_probe, cma_make},
    {"cuda", "one GPU copies out of memory that both processes map; pools in GPU memory, same host", 1,
     cuda_probe, cuda_make},
    {"verbs", "RDMA reads by the NICs; no CPU of the owner takes part", 4, verbs_probe, verbs_make},
    {"tcp", "sockets; the owner's thread sends, the reader receives in place; anywhere", 1, tcp_probe,
     tcp_make},
    {"fabric", "RDMA reads by a provider of libfabric: EFA, Slingshot, Omni-Path; only where it is named", 1,
     fabric_probe, fabric_make},
}};
constexpr size_t kNumUnnamed = kTransports.size() - 1;

constexpr std::string_view kFault = "fault+";

}  // namespace

std::span<const TransportInfo> transports() { return std::span(kTransports).first(kNumUnnamed); }
std::span<const TransportInfo> all_transports() { return kTransports; }

const TransportInfo* find_transport(std::string_view name, std::span<const TransportInfo> table) {
  if (name.starts_with(kFault)) name.remove_prefix(kFault.size());
  const auto found =
      std::find_if(table.begin(), table.end(), [name](const TransportInfo& row) { return row.name == name; });
  return found == table.end() ? nullptr : &*found;
}

Result<std::unique_ptr<Transport>> make_transport(std::string_view name, const TransportOptions& options,
                                                  std::span<const TransportInfo> table) {
  if (const TransportInfo* const row = find_transport(name, table)) {
    Result<std::unique_ptr<Transport>> made = row->make(options);
    return made.ok() && name.starts_with(kFault) ? fault_wrap(std::move(*made), options) : std::move(made);
  }
  std::string names;
  for (const TransportInfo& known : table) names += std::string(names.empty() ? "" : ", ") + known.name;
  return Status{Code::kConfig, "no transport is called \"" + std::string(name) + "\"",
                "choose from " + names + ", or fault+ one of them"};
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The only file that names the transports.
#include "transports/registry.h"

#include <algorithm>
#include <array>
#include <string>

#include "transports/factories.h"

namespace kvlink {
namespace {

using Make = Result<std::unique_ptr<Transport>>(const TransportOptions&);

#ifdef KVLINK_NO_VERBS

}  // namespace

Status verbs_probe() {
  return Status::Unavailable("kvlink was built without RDMA (-DKVLINK_VERBS=OFF)",
                             "install a wheel of a release, or build again without that option");
}
Result<std::unique_ptr<Transport>> verbs_make(const TransportOptions&) { return verbs_probe(); }

namespace {

#endif

constexpr std::array<TransportInfo, 6> kTransports{{
    {"loopback", "copies inside this process", 1, loopback_probe, loopback_make},
    {"shm", "copies from a pool that both processes map; pools that kvlink allocated, same host", 1,
     shm_probe, shm_make},
    {"cma", "process_vm_readv out of the owner's memory; any memory, same host", 1, cma_probe, cma_make},
    {"cuda", "one GPU copies out of memory that both processes map; pools in GPU memory, same host", 1,
     cuda_probe, cuda_make},
    {"verbs", "RDMA reads by the NICs; nobody's CPU takes part at the owner", 4, verbs_probe, verbs_make},
    {"tcp", "sockets; the owner's thread sends, the reader receives in place; anywhere", 1, tcp_probe,
     tcp_make},
}};

template <Make* make>
Result<std::unique_ptr<Transport>> make_faulty(const TransportOptions& options) {
  Result<std::unique_ptr<Transport>> inner = make(options);
  if (!inner.ok()) return inner;
  return fault_wrap(std::move(*inner), options);
}

constexpr std::array<TransportInfo, 6> kFaultyTransports{{
    {"fault+loopback", "loopback with injected faults", 1, loopback_probe, make_faulty<loopback_make>},
    {"fault+shm", "shm with injected faults", 1, shm_probe, make_faulty<shm_make>},
    {"fault+cma", "cma with injected faults", 1, cma_probe, make_faulty<cma_make>},
    {"fault+cuda", "cuda with injected faults", 1, cuda_probe, make_faulty<cuda_make>},
    {"fault+verbs", "verbs with injected faults", 4, verbs_probe, make_faulty<verbs_make>},
    {"fault+tcp", "tcp with injected faults", 1, tcp_probe, make_faulty<tcp_make>},
}};

const TransportInfo* find_in(std::span<const TransportInfo> table, std::string_view name) {
  const auto found =
      std::find_if(table.begin(), table.end(), [name](const TransportInfo& row) { return row.name == name; });
  return found == table.end() ? nullptr : &*found;
}

}  // namespace

std::span<const TransportInfo> transports() { return kTransports; }

const TransportInfo* find_transport(std::string_view name) {
  const TransportInfo* const plain = find_in(kTransports, name);
  return plain ? plain : find_in(kFaultyTransports, name);
}

Result<std::unique_ptr<Transport>> make_transport(std::string_view name, const TransportOptions& options) {
  const TransportInfo* const row = find_transport(name);
  if (row) return row->make(options);
  std::string names;
  for (const TransportInfo& known : kTransports) names += std::string(names.empty() ? "" : ", ") + known.name;
  return Status{Code::kConfig, "no transport is called \"" + std::string(name) + "\"",
                "choose from " + names + ", or fault+ one of them"};
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The options of a process for all its transports.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport_api/traits.h"

namespace kvlink {

class GatherKernel;

/// A port to use, and the rate that its link and its path to memory allow.
struct NicOption {
  std::string port;  // "mlx5_0:1"
  uint32_t mbps = 1;
  bool named = false;  // by a user: without it verbs is not used. Others are left out, each by itself
};

/// How verbs connects queue pairs. 0 or empty: what the device or the fabric has by itself.
struct RdmaOptions {
  std::string connect = {};          // "direct" or "cm" (rdma_cm); empty: what the NIC needs
  std::string gid = {};              // which GID of a port: an index, an address or a subnet
  uint16_t pkey = 0;                 // the partition; the first of the port's table
  uint8_t service_level = 0;         // InfiniBand's; with RoCE the priority of a VLAN's tag
  uint8_t traffic_class = 0;         // of what verbs sends
  uint8_t timeout = 14;              // 4.096 us * 2^timeout until a packet counts as lost
  uint8_t retries = 6;               // of a lost packet
  int64_t silence_ns = 600'000'000;  // until a reader gives up an owner whose NIC does not answer
  uint32_t qps_per_rail = 4;
};

struct TransportOptions {
  std::string host = "127.0.0.1";  // address that listening sockets bind
  uint16_t port = 0;               // 0: any
  std::string fault;               // plan of the fault transport, see transports/fault/transport.cc
  std::optional<std::vector<NicOption>> nics = {};  // best first, or none; absent: every active port
  RdmaOptions rdma = {};
  std::shared_ptr<const GatherKernel> cuda_kernel = {};  // on the pool's GPU; null: the driver copies
  uint32_t gpu_blocks = 0;     // the most blocks of a launch of it; 0: what the link needs
  std::string advertise = {};  // number that peers dial instead of `host`, which may be a wildcard then
  WorkerRun self = {};
  std::string fabric_provider = {};  // of libfabric, "efa"; empty: its first that kvlink may use
};

}  // namespace kvlink

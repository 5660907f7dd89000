// SPDX-License-Identifier: Apache-2.0
// The options of a process for all its transports.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvlink {

/// A port to use, and the rate that its link and its path to memory allow.
struct NicOption {
  std::string port;  // "mlx5_0:1"
  uint32_t mbps = 1;
};

struct TransportOptions {
  std::string host = "127.0.0.1";  // address that listening sockets bind
  uint16_t port = 0;               // 0: any
  std::string fault;               // plan of the fault transport, see transports/fault/transport.cc
  std::optional<std::vector<NicOption>> nics = {};  // best first, or none; absent: every active port
  std::string rdma_connect = {};                    // "direct" or "cm" (rdma_cm); empty: what the NIC needs
  uint8_t rdma_traffic_class = 0;                   // of what verbs sends
  std::string cuda_image = {};  // gather.cu, compiled for the pool's GPU; empty: cuda copies without it
  uint32_t gpu_blocks = 0;      // the most blocks of a launch of it; 0: what the link needs
  std::string advertise = {};   // number that peers dial instead of `host`, which may be a wildcard then
};

}  // namespace kvlink

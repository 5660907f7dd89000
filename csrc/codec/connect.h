// SPDX-License-Identifier: Apache-2.0
// How a reader introduces the lanes of a connection to their owner: the messages of the agent's Connect
// (protos/kvlink/v1/agent.proto), for those who carry them without gRPC.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvlink {

inline constexpr size_t kMaxHellos = 64;

struct ConnectRequest {
  std::string worker_id;
  uint64_t epoch = 0;
  std::string transport;
  std::vector<std::string> hellos;
  bool takes_keys = true;
};

struct ConnectReply {
  uint64_t connection_id = 0;
  std::vector<std::string> replies, pool_keys, lease_keys;
  Status refusal;  // then there are no replies; the agent refuses by the status of the call
};

std::string write_connect_request(const ConnectRequest& request);
Result<ConnectRequest> read_connect_request(std::string_view blob);
std::string write_connect_reply(const ConnectReply& reply);
Result<ConnectReply> read_connect_reply(std::string_view blob);

}  // namespace kvlink

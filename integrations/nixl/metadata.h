// SPDX-License-Identifier: Apache-2.0
// What agents tell each other, in NIXL's metadata and on the native channel. All of it is parsed as if it
// were forged: nothing is allocated for what is out of its bounds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "channel/connect.h"
#include "engine/engine.h"

namespace kvlink::nixl {

inline constexpr uint32_t kInfoMagic = 0x314E564B;    // "KVN1"
inline constexpr uint32_t kRegionMagic = 0x524E564B;  // "KVNR"
inline constexpr uint32_t kCardMagic = 0x434E564B;    // "KVNC"
inline constexpr size_t kMaxPools = 65;               // host memory, and each of 64 GPUs
inline constexpr size_t kMaxAgentBytes = 512;         // as NIXL's names are
inline constexpr uint32_t kHostPool = 0;              // the pool of GPU n is n + 1

/// The connection info: where the agent's channel listens, and what admits to it. NIXL reads it once.
std::string write_info(const channel::ChannelAddress& address);
std::optional<channel::ChannelAddress> read_info(std::string_view info);

/// The public data of one registered region.
struct RegionName {
  uint32_t pool = 0, number = 0;
};
std::string write_region(const RegionName& region);
std::optional<RegionName> read_region(std::string_view data);

/// The memory of one kind, as its agent's card has it.
struct PoolCard {
  uint32_t pool = 0;
  uint64_t epoch = 0;
  LeaseSeat seat;  // under which everything is read, until a region is dropped
  std::vector<TransportAccess> transports;
  std::vector<LateRegion> regions;

  const LateRegion* find(uint32_t number) const;
  void keep_only(const std::vector<uint32_t>& numbers);
  /// Returns what a reader connects to. A transport that lacks one of the regions is refused.
  channel::OwnerCard owner() const;
};
using AgentCard = std::vector<PoolCard>;

/// The name of a pool in requests to connect, and to transports that prove who answers.
std::string pool_name(uint32_t pool);

std::string write_card(const AgentCard& card);
std::optional<AgentCard> read_card(std::string_view body);

}  // namespace kvlink::nixl

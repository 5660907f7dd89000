// SPDX-License-Identifier: Apache-2.0
// The card of a worker (protos/kvlink/v1/card.proto): what it publishes about itself. Bytes of peers are
// bounded before anything is allocated for them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "plan/planner.h"

namespace kvlink {

/// Increased when the meaning of a card, a ticket or a slot changes.
inline constexpr uint32_t kProtocolVersion = 5;

inline constexpr size_t kMaxNameBytes = 512, kMaxOpaqueBytes = 64 << 10, kMaxCardBytes = 4 << 20;
inline constexpr size_t kMaxGroups = 256, kMaxPlanes = 2048, kMaxRegions = 4096, kMaxTransports = 32;
inline constexpr size_t kMaxPoolKeys = 4096, kMaxLeaseKeys = 2, kIncarnationBytes = 16;
inline constexpr size_t kMaxChannelAddresses = 4, kChannelInstanceBytes = 16, kChannelSecretBytes = 32;

struct CardHost {
  std::string boot_id;
  uint64_t pid_namespace = 0, net_namespace = 0;
  uint32_t pid = 0, uid = 0;
};

/// The stage of a pipeline that has the layers of the planes; without bounds there is one stage.
struct CardPipeline {
  uint32_t rank = 0;
  std::vector<uint32_t> bounds;
};

/// The layout of one cache group. Of `memory.tokens`, rank, size and interleave are the card's context.
struct CardLayout {
  std::string model, dtype;
  uint32_t total_heads = 0, tp_rank = 0, tp_size = 0;
  bool is_state = false;
  CardPipeline pipeline;
  uint32_t context_tp_ranks = 0;
  Layout memory;
};

struct CardTransport {
  std::string name, address;
  std::vector<std::string> pool_keys, lease_keys;
  std::string refused;
  bool bounces = false;
};

/// How readers without gRPC reach the worker, see docs/design/channel.md.
struct CardChannel {
  std::vector<std::string> addresses;
  std::string instance, secret;
  uint32_t flags = 0;
};

struct WorkerCard {
  std::string worker_id;
  uint64_t epoch = 0;
  std::string incarnation, agent;
  CardHost host;
  std::vector<CardLayout> layouts;
  std::vector<uint64_t> region_bytes;
  std::vector<CardTransport> transports;
  uint32_t protocol_version = 0;
  bool draining = false;
  std::optional<CardChannel> channel = {};
};

/// Returns kConfig for a name that no worker or request can have.
Status check_name(std::string_view name, const char* what);

std::string write_card(const WorkerCard& card);
/// Returns kConfig for bytes that are no card, or exceed a bound.
Result<WorkerCard> read_card(std::string_view blob);

/// A card with its checksum, as cards are stored and sent.
std::string seal_card(const WorkerCard& card);
Result<WorkerCard> unseal_card(std::string_view sealed);

}  // namespace kvlink

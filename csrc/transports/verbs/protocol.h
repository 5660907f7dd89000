// SPDX-License-Identifier: Apache-2.0
// The blobs of the verbs transport: the owner's address, hello, reply and remote key. Little-endian, see
// base/blob.h. Each begins with a magic number that includes the version. They come from other processes:
// parse() refuses malformed ones and bounds every count.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "memory/memory_range.h"

namespace kvlink::verbs {

inline constexpr uint32_t kMaxNics = 32;
inline constexpr uint32_t kMaxSlices = 4096;

using Gid = std::array<char, 16>;  // network order, as the wire has it

/// One port of an owner.
struct NicAddress {
  std::string name;  // of the device, for messages only
  uint32_t ethernet = 0;
  uint32_t lid = 0;  // InfiniBand
  Gid gid{};
  bool by_cm = false;     // is connected to by the connection manager: CmReply answers
  uint32_t mbps = 1;      // of its link, what the way to the memory leaves
  uint32_t net_bits = 0;  // of this end's own: so many of the GID are its network's; 0: unknown
};

struct Address {
  std::vector<NicAddress> nics;

  std::string format() const;
  static std::optional<Address> parse(std::string_view blob);
};

/// Options of a connection on which the vendors of two NICs agree (enhanced connection establishment). Vendor
/// 0: none.
struct Ece {
  uint32_t vendor = 0, options = 0, mask = 0;
  bool operator==(const Ece&) const = default;
};

/// One end of a queue pair, as the other end needs it.
struct QpAddress {
  uint32_t qpn = 0, psn = 0;  // 24 bits each
  uint32_t lid = 0;
  Gid gid{};
  uint32_t mtu = 0;        // ibv_mtu
  uint32_t reads_out = 0;  // most RDMA reads that it starts at a time
  uint32_t reads_in = 0;   // most RDMA reads that it answers at a time
  Ece ece = {};            // the reader's offer, then what the owner accepted of it
};

struct Hello {
  uint32_t owner_nic = 0;  // index into Address::nics
  QpAddress reader;

  std::string format() const;
  static std::optional<Hello> parse(std::string_view blob);
};

struct Reply {
  QpAddress owner;

  std::string format() const;
  static std::optional<Reply> parse(std::string_view blob);
};

using Secret = std::array<char, 16>;

/// The address that the connection manager connects to, and the secret to show there.
struct CmReply {
  Gid ip{};  // as IPv6 has it
  uint32_t port = 0;
  Secret secret{};

  std::string format() const;
  static std::optional<CmReply> parse(std::string_view blob);
};

/// A region is registered in slices of equal size, the last one shorter, at each NIC by itself.
struct RemoteKey {
  Access access = Access::kRead;
  uint64_t base = 0;  // the address of byte 0 as reads and writes name it
  uint64_t bytes = 0;
  uint64_t slice_bytes = 0;
  std::vector<std::vector<uint32_t>> rkeys;  // [index of Address::nics][slice]

  std::string format() const;
  static std::optional<RemoteKey> parse(std::string_view blob);
};

}  // namespace kvlink::verbs

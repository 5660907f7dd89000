// SPDX-License-Identifier: Apache-2.0
// What the two ends of shm say to each other.
//
// The owner listens on an abstract Unix socket (SOCK_SEQPACKET) under a random name. A reader connects, sends
// the secret that accept() gave it, and gets messages of up to kMaxOffers records, each with its memfd
// attached (SCM_RIGHTS), until it has `total` of them. The socket then stays open and silent: its end is the
// other's end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "transport.h"
#include "wire.h"

namespace kvlink {

inline constexpr uint32_t kShmMagic = 0x316d'6873;  // "shm1"
inline constexpr size_t kShmSecretBytes = 32;
inline constexpr size_t kShmMaxNameBytes = 64;  // of boot ids and socket names
inline constexpr uint32_t kShmMaxOffers = 64;   // in one message; the kernel allows 253 descriptors
inline constexpr uint32_t kShmMaxRegions = 1 << 16;
inline constexpr size_t kShmMaxMessageBytes = 8 + kShmMaxOffers * 28;

struct ShmAddress {
  std::string boot_id;
  uint64_t net_namespace = 0;
  std::string socket;  // without the leading zero byte

  std::string blob() const {
    return BlobWriter().u32(kShmMagic).bytes(boot_id).u64(net_namespace).bytes(socket).take();
  }
  static Result<ShmAddress> parse(std::string_view blob) {
    BlobReader from(blob);
    const bool ours = from.u32() == kShmMagic;
    ShmAddress parsed;
    parsed.boot_id = from.bytes(kShmMaxNameBytes);
    parsed.net_namespace = from.u64();
    parsed.socket = from.bytes(kShmMaxNameBytes);
    if (from.done() && ours && !parsed.socket.empty()) return parsed;
    return Status::Unavailable("not a shm address", "let both ends run the same version of kvlink");
  }
};

/// One region: where it lies in its memfd. Also its remote key.
struct ShmOffer {
  uint64_t id = 0, offset = 0, bytes = 0;
  Access access = Access::kRead;

  bool operator==(const ShmOffer&) const = default;
  void write(BlobWriter& to) const { to.u64(id).u64(offset).u64(bytes).u32(static_cast<uint32_t>(access)); }
  /// False: not a region.
  bool read(BlobReader& from) {
    id = from.u64();
    offset = from.u64();
    bytes = from.u64();
    const uint32_t value = from.u32();
    access = static_cast<Access>(value);
    return from.ok() && value <= 1 && bytes != 0 && bytes <= UINT64_MAX - offset;
  }
};

}  // namespace kvlink

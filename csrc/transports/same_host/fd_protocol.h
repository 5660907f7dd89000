// SPDX-License-Identifier: Apache-2.0
// The protocol by which an owner exports descriptors to readers on the same host, for shm and cuda.
//
// The owner listens on an abstract Unix socket (SOCK_SEQPACKET) with a random name. A reader connects, sends
// the secret that accept() returned, and receives messages of up to kFdMaxOffers records, each with its
// descriptor attached (SCM_RIGHTS), until it has `total` of them. The socket then stays open and silent; its
// end shows the other process's end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/blob.h"
#include "memory/memory_range.h"

namespace kvlink {

inline constexpr size_t kFdSecretBytes = 32;
inline constexpr size_t kMaxNameBytes = 64;   // of boot ids and socket names
inline constexpr uint32_t kFdMaxOffers = 64;  // in one message; the kernel allows 253 descriptors
inline constexpr uint32_t kFdMaxOffersInAll = 1 << 16;
inline constexpr size_t kFdMaxMessageBytes = 8 + kFdMaxOffers * 28;

inline constexpr std::string_view kSocketPrefix = "kvlink-";
inline constexpr size_t kSocketDigits = 32;

/// Returns whether an owner may have such a name. A card may name any socket of the host, and its publisher
/// chooses the secret that the reader sends there: it must not reach other services.
inline bool is_socket_name(std::string_view name) {
  return name.size() == kSocketPrefix.size() + kSocketDigits && name.starts_with(kSocketPrefix) &&
         name.find_first_not_of("0123456789abcdef", kSocketPrefix.size()) == std::string_view::npos;
}

/// The address of such an owner. `magic` identifies the transport.
struct HostAddress {
  std::string boot_id;
  uint64_t net_namespace = 0;
  std::string socket;  // without the leading zero byte

  std::string blob(uint32_t magic) const {
    return BlobWriter().u32(magic).bytes(boot_id).u64(net_namespace).bytes(socket).take();
  }
  static Result<HostAddress> parse(uint32_t magic, std::string_view blob) {
    BlobReader from(blob, magic);
    HostAddress parsed;
    parsed.boot_id = from.bytes(kMaxNameBytes);
    parsed.net_namespace = from.u64();
    parsed.socket = from.bytes(kMaxNameBytes);
    if (from.done() && is_socket_name(parsed.socket)) return parsed;
    return Status::Unavailable("not an address of this transport",
                               "let both ends run the same version of kvlink");
  }
};

/// The memory behind one descriptor: a piece of a memfd, or a whole allocation of a GPU.
struct FdOffer {
  uint64_t id = 0, offset = 0, bytes = 0;
  Access access = Access::kRead;

  bool operator==(const FdOffer&) const = default;
  void write(BlobWriter& to) const { to.u64(id).u64(offset).u64(bytes).u32(static_cast<uint32_t>(access)); }
  /// Returns false if it is not an offer.
  bool read(BlobReader& from) {
    uint32_t value = 0;
    from.fields(id, offset, bytes, value);
    access = static_cast<Access>(value);
    return from.ok() && value <= kLastAccess && bytes != 0 && bytes <= UINT64_MAX - offset;
  }
};

}  // namespace kvlink

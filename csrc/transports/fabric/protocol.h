// SPDX-License-Identifier: Apache-2.0
// The blobs of the fabric transport: address, reply and remote key. Little-endian, see base/blob.h. They come
// from other processes: parse() refuses malformed ones and bounds every length.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transports/fabric/post_queue.h"

namespace kvlink::fabric {

struct Address {
  std::string provider;  // of libfabric, "tcp;ofi_rxm"
  std::string endpoint;  // as the provider names it
  std::string liveness;  // of the tcp socket that shows whether the owner lives, see transports/tcp

  std::string format() const;
  static std::optional<Address> parse(std::string_view blob);
};

/// The endpoint of Address proves itself by a region that holds a nonce.
struct Reply {
  RemoteRegion proof;
  uint64_t nonce = 0;
  std::string invitation;  // to the tcp connection

  std::string format() const;
  static std::optional<Reply> parse(std::string_view blob);
};

std::string format_key(const RemoteRegion& region);
std::optional<RemoteRegion> parse_key(std::string_view blob);

}  // namespace kvlink::fabric

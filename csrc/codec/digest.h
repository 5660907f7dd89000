// SPDX-License-Identifier: Apache-2.0
// The checksum of cards and tickets, and the signature of tickets.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace kvlink {

/// CRC-32 as zlib computes it. `before` is that of what comes before.
uint32_t crc32(std::string_view bytes, uint32_t before = 0);

using Sha256 = std::array<uint8_t, 32>;
Sha256 sha256(std::string_view bytes);
Sha256 hmac_sha256(std::string_view key, std::string_view message);

}  // namespace kvlink

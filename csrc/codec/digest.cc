// SPDX-License-Identifier: Apache-2.0
#include "codec/digest.h"

#include <bit>
#include <cstddef>
#include <cstring>
#include <string>

namespace kvlink {
namespace {

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

/// Table n has the effect of a byte that n bytes follow.
constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0);
    tables[0][byte] = value;
  }
  for (size_t table = 1; table < tables.size(); ++table) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[table - 1][byte];
      tables[table][byte] = before >> 8 ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr CrcTables kCrc = make_crc_tables();

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr size_t kBlock = 64;
using State = std::array<uint32_t, 8>;
constexpr State kStart{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t big(const char* from) {
  uint32_t value;
  std::memcpy(&value, from, sizeof value);
  return __builtin_bswap32(value);
}

void mix(State& state, const char* block) {
  uint32_t words[64];
  for (int at = 0; at < 16; ++at) words[at] = big(block + 4 * at);
  for (int at = 16; at < 64; ++at) {
    const uint32_t early = words[at - 15], late = words[at - 2];
    words[at] = words[at - 16] + words[at - 7] + (std::rotr(early, 7) ^ std::rotr(early, 18) ^ early >> 3) +
                (std::rotr(late, 17) ^ std::rotr(late, 19) ^ late >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int at = 0; at < 64; ++at) {
    const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                           ((e & f) ^ (~e & g)) + kRounds[at] + words[at];
    const uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first;
    d = c, c = b, b = a, a = first + second;
  }
  const State mixed{a, b, c, d, e, f, g, h};
  for (size_t at = 0; at < state.size(); ++at) state[at] += mixed[at];
}

}  // namespace

uint32_t crc32(std::string_view bytes, uint32_t before) {
  uint32_t crc = ~before;
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    uint32_t low, high;
    std::memcpy(&low, bytes.data(), sizeof low);
    std::memcpy(&high, bytes.data() + sizeof low, sizeof high);
    low ^= crc;
    crc = 0;
    for (uint32_t byte = 0; byte < 4; ++byte) {
      crc ^= kCrc[7 - byte][low >> 8 * byte & 0xFF] ^ kCrc[3 - byte][high >> 8 * byte & 0xFF];
    }
  }
  for (const char byte : bytes) crc = crc >> 8 ^ kCrc[0][(crc ^ static_cast<uint8_t>(byte)) & 0xFF];
  return ~crc;
}

Sha256 sha256(std::string_view bytes) {
  State state = kStart;
  const uint64_t bits = __builtin_bswap64(uint64_t{bytes.size()} * 8);
  for (; bytes.size() >= kBlock; bytes.remove_prefix(kBlock)) mix(state, bytes.data());
  std::array<char, 2 * kBlock> last{};
  std::memcpy(last.data(), bytes.data(), bytes.size());
  last[bytes.size()] = static_cast<char>(0x80);
  const size_t end = bytes.size() + 1 + sizeof bits <= kBlock ? kBlock : 2 * kBlock;
  std::memcpy(last.data() + end - sizeof bits, &bits, sizeof bits);
  for (size_t at = 0; at < end; at += kBlock) mix(state, last.data() + at);
  for (uint32_t& word : state) word = __builtin_bswap32(word);
  return std::bit_cast<Sha256>(state);
}

Sha256 hmac_sha256(std::string_view key, std::string_view message) {
  std::string inner(kBlock, '\0');
  if (key.size() > kBlock) {
    const Sha256 shorter = sha256(key);
    std::memcpy(inner.data(), shorter.data(), shorter.size());
  } else {
    inner.replace(0, key.size(), key);
  }
  std::string outer = inner;
  for (char& byte : inner) byte ^= 0x36;
  for (char& byte : outer) byte ^= 0x5c;
  const Sha256 first = sha256(inner.append(message));
  return sha256(outer.append(reinterpret_cast<const char*>(first.data()), first.size()));
}

}  // namespace kvlink

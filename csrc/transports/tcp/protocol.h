// SPDX-License-Identifier: Apache-2.0
// What crosses a tcp connection. Little-endian, packed without gaps, sent as it is in memory.
//
//   owner -> reader: Greeting
//   reader -> owner: Hello, then frames: RequestHeader + `count` ReadEntry, or + GuardEntry + `count`
//   ReadEntry, or + WriteEntry
//   owner -> reader: HelloReply, then for each read frame, in order: ResponseHeader + payload (none when
//   refused)
//
// The owner speaks first. The card that a reader follows may name any port, and the secret in its hello may
// be anything: a reader that spoke first would say 40 bytes of a liar's choice to a service of a liar's
// choice.
//
// A read frame that asks for memory of a device asks for nothing else. The payload of a guarded one is sent
// while the guard holds. When it fails before the response has begun the answer is kStale, later the payload
// goes on as zeros: the reader asks for another proof behind it anyway.
//
// Write frames have no response: a reader checks them against the region's key first, so a refused one is an
// attack or a region that is gone, and closes the connection.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvlink::tcp {

static_assert(std::endian::native == std::endian::little, "kvlink frames are sent as they lie in memory");

inline constexpr uint64_t kHelloMagic = 0x31'70'63'74'6b'6e'6c'6bULL;  // "klnktcp1"
inline constexpr uint32_t kVersion = 3;
inline constexpr uint16_t kFrameMagic = 0x4b56;  // "VK"

inline constexpr uint32_t kMaxFrameOps = 1024;
/// The most payload of a frame. It bounds what is sent as zeros, and how long a reader does not learn that
/// its guard failed.
inline constexpr uint64_t kMaxFrameBytes = 1 << 20;
/// Reads up to this size, of whole aligned words, use atomic loads in frame order. They are for lease slots.
inline constexpr uint32_t kMaxAtomicBytes = 64;

using Secret = std::array<std::byte, 32>;

struct Greeting {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  uint64_t instance;  // of the owner: another process on the same port must not pass for it
};
static_assert(sizeof(Greeting) == 24);

/// Admits a connection once. `invitation` names the secret, so that it is found without comparing secrets.
struct Hello {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  uint64_t invitation;
  Secret secret;
};
static_assert(sizeof(Hello) == 56);

enum class Verdict : uint32_t { kAdmitted, kRefused };

struct HelloReply {
  uint64_t magic;
  uint32_t version;
  Verdict verdict;
};
static_assert(sizeof(HelloReply) == 16);

enum class FrameKind : uint16_t { kRead = 1, kWrite = 2, kGuardedRead = 3 };

struct RequestHeader {
  uint16_t magic;
  FrameKind kind;
  uint32_t count;  // entries that follow; 0 for a write
  uint64_t id;     // counts the reads of a connection from 0; for a write the value
};
static_assert(sizeof(RequestHeader) == 16);

struct ReadEntry {
  uint64_t key;
  uint64_t offset;
  uint64_t bytes;
};
static_assert(sizeof(ReadEntry) == 24);

/// The guard's word, which must be `value`.
struct GuardEntry {
  uint64_t key;
  uint64_t offset;
  uint64_t value;
};
static_assert(sizeof(GuardEntry) == 24);

struct WriteEntry {
  uint64_t key;
  uint64_t offset;
};
static_assert(sizeof(WriteEntry) < sizeof(ReadEntry),
              "the shortest frame is a write: see Owner::defer_settle");

inline constexpr size_t kWriteFrameBytes = sizeof(RequestHeader) + sizeof(WriteEntry);
inline constexpr size_t kMaxRequestBytes =
    sizeof(RequestHeader) + sizeof(GuardEntry) + kMaxFrameOps * sizeof(ReadEntry);

enum class ReadStatus : uint16_t { kOk, kUnknownKey, kOutOfBounds, kMixed, kStale };

struct ResponseHeader {
  uint16_t magic;
  ReadStatus status;
  uint32_t id;  // low half of the request's
  uint64_t
      bytes;  // of payload that follows; when refused 0, when stale the word found, kLargestToldWord at most
};
static_assert(sizeof(ResponseHeader) == 16);

}  // namespace kvlink::tcp

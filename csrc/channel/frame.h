// SPDX-License-Identifier: Apache-2.0
// The frames of the native channel: a header of 16 bytes and a body. docs/design/channel.md has the table.
//
// Bounds are checked in the header, so a frame that is too large is refused before memory is taken for it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace kvlink::channel {

inline constexpr uint32_t kMagic = 0x3143564B;  // "KVC1"
inline constexpr uint16_t kVersion = 1;

/// The numbers are those on the wire. A request is followed by its answer; kRefused answers any of them.
enum class Type : uint16_t {
  kGreeting = 1,
  kHello,
  kAdmitted,
  kRefused,
  kCard,
  kCardIs,
  kConnect,
  kConnected,
  kSettle,
  kSettled,
  kRenew,
  kRenewed,
  kNotify,
  kNotified,
};

struct FrameHeader {
  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  uint16_t type = 0;
  uint32_t bytes = 0;  // of the body
  uint32_t id = 0;     // of the request; 0: of the channel itself
};
static_assert(sizeof(FrameHeader) == 16);

using Instance = std::array<char, 16>;
using Secret = std::array<char, 32>;

/// Shows who the reader is, and that it has the card of the owner.
struct Hello {
  Instance caller{};
  Secret secret{};
};
static_assert(sizeof(Hello) == 48);

inline constexpr uint32_t kMaxConnectBytes = 64 << 10;
inline constexpr uint32_t kMaxConnectedBytes = 1 << 20;
inline constexpr uint32_t kMaxCardBytes = 4 << 20;
inline constexpr uint32_t kMaxSeats = 1024;
inline constexpr uint32_t kMaxNoticeBytes = 16 << 20, kMaxSenderBytes = 512;
inline constexpr uint32_t kMaxTextBytes = 4096;  // of what a refusal says, and of its fix

/// The sizes that a body may have.
struct Bounds {
  uint32_t least, most;
};
/// Returns the bounds of a type's body, or nothing for a type that may not come now.
using BoundsOf = std::optional<Bounds> (*)(Type type);
std::optional<Bounds> of_hellos(Type type);  // before admission
std::optional<Bounds> of_requests(Type type);
std::optional<Bounds> of_greetings(Type type);  // before the hello
std::optional<Bounds> of_verdicts(Type type);   // about it
std::optional<Bounds> of_answers(Type type);

std::string encode(Type type, uint32_t id, std::string_view body = {});

struct Frame {
  Type type;
  uint32_t id;
  std::string body;
};

/// Assembles one frame at a time. It holds at most that frame, and only the part that has come.
class FrameReader {
 public:
  /// Consumes bytes up to the end of the next frame, and returns it if it is whole. Returns nothing when
  /// `bytes` is used up, or the frame is refused: then failed() says why, for good.
  std::optional<Frame> take(std::string_view& bytes, BoundsOf bounds);
  const Status& failed() const { return failed_; }
  /// Returns whether a part of a frame has come.
  bool is_inside() const { return got_ > 0; }
  size_t held_bytes() const { return body_.capacity(); }

 private:
  Status check(BoundsOf bounds) const;

  FrameHeader header_;
  size_t got_ = 0;  // of the header
  std::string body_;
  Status failed_;
};

}  // namespace kvlink::channel

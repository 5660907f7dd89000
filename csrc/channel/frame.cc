// SPDX-License-Identifier: Apache-2.0
#include "channel/frame.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvlink::channel {
namespace {

constexpr uint32_t kSeatBytes = 12;
constexpr Bounds kEmpty{0, 0}, kRefusal{12, 12 + 2 * kMaxTextBytes};

}  // namespace

std::optional<Bounds> of_hellos(Type type) {
  if (type != Type::kHello) return {};
  return Bounds{sizeof(Hello), sizeof(Hello)};
}

std::optional<Bounds> of_requests(Type type) {
  switch (type) {
    case Type::kCard:
      return kEmpty;
    case Type::kConnect:
      return Bounds{10, kMaxConnectBytes};
    case Type::kSettle:
      return Bounds{kSeatBytes, kSeatBytes};
    case Type::kRenew:
      return Bounds{4, 4 + kMaxSeats * kSeatBytes};
    case Type::kNotify:
      return Bounds{16, 16 + kMaxSenderBytes + kMaxNoticeBytes};
    default:
      return {};
  }
}

std::optional<Bounds> of_greetings(Type type) {
  if (type == Type::kGreeting) return Bounds{sizeof(Instance), sizeof(Instance)};
  if (type == Type::kRefused) return kRefusal;
  return {};
}

std::optional<Bounds> of_verdicts(Type type) {
  if (type == Type::kAdmitted) return kEmpty;
  if (type == Type::kRefused) return kRefusal;
  return {};
}

std::optional<Bounds> of_answers(Type type) {
  switch (type) {
    case Type::kRefused:
      return kRefusal;
    case Type::kCardIs:
      return Bounds{1, kMaxCardBytes};
    case Type::kConnected:
      return Bounds{2, kMaxConnectedBytes};
    case Type::kSettled:
      return Bounds{4, 4};
    case Type::kRenewed:
      return Bounds{4, 4 + kMaxSeats * 4};
    case Type::kNotified:
      return Bounds{8, 8};
    default:
      return {};
  }
}

std::string encode(Type type, uint32_t id, std::string_view body) {
  const FrameHeader header{kMagic, kVersion, static_cast<uint16_t>(type), static_cast<uint32_t>(body.size()),
                           id};
  std::string frame(reinterpret_cast<const char*>(&header), sizeof header);
  return frame.append(body);
}

Status FrameReader::check(BoundsOf bounds) const {
  if (header_.magic != kMagic) return Status::Config("this is no frame of kvlink's native channel");
  if (header_.version != kVersion) {
    return Status::Config("the frame has version " + std::to_string(header_.version) +
                          " of the native channel, and this process speaks " + std::to_string(kVersion));
  }
  const std::optional<Bounds> allowed = bounds(static_cast<Type>(header_.type));
  if (!allowed) {
    return Status::Config("a frame of type " + std::to_string(header_.type) + " is not expected here");
  }
  if (header_.bytes >= allowed->least && header_.bytes <= allowed->most) return {};
  return Status::Config("a frame of type " + std::to_string(header_.type) + " has " +
                        std::to_string(header_.bytes) + " bytes, and may have " +
                        std::to_string(allowed->least) + " to " + std::to_string(allowed->most));
}

std::optional<Frame> FrameReader::take(std::string_view& bytes, BoundsOf bounds) {
  if (!failed_.ok() || (bytes.empty() && !is_inside())) return {};
  if (got_ < sizeof header_) {
    const size_t now = std::min(sizeof header_ - got_, bytes.size());
    std::memcpy(reinterpret_cast<char*>(&header_) + got_, bytes.data(), now);
    bytes.remove_prefix(now);
    got_ += now;
    if (got_ < sizeof header_) return {};
    failed_ = check(bounds);
    if (!failed_.ok()) return {};
  }
  const size_t now = std::min<size_t>(header_.bytes - body_.size(), bytes.size());
  body_.append(bytes.substr(0, now));
  bytes.remove_prefix(now);
  if (body_.size() < header_.bytes) return {};
  got_ = 0;
  return Frame{static_cast<Type>(header_.type), header_.id, std::exchange(body_, {})};
}

}  // namespace kvlink::channel

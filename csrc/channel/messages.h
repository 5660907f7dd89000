// SPDX-License-Identifier: Apache-2.0
// The bodies of the native channel's frames. Each encode_ has a parse_, which believes nothing: it returns
// nothing for a body that is malformed or beyond a bound. Those that connect are the agent's messages
// (codec/connect.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "channel/frame.h"
#include "codec/connect.h"
#include "engine/engine.h"

namespace kvlink::channel {

/// A reader's seat of a lease: the ticket's slot and settle nonce.
struct SeatRef {
  uint32_t slot = 0;
  uint64_t settle_nonce = 0;
  bool operator==(const SeatRef&) const = default;
};

inline constexpr uint32_t kNoticeId = 1;  // of every frame of a notice, which has a number
/// A message for whoever uses the owner, in order and once: kNotified names the last one that was taken.
struct Notice {
  uint64_t number = 0;  // one more than that of the caller's notice before
  std::string sender, message;
  bool operator==(const Notice&) const = default;
};

/// The answer to a notice that arrived.
struct NoticeVerdict {
  bool fits = true;    // false: its caller may not have so many queued, which ends its link
  uint64_t taken = 0;  // tells the caller at once that its notices up to this number were taken; 0: later
};

/// Why a request was refused, as kvlink.control.refusal.Reason. The numbers are those on the wire.
enum class Reason : uint32_t { kMalformed = 1, kTooMany, kNoTransport, kDenied, kNotReady, kFailed };

struct Refusal {
  Reason reason = Reason::kFailed;
  std::string what, fix;
};

/// The answer of an owner as a message, and back.
ConnectReply reply_of(Result<Accepted> accepted);
Result<Accepted> accepted_of(ConnectReply reply);

Refusal refusal_of(const Status& status);
/// Returns the refusal as its caller sees it. Texts of a peer lose what a terminal would obey.
Status status_of(const Refusal& refusal);

std::string encode_refusal(const Refusal& refusal);
std::optional<Refusal> parse_refusal(std::string_view body);
std::string encode_seat(const SeatRef& seat);
std::optional<SeatRef> parse_seat(std::string_view body);
std::string encode_seats(std::span<const SeatRef> seats);
std::optional<std::vector<SeatRef>> parse_seats(std::string_view body);
std::string encode_notice(uint64_t number, std::string_view sender, std::string_view message);
std::optional<Notice> parse_notice(std::string_view body);
std::string encode_numbers(std::span<const uint32_t> numbers);
std::optional<std::vector<uint32_t>> parse_numbers(std::string_view body);

}  // namespace kvlink::channel

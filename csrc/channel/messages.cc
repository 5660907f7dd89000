// SPDX-License-Identifier: Apache-2.0
#include "channel/messages.h"

#include <algorithm>

#include "base/blob.h"

namespace kvlink::channel {
namespace {

std::string printable(std::string text) {
  for (char& each : text) {
    if (static_cast<unsigned char>(each) < 0x20 || each == 0x7F) each = ' ';
  }
  return text;
}

std::string cut(const std::string& text) { return text.substr(0, kMaxTextBytes); }

}  // namespace

ConnectReply reply_of(Result<Accepted> accepted) {
  if (!accepted.ok()) return {0, {}, {}, {}, accepted.status()};
  return {accepted->connection_id,
          std::move(accepted->replies),
          std::move(accepted->pool_keys),
          std::move(accepted->lease_keys),
          {}};
}

Result<Accepted> accepted_of(ConnectReply reply) {
  const Status& refusal = reply.refusal;
  if (!refusal.ok()) return Status{refusal.code(), printable(refusal.what()), printable(refusal.fix())};
  return Accepted{static_cast<uint32_t>(reply.connection_id), std::move(reply.replies),
                  std::move(reply.pool_keys), std::move(reply.lease_keys)};
}

Refusal refusal_of(const Status& status) {
  const auto reason = [code = status.code()] {
    switch (code) {
      case Code::kConfig:
        return Reason::kMalformed;
      case Code::kTransportUnavailable:
        return Reason::kNoTransport;
      case Code::kAccessDenied:
        return Reason::kDenied;
      default:
        return Reason::kFailed;
    }
  };
  return {reason(), status.what(), status.fix()};
}

Status status_of(const Refusal& refusal) {
  const auto code = [&refusal] {
    switch (refusal.reason) {
      case Reason::kMalformed:
        return Code::kConfig;
      case Reason::kNoTransport:
        return Code::kTransportUnavailable;
      case Reason::kDenied:
        return Code::kAccessDenied;
      default:
        return Code::kPeerUnreachable;
    }
  };
  return {code(), printable(refusal.what), printable(refusal.fix)};
}

std::string encode_refusal(const Refusal& refusal) {
  return BlobWriter()
      .u32(static_cast<uint32_t>(refusal.reason))
      .bytes(cut(refusal.what))
      .bytes(cut(refusal.fix))
      .take();
}

std::optional<Refusal> parse_refusal(std::string_view body) {
  BlobReader reader(body);
  Refusal refusal{static_cast<Reason>(reader.u32()), {}, {}};
  refusal.what = reader.bytes(kMaxTextBytes);
  refusal.fix = reader.bytes(kMaxTextBytes);
  return reader.done() ? std::optional(std::move(refusal)) : std::nullopt;
}

std::string encode_seat(const SeatRef& seat) {
  return BlobWriter().u32(seat.slot).u64(seat.settle_nonce).take();
}

std::optional<SeatRef> parse_seat(std::string_view body) {
  BlobReader reader(body);
  SeatRef seat{reader.u32(), 0};
  seat.settle_nonce = reader.u64();
  return reader.done() ? std::optional(seat) : std::nullopt;
}

std::string encode_seats(std::span<const SeatRef> seats) {
  BlobWriter writer;
  writer.u32(static_cast<uint32_t>(seats.size()));
  for (const SeatRef& seat : seats) writer.u32(seat.slot).u64(seat.settle_nonce);
  return writer.take();
}

std::optional<std::vector<SeatRef>> parse_seats(std::string_view body) {
  BlobReader reader(body);
  const uint32_t num = reader.u32();
  if (num > kMaxSeats) return {};
  std::vector<SeatRef> seats;
  for (uint32_t index = 0; index < num && reader.ok(); ++index) {
    const uint32_t slot = reader.u32();
    seats.push_back({slot, reader.u64()});
  }
  return reader.done() ? std::optional(std::move(seats)) : std::nullopt;
}

std::string encode_notice(uint64_t number, std::string_view sender, std::string_view message) {
  return BlobWriter().u64(number).bytes(sender).bytes(message).take();
}

std::optional<Notice> parse_notice(std::string_view body) {
  BlobReader reader(body);
  Notice notice{reader.u64(), {}, {}};
  notice.sender = reader.bytes(kMaxSenderBytes);
  notice.message = reader.bytes(kMaxNoticeBytes);
  return reader.done() && notice.number != 0 ? std::optional(std::move(notice)) : std::nullopt;
}

std::string encode_numbers(std::span<const uint32_t> numbers) {
  BlobWriter writer;
  writer.u32(static_cast<uint32_t>(numbers.size()));
  for (const uint32_t number : numbers) writer.u32(number);
  return writer.take();
}

std::optional<std::vector<uint32_t>> parse_numbers(std::string_view body) {
  BlobReader reader(body);
  const uint32_t num = reader.u32();
  if (num > kMaxSeats) return {};
  std::vector<uint32_t> numbers;
  for (uint32_t index = 0; index < num && reader.ok(); ++index) numbers.push_back(reader.u32());
  return reader.done() ? std::optional(std::move(numbers)) : std::nullopt;
}

}  // namespace kvlink::channel

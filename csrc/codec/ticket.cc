// SPDX-License-Identifier: Apache-2.0
#include "codec/ticket.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "base/host_identity.h"
#include "codec/card.h"
#include "codec/digest.h"
#include "codec/proto.h"

namespace kvlink {
namespace {

constexpr std::string_view kMagic = "KVT1";
constexpr size_t kPrefixBytes = 12, kHeaderBytes = 38, kSeatBytes = 20, kGroupBytes = 8,
                 kDigestHeaderBytes = 5;
constexpr size_t kSignedBytes = kHeaderBytes + kSignatureBytes, kTracedBytes = kSignedBytes + kTraceBytes;
constexpr size_t kDigestedBytes = kTracedBytes + kDigestHeaderBytes;
constexpr size_t kMaxHeaderBytes = 4096, kMaxSeatsOfOne = 255;
constexpr size_t kMaxTicketBytes = kPrefixBytes + kMaxHeaderBytes + kMaxSeatsOfOne * kSeatBytes +
                                   3 * kMaxNameBytes + 4 * kMaxTicketBlocks + 8 * kMaxGroups +
                                   kMaxDigestBytes;
constexpr size_t kLeastDigestBytes = 8, kMostDigestBytes = 64;

/// Numbers without gaps between them, as the ticket has them.
class Out {
 public:
  template <typename T>
  Out& add(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    return text({reinterpret_cast<const char*>(&value), sizeof value});
  }
  Out& text(std::string_view value) {
    blob_.append(value);
    return *this;
  }
  Out& pad_to(size_t bytes) {
    blob_.resize(std::max(blob_.size(), bytes), '\0');
    return *this;
  }
  std::string blob_;
};

class In {
 public:
  explicit In(std::string_view blob) : rest_(blob) {}
  template <typename... Numbers>
  bool take(Numbers&... into) {
    return (number(into) && ...);
  }
  bool text(size_t bytes, std::string_view& into) {
    if (bytes > rest_.size()) return false;
    into = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return true;
  }
  std::string_view rest() const { return rest_; }

 private:
  template <typename T>
  bool number(T& into) {
    std::string_view from;
    if (!text(sizeof into, from)) return false;
    std::memcpy(&into, from.data(), sizeof into);
    return true;
  }
  std::string_view rest_;
};

/// As in the ticket, which has no padding either.
struct Header {
  uint64_t epoch;
  uint32_t num_tokens, num_blocks, ready;
  uint8_t unit, num_seats;
  uint16_t rank, num_ranks, name_bytes[3];
  uint32_t ttl_ms;
  uint16_t num_groups;
};
static_assert(offsetof(Header, num_groups) + sizeof(uint16_t) == kHeaderBytes);

Status refused(const std::string& why) { return Status::Config("not a ticket of kvlink: " + why); }

/// Returns why no ticket has these values, which any of them may have from its bytes or its maker.
Status check_fields(const Ticket& ticket) {
  for (const std::string* name : {&ticket.request_id, &ticket.worker_id, &ticket.agent}) {
    const bool may_be_empty = name == &ticket.agent;
    if (name->size() > kMaxNameBytes || (name->empty() && !may_be_empty) || !is_utf8(*name)) {
      return Status::Config("request and worker ids must have 1 to 512 bytes of UTF-8");
    }
  }
  if (ticket.seats.empty() || ticket.seats.size() > kMaxSeatsOfOne ||
      ticket.block_ids.size() > kMaxTicketBlocks) {
    return Status::Config("a ticket has 1 to 255 seats and at most 1048576 blocks");
  }
  for (const LeaseSeat& seat : ticket.seats) {
    if (seat.slot == 0 || seat.slot > kMaxTicketSlots || seat.nonce < kSmallestNonce ||
        !(seat.settles() || ticket.is_soft())) {
      return Status::Config("the ticket is forged: no lease has slot " + std::to_string(seat.slot) +
                            ", or its nonces are not random");
    }
  }
  uint64_t blocks = 0, tokens = 0;
  for (const TicketGroup& group : ticket.groups) {
    blocks += group.num_blocks;
    tokens = std::max<uint64_t>(tokens, group.num_tokens);
  }
  const bool groups_fit =
      ticket.groups.empty() || (ticket.groups.size() >= 2 && ticket.groups.size() <= kMaxGroups &&
                                blocks == ticket.block_ids.size() && tokens <= ticket.num_tokens);
  if (!groups_fit) {
    return Status::Config("the groups do not add up to the blocks, or keep more tokens than there are");
  }
  if (ticket.ready_unit > ReadyUnit::kTokens)
    return Status::Config("it counts what is ready in an unknown unit");
  if (ticket.digests.empty()) return {};
  const size_t number = ticket.digest_bytes == 0 ? 0 : ticket.digests.size() / ticket.digest_bytes;
  const bool digests_fit = ticket.digest_bytes >= kLeastDigestBytes &&
                           ticket.digest_bytes <= kMostDigestBytes &&
                           ticket.digests.size() == number * ticket.digest_bytes &&
                           ticket.digests.size() <= kMaxDigestBytes && ticket.num_tokens % number == 0;
  return digests_fit ? Status{} : Status::Config("the digests exceed a bound");
}

/// The header without what may be missing, and all that follows the header.
struct Parts {
  std::string header, rest;
};

Parts parts_of(const Ticket& ticket) {
  Out header, rest;
  header.add(ticket.epoch).add(ticket.num_tokens).add(static_cast<uint32_t>(ticket.block_ids.size()));
  header.add(ticket.ready).add(ticket.ready_unit).add(static_cast<uint8_t>(ticket.seats.size()));
  header.add(ticket.rank).add(ticket.num_ranks);
  for (const std::string* name : {&ticket.request_id, &ticket.worker_id, &ticket.agent}) {
    header.add(static_cast<uint16_t>(name->size()));
  }
  header.add(ticket.ttl_ms).add(static_cast<uint16_t>(std::max<size_t>(ticket.groups.size(), 1)));
  rest.blob_.reserve(kSeatBytes * ticket.seats.size() + 3 * kMaxNameBytes + 4 * ticket.block_ids.size() +
                     kGroupBytes * ticket.groups.size() + ticket.digests.size());
  for (const LeaseSeat& seat : ticket.seats) rest.add(seat.slot).add(seat.nonce).add(seat.settle_nonce);
  rest.text(ticket.request_id).text(ticket.worker_id).text(ticket.agent);
  rest.text({reinterpret_cast<const char*>(ticket.block_ids.data()), 4 * ticket.block_ids.size()});
  for (const TicketGroup& group : ticket.groups) rest.add(group.num_blocks).add(group.num_tokens);
  rest.text(ticket.digests);
  return {std::move(header.blob_), std::move(rest.blob_)};
}

std::string digest_header(const Ticket& ticket) {
  if (ticket.digests.empty()) return {};
  const auto number = static_cast<uint32_t>(ticket.digests.size() / ticket.digest_bytes);
  return Out().add(number).add(ticket.digest_bytes).blob_;
}

std::string signed_bytes(const Ticket& ticket) {
  const Parts parts = parts_of(ticket);
  Out message;
  message.text(kMagic).text(parts.header).text(parts.rest).text(digest_header(ticket));
  if (ticket.model != 0) message.text("model").add(ticket.model);
  return std::move(message.blob_);
}

std::string signature_of(const std::string& message, std::string_view key) {
  const Sha256 whole = hmac_sha256(key, message);
  return {reinterpret_cast<const char*>(whole.data()), kSignatureBytes};
}

bool is_zero(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; });
}

/// Reads the part of the header that may be missing. Returns the bytes of the digests, or kConfig.
Result<size_t> read_extension(std::string_view header, Ticket& ticket) {
  const auto part = [header](size_t begin, size_t end) {
    return header.size() >= end ? header.substr(begin, end - begin) : std::string_view();
  };
  ticket.signature = part(kHeaderBytes, kSignedBytes);
  if (is_zero(ticket.signature)) ticket.signature.clear();
  ticket.trace = part(kSignedBytes, kTracedBytes);
  const std::string_view trace = ticket.trace;  // of a trace without an id there is nothing to show
  if (trace.empty() || is_zero(trace.substr(0, 16)) || is_zero(trace.substr(16, 8))) ticket.trace.clear();
  uint32_t number = 0;
  ticket.digest_bytes = 0;
  ticket.model = 0;
  In(part(kTracedBytes, kDigestedBytes)).take(number, ticket.digest_bytes);
  if (number > 0 && ticket.digest_bytes == 0) return Status::Config("the digests exceed a bound");
  In(part(kDigestedBytes, kDigestedBytes + sizeof ticket.model)).take(ticket.model);
  return size_t{number} * ticket.digest_bytes;
}

Status read_body(std::string_view body, size_t header_bytes, Ticket& ticket) {
  if (body.size() < kHeaderBytes) return Status::Config("header too short");
  Header header{};
  std::memcpy(&header, body.data(), kHeaderBytes);
  const size_t longest = *std::max_element(std::begin(header.name_bytes), std::end(header.name_bytes));
  if (longest > kMaxNameBytes || header.num_groups < 1 || header.num_groups > kMaxGroups ||
      header.num_blocks > kMaxTicketBlocks || header.num_seats == 0) {
    return Status::Config("a count exceeds its bound");
  }
  if (header_bytes > body.size()) return Status::Config("the length differs from the header");
  const Result<size_t> digest_bytes = read_extension(body.substr(0, header_bytes), ticket);
  if (!digest_bytes.ok()) return digest_bytes.status();
  const size_t listed = header.num_groups > 1 ? header.num_groups : 0;
  const size_t rest_bytes = header.num_seats * kSeatBytes + header.name_bytes[0] + header.name_bytes[1] +
                            header.name_bytes[2] + 4 * size_t{header.num_blocks} + kGroupBytes * listed +
                            *digest_bytes;
  In rest(body.substr(header_bytes));
  if (rest.rest().size() != rest_bytes) return Status::Config("the length differs from the header");
  ticket.epoch = header.epoch, ticket.num_tokens = header.num_tokens, ticket.ready = header.ready;
  ticket.ready_unit = static_cast<ReadyUnit>(header.unit), ticket.rank = header.rank;
  ticket.num_ranks = header.num_ranks, ticket.ttl_ms = header.ttl_ms;
  ticket.seats.resize(header.num_seats);
  for (LeaseSeat& seat : ticket.seats) rest.take(seat.slot, seat.nonce, seat.settle_nonce);
  std::string* const names[] = {&ticket.request_id, &ticket.worker_id, &ticket.agent};
  std::string_view taken;
  for (size_t index = 0; index < std::size(names); ++index) {
    rest.text(header.name_bytes[index], taken);
    *names[index] = taken;
  }
  ticket.block_ids.resize(header.num_blocks);
  rest.text(4 * ticket.block_ids.size(), taken);
  if (!taken.empty()) std::memcpy(ticket.block_ids.data(), taken.data(), taken.size());
  ticket.groups.resize(listed);
  for (TicketGroup& group : ticket.groups) rest.take(group.num_blocks, group.num_tokens);
  ticket.digests = rest.rest();
  if (ticket.digests.empty()) ticket.digest_bytes = 0;
  return check_fields(ticket);
}

}  // namespace

Result<std::string> write_ticket(const Ticket& ticket) {
  if (Status status = check_fields(ticket); !status.ok()) return status;
  if (!ticket.signature.empty() && ticket.signature.size() != kSignatureBytes) {
    return Status::Config("a signature has 16 bytes");
  }
  const Parts parts = parts_of(ticket);
  Out header;
  header.text(parts.header).text(ticket.signature);
  if (!ticket.trace.empty()) header.pad_to(kSignedBytes).text(ticket.trace);
  if (!ticket.digests.empty()) header.pad_to(kTracedBytes).text(digest_header(ticket));
  if (ticket.model != 0) header.pad_to(kDigestedBytes).add(ticket.model);
  const auto header_bytes = static_cast<uint16_t>(header.blob_.size());
  const uint32_t checksum = crc32(parts.rest, crc32(header.blob_));
  Out whole;
  whole.blob_.reserve(kPrefixBytes + header_bytes + parts.rest.size());
  whole.text(kMagic).add(header_bytes).add(static_cast<uint16_t>(kProtocolVersion)).add(checksum);
  whole.text(header.blob_).text(parts.rest);
  return std::move(whole.blob_);
}

Result<Ticket> read_ticket(std::string_view blob) {
  Ticket ticket;
  if (Status status = read_ticket_into(blob, ticket); !status.ok()) return status;
  return ticket;
}

Status read_ticket_into(std::string_view blob, Ticket& into) {
  if (blob.size() > kMaxTicketBytes) return refused("too long");
  In prefix(blob);
  std::string_view magic;
  uint16_t header_bytes, version;
  uint32_t checksum;
  if (!prefix.text(kMagic.size(), magic) || !prefix.take(header_bytes, version, checksum))
    return refused("too short");
  if (magic != kMagic) return refused("wrong magic");
  if (version != kProtocolVersion) {
    return refused("protocol version " + std::to_string(version) + ", this process speaks " +
                   std::to_string(kProtocolVersion));
  }
  if (crc32(prefix.rest()) != checksum) return refused("checksum differs");
  if (header_bytes < kHeaderBytes) return refused("header too short");
  const Status status = read_body(prefix.rest(), header_bytes, into);
  return status.ok() ? Status{} : refused(status.what());
}

void sign_ticket(Ticket& ticket, std::string_view key) {
  ticket.signature = signature_of(signed_bytes(ticket), key);
}

Status check_signature(const Ticket& ticket, std::span<const std::string> keys) {
  const std::string message = signed_bytes(ticket);
  const bool made = std::any_of(keys.begin(), keys.end(), [&](const std::string& key) {
    return same_secret(ticket.signature, signature_of(message, key));
  });
  if (made) return {};
  return Status::AccessDenied("request " + ticket.request_id +
                              ": the ticket is not signed by any of the keys here. It was changed, or comes "
                              "from another tenant, or from a worker with other keys");
}

}  // namespace kvlink

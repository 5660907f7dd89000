// SPDX-License-Identifier: Apache-2.0
#include "codec/card.h"

#include <algorithm>

#include "codec/digest.h"
#include "codec/proto.h"

namespace kvlink {
namespace {

Status too_many(const char* what, size_t most) {
  return Status::Config("the number of " + std::string(what) + " exceeds " + std::to_string(most) +
                        ", the maximum that is accepted");
}

Status append_bytes(const ProtoReader& from, std::vector<std::string>& into, size_t most, size_t& left,
                    const char* what) {
  std::string_view bytes;
  if (!from.get(bytes)) return {};
  if (into.size() >= most || left == 0) return too_many(what, most);
  if (bytes.size() > kMaxOpaqueBytes) return Status::Config("a key has more than 65536 bytes");
  --left;
  into.emplace_back(bytes);
  return {};
}

/// Takes a text that people see: terminals would obey control characters.
Status take_text(const ProtoReader& from, std::string& into, size_t most_bytes, const char* what) {
  std::string_view text;
  if (!from.get(text)) return {};
  if (text.size() > most_bytes) {
    return Status::Config(std::string(what) + " has more than " + std::to_string(most_bytes) + " bytes");
  }
  const bool prints = std::none_of(text.begin(), text.end(), [](char each) {
    return (static_cast<unsigned char>(each) < 0x20 && each != '\n') || each == 0x7F;
  });
  if (!is_utf8(text) || !prints) {
    return Status::Config(std::string(what) + " has characters that cannot be printed");
  }
  into = text;
  return {};
}

/// Reads a card, and counts what its parts have in all.
class CardReader {
 public:
  Status card(const ProtoReader& from, WorkerCard& into);

 private:
  static Status host(const ProtoReader& from, CardHost& into);
  static Status channel(const ProtoReader& from, CardChannel& into);
  Status layout(const ProtoReader& from, CardLayout& into);
  static Status plane(const ProtoReader& from, Plane& into);
  static Status pipeline(const ProtoReader& from, CardPipeline& into);
  static Status context(const ProtoReader& from, CardLayout& into);
  Status transport(const ProtoReader& from, CardTransport& into);

  size_t planes_left_ = kMaxPlanes, pool_keys_left_ = kMaxPoolKeys;
};

/// Reads the message at `from`, if it is one, with `take`.
template <typename Take>
Status nested(const ProtoReader& from, Take take) {
  std::string_view message;
  return from.get(message) ? read_fields(message, take) : Status{};
}

template <typename T>
Status numbers(const ProtoReader& from, std::vector<T>& into, size_t most, const char* what) {
  return from.append(into, most) ? Status{} : too_many(what, most);
}

Status CardReader::card(const ProtoReader& from, WorkerCard& into) {
  std::string_view entry;
  switch (from.field()) {
    case 1:
      return take_text(from, into.worker_id, kMaxNameBytes, "worker_id");
    case 2:
      from.get(into.epoch);
      break;
    case 3:
      if (from.get(entry) && entry.size() != kIncarnationBytes)
        return Status::Config("the incarnation has not 16 bytes");
      from.get(into.incarnation);
      break;
    case 4:
      return take_text(from, into.agent, kMaxNameBytes, "agent");
    case 5:
      return nested(from, [&](const ProtoReader& at) { return host(at, into.host); });
    case 6:
      if (!from.get(entry)) break;
      if (into.layouts.size() >= kMaxGroups) return too_many("layouts", kMaxGroups);
      into.layouts.emplace_back().memory.tokens = {0, 0, 0};
      return nested(from, [&](const ProtoReader& at) { return layout(at, into.layouts.back()); });
    case 7:
      return numbers(from, into.region_bytes, kMaxRegions, "regions");
    case 8:
      if (!from.get(entry)) break;
      if (into.transports.size() >= kMaxTransports) return too_many("transports", kMaxTransports);
      into.transports.emplace_back();
      return nested(from, [&](const ProtoReader& at) { return transport(at, into.transports.back()); });
    case 9:
      from.get(into.protocol_version);
      break;
    case 10:
      from.get(into.draining);
      break;
    case 11:
      if (!from.get(entry)) break;
      if (!into.channel) into.channel.emplace();
      return nested(from, [&](const ProtoReader& at) { return channel(at, *into.channel); });
    default:
      break;
  }
  return {};
}

Status CardReader::channel(const ProtoReader& from, CardChannel& into) {
  std::string_view bytes;
  switch (from.field()) {
    case 1:
      if (!from.get(bytes)) break;
      if (into.addresses.size() >= kMaxChannelAddresses) {
        return too_many("addresses of the native channel", kMaxChannelAddresses);
      }
      return take_text(from, into.addresses.emplace_back(), kMaxNameBytes,
                       "an address of the native channel");
    case 2:
    case 3: {
      const bool is_secret = from.field() == 3;
      if (!from.get(bytes)) break;
      if (bytes.size() != (is_secret ? kChannelSecretBytes : kChannelInstanceBytes)) {
        return Status::Config(
            "the native channel has an instance or a secret of another size than 16 and 32 bytes");
      }
      (is_secret ? into.secret : into.instance) = bytes;
      break;
    }
    case 4:
      from.get(into.flags);
      break;
    default:
      break;
  }
  return {};
}

Status CardReader::host(const ProtoReader& from, CardHost& into) {
  switch (from.field()) {
    case 1:
      return take_text(from, into.boot_id, kMaxNameBytes, "boot_id");
    case 2:
      from.get(into.pid_namespace);
      break;
    case 3:
      from.get(into.net_namespace);
      break;
    case 4:
      from.get(into.pid);
      break;
    case 5:
      from.get(into.uid);
      break;
    default:
      break;
  }
  return {};
}

Status CardReader::layout(const ProtoReader& from, CardLayout& into) {
  Layout& memory = into.memory;
  uint32_t* const small[] = {&memory.block_tokens, &into.total_heads, &memory.first_head, &memory.num_heads,
                             &memory.row_bytes};
  uint64_t* const strides[] = {&memory.block_stride, &memory.token_stride, &memory.head_stride};
  std::string_view entry;
  switch (const uint32_t field = from.field()) {
    case 1:
      return take_text(from, into.model, kMaxOpaqueBytes, "model");
    case 2:
      return take_text(from, into.dtype, kMaxOpaqueBytes, "dtype");
    case 3:
    case 4:
    case 5:
    case 6:
    case 7:
      from.get(*small[field - 3]);
      break;
    case 8:
    case 9:
    case 10:
      from.get(*strides[field - 8]);
      break;
    case 11:
      from.get(memory.num_blocks);
      break;
    case 12:
      if (!from.get(entry)) break;
      if (planes_left_ == 0) return too_many("planes", kMaxPlanes);
      --planes_left_;
      memory.planes.emplace_back();
      return nested(from, [&](const ProtoReader& at) { return plane(at, memory.planes.back()); });
    case 13:
      from.get(into.tp_rank);
      break;
    case 14:
      from.get(into.tp_size);
      break;
    case 15:
      from.get(into.is_state);
      break;
    case 16:
      return nested(from, [&](const ProtoReader& at) { return pipeline(at, into.pipeline); });
    case 17:
      return nested(from, [&](const ProtoReader& at) { return context(at, into); });
    default:
      break;
  }
  return {};
}

Status CardReader::plane(const ProtoReader& from, Plane& into) {
  if (from.field() == 1) from.get(into.region);
  if (from.field() == 2) from.get(into.layer);
  if (from.field() == 3) from.get(into.offset);
  return {};
}

Status CardReader::pipeline(const ProtoReader& from, CardPipeline& into) {
  if (from.field() == 1) from.get(into.rank);
  return from.field() == 2 ? numbers(from, into.bounds, kMaxPlanes, "bounds of stages") : Status{};
}

Status CardReader::context(const ProtoReader& from, CardLayout& into) {
  if (from.field() == 1) from.get(into.memory.tokens.rank);
  if (from.field() == 2) from.get(into.memory.tokens.size);
  if (from.field() == 3) from.get(into.memory.tokens.interleave);
  if (from.field() == 4) from.get(into.context_tp_ranks);
  return {};
}

Status CardReader::transport(const ProtoReader& from, CardTransport& into) {
  std::string_view entry;
  size_t lease_keys_left = kMaxLeaseKeys;
  switch (from.field()) {
    case 1:
      return take_text(from, into.name, kMaxOpaqueBytes, "a transport's name");
    case 2:
      if (from.get(entry) && entry.size() > kMaxOpaqueBytes)
        return Status::Config("an address has more than 65536 bytes");
      from.get(into.address);
      break;
    case 3:
      return append_bytes(from, into.pool_keys, kMaxPoolKeys, pool_keys_left_, "pool keys");
    case 4:
      return append_bytes(from, into.lease_keys, kMaxLeaseKeys, lease_keys_left, "lease keys");
    case 5:
      return take_text(from, into.refused, kMaxOpaqueBytes, "why a transport is refused");
    case 6:
      from.get(into.bounces);
      break;
    default:
      break;
  }
  return {};
}

std::string write(const CardHost& host) {
  return ProtoWriter()
      .bytes(1, host.boot_id)
      .number(2, host.pid_namespace)
      .number(3, host.net_namespace)
      .number(4, host.pid)
      .number(5, host.uid)
      .take();
}

std::string write(const CardLayout& layout) {
  const Layout& memory = layout.memory;
  ProtoWriter to;
  to.bytes(1, layout.model).bytes(2, layout.dtype);
  to.number(3, memory.block_tokens).number(4, layout.total_heads).number(5, memory.first_head);
  to.number(6, memory.num_heads).number(7, memory.row_bytes).number(8, memory.block_stride);
  to.number(9, memory.token_stride).number(10, memory.head_stride).number(11, memory.num_blocks);
  for (const Plane& plane : memory.planes) {
    to.entry(12, ProtoWriter().number(1, plane.region).number(2, plane.layer).number(3, plane.offset).take());
  }
  to.number(13, layout.tp_rank).number(14, layout.tp_size).number(15, layout.is_state);
  to.entry(16, ProtoWriter().number(1, layout.pipeline.rank).packed(2, layout.pipeline.bounds).take());
  to.entry(17, ProtoWriter()
                   .number(1, memory.tokens.rank)
                   .number(2, memory.tokens.size)
                   .number(3, memory.tokens.interleave)
                   .number(4, layout.context_tp_ranks)
                   .take());
  return to.take();
}

std::string write(const CardTransport& transport) {
  ProtoWriter to;
  to.bytes(1, transport.name).bytes(2, transport.address);
  for (const std::string& key : transport.pool_keys) to.entry(3, key);
  for (const std::string& key : transport.lease_keys) to.entry(4, key);
  return to.bytes(5, transport.refused).number(6, transport.bounces).take();
}

std::string write(const CardChannel& channel) {
  ProtoWriter to;
  for (const std::string& address : channel.addresses) to.entry(1, address);
  return to.bytes(2, channel.instance).bytes(3, channel.secret).number(4, channel.flags).take();
}

Status malformed(const Status& why) { return Status::Config("malformed card: " + why.what()); }

}  // namespace

Status check_name(std::string_view name, const char* what) {
  if (name.empty() || name.size() > kMaxNameBytes) {
    return Status::Config(std::string(what) + " has " + std::to_string(name.size()) +
                          " bytes; it must have 1 to " + std::to_string(kMaxNameBytes) + " bytes");
  }
  return is_utf8(name) ? Status{} : Status::Config(std::string(what) + " is not UTF-8");
}

std::string write_card(const WorkerCard& card) {
  ProtoWriter to;
  to.bytes(1, card.worker_id).number(2, card.epoch).bytes(3, card.incarnation).bytes(4, card.agent);
  to.entry(5, write(card.host));
  for (const CardLayout& layout : card.layouts) to.entry(6, write(layout));
  to.packed(7, card.region_bytes);
  for (const CardTransport& transport : card.transports) to.entry(8, write(transport));
  to.number(9, card.protocol_version).number(10, card.draining);
  if (card.channel) to.entry(11, write(*card.channel));
  return to.take();
}

Result<WorkerCard> read_card(std::string_view blob) {
  if (blob.size() > kMaxCardBytes) return malformed(Status::Config("it has more than 4194304 bytes"));
  WorkerCard card;
  CardReader reader;
  const Status status = read_fields(blob, [&](const ProtoReader& at) { return reader.card(at, card); });
  if (!status.ok()) return malformed(status);
  return card;
}

std::string seal_card(const WorkerCard& card) {
  const std::string blob = write_card(card);
  return ProtoWriter().bytes(1, blob).fixed32(2, crc32(blob)).take();
}

Result<WorkerCard> unseal_card(std::string_view sealed) {
  std::string_view blob;
  uint32_t checksum = 0;
  const Status status = read_fields(sealed, [&](const ProtoReader& at) {
    if (at.field() == 1) at.get(blob);
    if (at.field() == 2) at.get_fixed32(checksum);
    return Status{};
  });
  if (!status.ok()) return malformed(status);
  if (crc32(blob) != checksum) return malformed(Status::Config("the checksum of the card does not match"));
  Result<WorkerCard> card = read_card(blob);
  if (!card.ok()) return card;
  if (card->protocol_version != kProtocolVersion) {
    return Status::Config("worker " + card->worker_id + " speaks protocol version " +
                          std::to_string(card->protocol_version) + " and this process speaks " +
                          std::to_string(kProtocolVersion) +
                          "; run releases of kvlink that have the same protocol version");
  }
  if (Status named = check_name(card->worker_id, "worker_id"); !named.ok()) return malformed(named);
  if (card->layouts.empty()) return malformed(Status::Config("it has no layout"));
  return card;
}

}  // namespace kvlink

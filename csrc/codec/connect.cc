// SPDX-License-Identifier: Apache-2.0
#include "codec/connect.h"

#include "codec/card.h"
#include "codec/proto.h"

namespace kvlink {
namespace {

constexpr size_t kMaxConnectBytes = 8 << 20;  // what a server of gRPC accepts
constexpr uint64_t kMaxConnectionId = (uint64_t{1} << 31) - 1;

Status malformed(const char* message, const std::string& why) {
  return Status::Config(std::string("malformed ") + message + ": " + why);
}

Status append(const ProtoReader& from, std::vector<std::string>& into, size_t most, const char* what) {
  std::string_view bytes;
  if (!from.get(bytes)) return {};
  if (into.size() >= most || bytes.size() > kMaxOpaqueBytes) {
    return Status::Config("there are more than " + std::to_string(most) + " " + what +
                          ", or one has more than 65536 bytes");
  }
  into.emplace_back(bytes);
  return {};
}

Status read_name(const ProtoReader& from, std::string& into, const char* what) {
  std::string_view name;
  if (!from.get(name)) return {};
  into = name.substr(0, kMaxNameBytes + 1);
  return check_name(name, what);
}

Status read_refusal(std::string_view blob, Status& into) {
  uint32_t code = 0;
  std::string_view what, fix;
  Status status = read_fields(blob, [&](const ProtoReader& at) {
    if (at.field() == 1) at.get(code);
    if (at.field() == 2) at.get(what);
    if (at.field() == 3) at.get(fix);
    return Status{};
  });
  if (!status.ok()) return status;
  if (what.size() > kMaxOpaqueBytes || fix.size() > kMaxOpaqueBytes || !is_utf8(what) || !is_utf8(fix)) {
    return Status::Config("a sentence of the refusal is no text of at most 65536 bytes");
  }
  const bool known = code > 0 && code <= static_cast<uint32_t>(Code::kStaleBlocks);
  into = {known ? static_cast<Code>(code) : Code::kPeerUnreachable, std::string(what), std::string(fix)};
  return {};
}

}  // namespace

std::string write_connect_request(const ConnectRequest& request) {
  ProtoWriter to;
  to.bytes(1, request.worker_id).number(2, request.epoch).bytes(3, request.transport);
  for (const std::string& hello : request.hellos) to.entry(4, hello);
  return to.number(5, kProtocolVersion).number(6, request.takes_keys).take();
}

Result<ConnectRequest> read_connect_request(std::string_view blob) {
  if (blob.size() > kMaxConnectBytes) return malformed("ConnectRequest", "too long");
  ConnectRequest request;
  request.takes_keys = false;
  uint32_t version = 0;
  Status status = read_fields(blob, [&](const ProtoReader& at) -> Status {
    switch (at.field()) {
      case 1:
        return read_name(at, request.worker_id, "worker_id");
      case 2:
        at.get(request.epoch);
        return {};
      case 3:
        return read_name(at, request.transport, "transport");
      case 4:
        return append(at, request.hellos, kMaxHellos, "hellos");
      case 5:
        at.get(version);
        return {};
      case 6:
        at.get(request.takes_keys);
        return {};
      default:
        return {};
    }
  });
  if (status.ok()) status = check_name(request.worker_id, "worker_id");
  if (status.ok()) status = check_name(request.transport, "transport");
  if (status.ok() && request.hellos.empty()) status = Status::Config("there is no hello");
  if (status.ok() && version != kProtocolVersion) {
    status = Status::Config("the reader speaks protocol version " + std::to_string(version) +
                            " and this process speaks " + std::to_string(kProtocolVersion) +
                            "; run releases of kvlink that have the same protocol version");
  }
  if (!status.ok()) return malformed("ConnectRequest", status.what());
  return request;
}

std::string write_connect_reply(const ConnectReply& reply) {
  ProtoWriter to;
  to.number(1, reply.connection_id);
  for (const std::string& each : reply.replies) to.entry(2, each);
  for (const std::string& key : reply.pool_keys) to.entry(3, key);
  for (const std::string& key : reply.lease_keys) to.entry(4, key);
  if (!reply.refusal.ok()) {
    to.entry(5, ProtoWriter()
                    .number(1, static_cast<uint64_t>(reply.refusal.code()))
                    .bytes(2, reply.refusal.what())
                    .bytes(3, reply.refusal.fix())
                    .take());
  }
  return to.take();
}

Result<ConnectReply> read_connect_reply(std::string_view blob) {
  if (blob.size() > kMaxConnectBytes) return malformed("ConnectReply", "too long");
  ConnectReply reply;
  Status status = read_fields(blob, [&](const ProtoReader& at) -> Status {
    std::string_view refusal;
    switch (at.field()) {
      case 1:
        at.get(reply.connection_id);
        return {};
      case 2:
        return append(at, reply.replies, kMaxHellos, "replies");
      case 3:
        return append(at, reply.pool_keys, kMaxRegions, "pool keys");
      case 4:
        return append(at, reply.lease_keys, kMaxLeaseKeys, "lease keys");
      case 5:
        return at.get(refusal) ? read_refusal(refusal, reply.refusal) : Status{};
      default:
        return {};
    }
  });
  if (status.ok() && reply.connection_id > kMaxConnectionId)
    status = Status::Config("its connection_id is out of range");
  if (status.ok() && reply.replies.empty() == reply.refusal.ok()) {
    status = Status::Config("it has neither replies nor a refusal, or both");
  }
  if (!status.ok()) return malformed("ConnectReply", status.what());
  return reply;
}

}  // namespace kvlink

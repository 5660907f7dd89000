// SPDX-License-Identifier: Apache-2.0
#include "transports/fabric/protocol.h"

#include "base/blob.h"

namespace kvlink::fabric {
namespace {

constexpr uint32_t kAddressMagic = 0x3161'666b;  // "kfa1"
constexpr uint32_t kReplyMagic = 0x3172'666b;    // "kfr1"
constexpr uint32_t kKeyMagic = 0x316b'666b;      // "kfk1"
constexpr size_t kMaxNameBytes = 64, kMaxEndpointBytes = 256, kMaxTcpBytes = 256;

void write(BlobWriter& to, const RemoteRegion& region) {
  to.u32(static_cast<uint32_t>(region.access)).u64(region.bytes).u64(region.base).u64(region.key);
}

bool read(BlobReader& from, RemoteRegion& region) {
  uint32_t access = 0;
  from.fields(access, region.bytes, region.base, region.key);
  region.access = static_cast<Access>(access);
  return from.ok() && access <= kLastAccess && region.bytes > 0 && region.base <= UINT64_MAX - region.bytes;
}

}  // namespace

std::string Address::format() const {
  return BlobWriter().u32(kAddressMagic).bytes(provider).bytes(endpoint).bytes(liveness).take();
}

std::optional<Address> Address::parse(std::string_view blob) {
  BlobReader from(blob, kAddressMagic);
  Address address;
  address.provider = from.bytes(kMaxNameBytes);
  address.endpoint = from.bytes(kMaxEndpointBytes);
  address.liveness = from.bytes(kMaxTcpBytes);
  if (!from.done() || address.provider.empty() || !is_printable(address.provider) || address.endpoint.empty())
    return {};
  return address;
}

std::string Reply::format() const {
  BlobWriter to;
  to.u32(kReplyMagic).u64(nonce).bytes(invitation);
  write(to, proof);
  return to.take();
}

std::optional<Reply> Reply::parse(std::string_view blob) {
  BlobReader from(blob, kReplyMagic);
  Reply reply;
  reply.nonce = from.u64();
  reply.invitation = from.bytes(kMaxTcpBytes);
  if (!read(from, reply.proof) || !from.done() || reply.proof.bytes != sizeof reply.nonce) return {};
  return reply;
}

std::string format_key(const RemoteRegion& region) {
  BlobWriter to;
  to.u32(kKeyMagic);
  write(to, region);
  return to.take();
}

std::optional<RemoteRegion> parse_key(std::string_view blob) {
  BlobReader from(blob, kKeyMagic);
  RemoteRegion region;
  if (!read(from, region) || !from.done()) return {};
  return region;
}

}  // namespace kvlink::fabric

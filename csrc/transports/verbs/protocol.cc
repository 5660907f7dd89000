// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/protocol.h"

#include "base/blob.h"

namespace kvlink::verbs {
namespace {

constexpr uint32_t kAddressMagic = 0x3261'766b;  // "kva2"
constexpr uint32_t kHelloMagic = 0x3268'766b;    // "kvh2"
constexpr uint32_t kReplyMagic = 0x3272'766b;    // "kvr2"
constexpr uint32_t kCmReplyMagic = 0x3163'766b;  // "kvc1"
constexpr uint32_t kKeyMagic = 0x316b'766b;      // "kvk1"
constexpr size_t kMaxNameBytes = 64;
constexpr uint32_t k24Bits = 0xff'ffff;
constexpr uint32_t kMaxMtu = 5;               // IBV_MTU_4096
constexpr uint32_t kEthernet = 1, kByCm = 2;  // flags of a NicAddress

void write(BlobWriter& to, const QpAddress& qp) {
  to.u32(qp.qpn).u32(qp.psn).u32(qp.lid).u32(qp.mtu).u32(qp.reads_out).u32(qp.reads_in).bytes(qp.gid);
  to.u32(qp.ece.vendor).u32(qp.ece.options).u32(qp.ece.mask);
}

bool read(BlobReader& from, QpAddress& qp) {
  from.fields(qp.qpn, qp.psn, qp.lid, qp.mtu, qp.reads_out, qp.reads_in, qp.gid);
  from.fields(qp.ece.vendor, qp.ece.options, qp.ece.mask);
  return from.ok() && qp.qpn <= k24Bits && qp.psn <= k24Bits && qp.lid <= UINT16_MAX && qp.mtu >= 1 &&
         qp.mtu <= kMaxMtu && qp.reads_out <= UINT8_MAX && qp.reads_in <= UINT8_MAX;
}

}  // namespace

std::string Address::format() const {
  BlobWriter to;
  to.u32(kAddressMagic).u32(static_cast<uint32_t>(nics.size()));
  for (const NicAddress& nic : nics) {
    to.bytes(nic.name)
        .u32((nic.ethernet ? kEthernet : 0) | (nic.by_cm ? kByCm : 0))
        .u32(nic.lid)
        .u32(nic.mbps)
        .bytes(nic.gid);
  }
  return to.take();
}

std::optional<Address> Address::parse(std::string_view blob) {
  BlobReader from(blob, kAddressMagic);
  const uint32_t count = from.u32();
  if (count == 0 || count > kMaxNics) return {};
  Address address;
  for (uint32_t i = 0; i < count; ++i) {
    NicAddress nic;
    nic.name = from.bytes(kMaxNameBytes);
    const uint32_t flags = from.u32();
    nic.ethernet = flags & kEthernet;
    nic.by_cm = flags & kByCm;
    from.fields(nic.lid, nic.mbps, nic.gid);
    if (!from.ok() || flags > (kEthernet | kByCm) || nic.lid > UINT16_MAX || nic.mbps == 0 ||
        !is_printable(nic.name))
      return {};
    address.nics.push_back(std::move(nic));
  }
  return from.done() ? std::optional(std::move(address)) : std::nullopt;
}

std::string Hello::format() const {
  BlobWriter to;
  to.u32(kHelloMagic).u32(owner_nic);
  write(to, reader);
  return to.take();
}

std::optional<Hello> Hello::parse(std::string_view blob) {
  BlobReader from(blob, kHelloMagic);
  Hello hello;
  hello.owner_nic = from.u32();
  if (!read(from, hello.reader) || hello.owner_nic >= kMaxNics || !from.done()) return {};
  return hello;
}

std::string Reply::format() const {
  BlobWriter to;
  to.u32(kReplyMagic);
  write(to, owner);
  return to.take();
}

std::optional<Reply> Reply::parse(std::string_view blob) {
  BlobReader from(blob, kReplyMagic);
  Reply reply;
  if (!read(from, reply.owner) || !from.done()) return {};
  return reply;
}

std::string CmReply::format() const {
  return BlobWriter().u32(kCmReplyMagic).bytes(ip).u32(port).bytes(secret).take();
}

std::optional<CmReply> CmReply::parse(std::string_view blob) {
  CmReply reply;
  const bool whole = BlobReader(blob, kCmReplyMagic).fields(reply.ip, reply.port, reply.secret).done();
  if (!whole || reply.port == 0 || reply.port > UINT16_MAX) return {};
  return reply;
}

std::string RemoteKey::format() const {
  BlobWriter to;
  to.u32(kKeyMagic).u32(static_cast<uint32_t>(access)).u64(base).u64(bytes).u64(slice_bytes);
  to.u32(static_cast<uint32_t>(rkeys.size()));
  for (const auto& of_nic : rkeys) {
    for (const uint32_t rkey : of_nic) to.u32(rkey);
  }
  return to.take();
}

std::optional<RemoteKey> RemoteKey::parse(std::string_view blob) {
  BlobReader from(blob, kKeyMagic);
  RemoteKey key;
  uint32_t access = 0, num_nics = 0;
  from.fields(access, key.base, key.bytes, key.slice_bytes, num_nics);
  if (!from.ok() || access > kLastAccess || key.bytes == 0 || key.slice_bytes == 0 ||
      key.base > UINT64_MAX - key.bytes || num_nics == 0 || num_nics > kMaxNics) {
    return {};
  }
  key.access = static_cast<Access>(access);
  const uint64_t num_slices = (key.bytes - 1) / key.slice_bytes + 1;
  if (num_slices > kMaxSlices) return {};
  for (uint32_t nic = 0; nic < num_nics && from.ok(); ++nic) {
    auto& of_nic = key.rkeys.emplace_back();
    for (uint64_t slice = 0; slice < num_slices && from.ok(); ++slice) of_nic.push_back(from.u32());
  }
  return from.done() ? std::optional(std::move(key)) : std::nullopt;
}

}  // namespace kvlink::verbs

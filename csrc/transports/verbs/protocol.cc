// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/protocol.h"

#include <algorithm>
#include <cstring>

#include "base/blob.h"

namespace kvlink::verbs {
namespace {

constexpr uint32_t kAddressMagic = 0x3161'766b;  // "kva1"
constexpr uint32_t kHelloMagic = 0x3168'766b;    // "kvh1"
constexpr uint32_t kReplyMagic = 0x3172'766b;    // "kvr1"
constexpr uint32_t kCmReplyMagic = 0x3163'766b;  // "kvc1"
constexpr uint32_t kKeyMagic = 0x316b'766b;      // "kvk1"
constexpr size_t kMaxNameBytes = 64;
constexpr uint32_t k24Bits = 0xff'ffff;
constexpr uint32_t kMaxMtu = 5;               // IBV_MTU_4096
constexpr uint32_t kEthernet = 1, kByCm = 2;  // flags of a NicAddress

void write(BlobWriter& to, const Gid& gid) { to.bytes({gid.data(), gid.size()}); }

bool read(BlobReader& from, Gid& gid) {
  const std::string_view bytes = from.bytes(gid.size());
  if (bytes.size() != gid.size()) return false;
  std::memcpy(gid.data(), bytes.data(), gid.size());
  return true;
}

/// Names of the other side are shown to people.
bool printable(std::string_view name) {
  return std::all_of(name.begin(), name.end(), [](char byte) { return byte > ' ' && byte <= '~'; });
}

void write(BlobWriter& to, const QpAddress& qp) {
  to.u32(qp.qpn).u32(qp.psn).u32(qp.lid).u32(qp.mtu).u32(qp.reads_out).u32(qp.reads_in);
  write(to, qp.gid);
}

bool read(BlobReader& from, QpAddress& qp) {
  qp.qpn = from.u32();
  qp.psn = from.u32();
  qp.lid = from.u32();
  qp.mtu = from.u32();
  qp.reads_out = from.u32();
  qp.reads_in = from.u32();
  return read(from, qp.gid) && qp.qpn <= k24Bits && qp.psn <= k24Bits && qp.lid <= UINT16_MAX &&
         qp.mtu >= 1 && qp.mtu <= kMaxMtu && qp.reads_out <= UINT8_MAX && qp.reads_in <= UINT8_MAX;
}

}  // namespace

std::string Address::format() const {
  BlobWriter to;
  to.u32(kAddressMagic).u32(static_cast<uint32_t>(nics.size()));
  for (const NicAddress& nic : nics) {
    to.bytes(nic.name)
        .u32((nic.ethernet ? kEthernet : 0) | (nic.by_cm ? kByCm : 0))
        .u32(nic.lid)
        .u32(nic.mbps);
    write(to, nic.gid);
  }
  return to.take();
}

std::optional<Address> Address::parse(std::string_view blob) {
  BlobReader from(blob);
  if (from.u32() != kAddressMagic) return {};
  const uint32_t count = from.u32();
  if (count == 0 || count > kMaxNics) return {};
  Address address;
  for (uint32_t i = 0; i < count; ++i) {
    NicAddress nic;
    nic.name = from.bytes(kMaxNameBytes);
    const uint32_t flags = from.u32();
    nic.ethernet = flags & kEthernet;
    nic.by_cm = flags & kByCm;
    nic.lid = from.u32();
    nic.mbps = from.u32();
    if (!read(from, nic.gid) || flags > (kEthernet | kByCm) || nic.lid > UINT16_MAX || nic.mbps == 0 ||
        !printable(nic.name))
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
  BlobReader from(blob);
  Hello hello;
  if (from.u32() != kHelloMagic) return {};
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
  BlobReader from(blob);
  Reply reply;
  if (from.u32() != kReplyMagic || !read(from, reply.owner) || !from.done()) return {};
  return reply;
}

std::string CmReply::format() const {
  BlobWriter to;
  to.u32(kCmReplyMagic);
  write(to, ip);
  to.u32(port).bytes({secret.data(), secret.size()});
  return to.take();
}

std::optional<CmReply> CmReply::parse(std::string_view blob) {
  BlobReader from(blob);
  CmReply reply;
  if (from.u32() != kCmReplyMagic || !read(from, reply.ip)) return {};
  reply.port = from.u32();
  if (!read(from, reply.secret) || reply.port == 0 || reply.port > UINT16_MAX || !from.done()) return {};
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
  BlobReader from(blob);
  if (from.u32() != kKeyMagic) return {};
  const uint32_t access = from.u32();
  RemoteKey key;
  key.base = from.u64();
  key.bytes = from.u64();
  key.slice_bytes = from.u64();
  const uint32_t num_nics = from.u32();
  if (access > kLastAccess || key.bytes == 0 || key.slice_bytes == 0 || key.base > UINT64_MAX - key.bytes ||
      num_nics == 0 || num_nics > kMaxNics) {
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

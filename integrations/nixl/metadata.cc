// SPDX-License-Identifier: Apache-2.0
#include "metadata.h"

#include <algorithm>

#include "base/blob.h"

namespace kvlink::nixl {
namespace {

constexpr uint32_t kVersion = 1;
constexpr size_t kMaxTransports = 16, kMaxRegions = 65'536;
constexpr size_t kMaxNameBytes = 64, kMaxKeyBytes = 64 << 10, kMaxTextBytes = 4096;

void write_transport(BlobWriter& to, const TransportAccess& access) {
  to.bytes(access.name).bytes(access.address).u32(static_cast<uint32_t>(access.lease_keys.size()));
  for (const std::string& key : access.lease_keys) to.bytes(key);
  to.bytes(access.refused.substr(0, kMaxTextBytes)).u32(access.bounces);
}

TransportAccess read_transport(BlobReader& from) {
  TransportAccess access;
  access.name = from.bytes(kMaxNameBytes);
  access.address = from.bytes(kMaxKeyBytes);
  const uint32_t num_keys = from.u32();
  for (uint32_t key = 0; key < num_keys && key < 2 && from.ok(); ++key)
    access.lease_keys.emplace_back(from.bytes(kMaxKeyBytes));
  access.refused = from.bytes(kMaxTextBytes);
  access.bounces = from.u32() != 0;
  return access;
}

void write_late(BlobWriter& to, const LateRegion& region) {
  to.u32(region.number).u64(region.bytes);
  for (const std::string& key : region.keys) to.bytes(key);
  for (const std::string& why : region.refused) to.bytes(why.substr(0, kMaxTextBytes));
}

LateRegion read_late(BlobReader& from, size_t num_transports) {
  LateRegion region{from.u32(), from.u64(), {}, {}};
  for (size_t index = 0; index < num_transports && from.ok(); ++index)
    region.keys.emplace_back(from.bytes(kMaxKeyBytes));
  for (size_t index = 0; index < num_transports && from.ok(); ++index)
    region.refused.emplace_back(from.bytes(kMaxTextBytes));
  return region;
}

bool read_pool(BlobReader& from, PoolCard& pool) {
  from.fields(pool.pool, pool.epoch, pool.seat.slot, pool.seat.nonce);
  pool.seat.settle_nonce = kSharedSeat;
  const uint32_t num_transports = from.u32();
  if (num_transports > kMaxTransports || pool.pool >= kMaxPools) return false;
  while (pool.transports.size() < num_transports && from.ok())
    pool.transports.push_back(read_transport(from));
  const uint32_t num_regions = from.u32();
  if (num_regions > kMaxRegions) return false;
  while (pool.regions.size() < num_regions && from.ok())
    pool.regions.push_back(read_late(from, num_transports));
  return from.ok();
}

}  // namespace

std::string write_info(const channel::ChannelAddress& address) {
  BlobWriter to;
  to.u32(kInfoMagic).u32(kVersion).u32(address.flags);
  to.bytes(address.credentials.instance).bytes(address.credentials.secret);
  to.u32(static_cast<uint32_t>(address.addresses.size()));
  for (const std::string& each : address.addresses) to.bytes(each);
  return to.take();
}

std::optional<channel::ChannelAddress> read_info(std::string_view info) {
  BlobReader from(info, kInfoMagic);
  channel::ChannelAddress address;
  if (from.u32() != kVersion) return {};
  address.flags = from.u32();
  from.fields(address.credentials.instance, address.credentials.secret);
  const uint32_t num_addresses = from.u32();
  if (!from.ok() || num_addresses == 0 || num_addresses > channel::kMaxAddresses) return {};
  for (uint32_t index = 0; index < num_addresses; ++index)
    address.addresses.emplace_back(from.bytes(kMaxNameBytes));
  return from.done() ? std::optional(std::move(address)) : std::nullopt;
}

std::string write_region(const RegionName& region) {
  return BlobWriter().u32(kRegionMagic).u32(region.pool).u32(region.number).take();
}

std::optional<RegionName> read_region(std::string_view data) {
  BlobReader from(data, kRegionMagic);
  RegionName region;
  from.fields(region.pool, region.number);
  return from.done() && region.pool < kMaxPools ? std::optional(region) : std::nullopt;
}

const LateRegion* PoolCard::find(uint32_t number) const {
  const auto found = std::find_if(regions.begin(), regions.end(),
                                  [number](const LateRegion& each) { return each.number == number; });
  return found == regions.end() ? nullptr : &*found;
}

void PoolCard::keep_only(const std::vector<uint32_t>& numbers) {
  std::erase_if(regions, [&numbers](const LateRegion& region) {
    return std::find(numbers.begin(), numbers.end(), region.number) == numbers.end();
  });
}

channel::OwnerCard PoolCard::owner() const {
  channel::OwnerCard owner{pool_name(pool), epoch, transports, {}};
  for (size_t index = 0; index < owner.transports.size(); ++index) {
    TransportAccess& access = owner.transports[index];
    for (const LateRegion& region : regions) {
      if (region.keys[index].empty() && access.refused.empty()) access.refused = region.refused[index];
      access.pool_keys.push_back(region.keys[index]);
    }
  }
  return owner;
}

std::string pool_name(uint32_t pool) {
  return pool == kHostPool ? "host memory" : "GPU " + std::to_string(pool - 1);
}

std::string write_card(const AgentCard& card) {
  BlobWriter to;
  to.u32(kCardMagic).u32(kVersion).u32(static_cast<uint32_t>(card.size()));
  for (const PoolCard& pool : card) {
    to.u32(pool.pool).u64(pool.epoch).u32(pool.seat.slot).u64(pool.seat.nonce);
    to.u32(static_cast<uint32_t>(pool.transports.size()));
    for (const TransportAccess& access : pool.transports) write_transport(to, access);
    to.u32(static_cast<uint32_t>(pool.regions.size()));
    for (const LateRegion& region : pool.regions) write_late(to, region);
  }
  return to.take();
}

std::optional<AgentCard> read_card(std::string_view body) {
  BlobReader from(body, kCardMagic);
  if (from.u32() != kVersion) return {};
  const uint32_t num_pools = from.u32();
  if (num_pools > kMaxPools) return {};
  AgentCard card;
  while (card.size() < num_pools) {
    if (!read_pool(from, card.emplace_back())) return {};
  }
  return from.done() ? std::optional(std::move(card)) : std::nullopt;
}

}  // namespace kvlink::nixl

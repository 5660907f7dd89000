// SPDX-License-Identifier: Apache-2.0
// The blobs of the verbs transport: every byte in its place, every bound kept, nothing malformed taken.
// Seeds are fixed.
#include "transports/verbs/protocol.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>

namespace kvlink::verbs {
namespace {

using Random = std::mt19937_64;

constexpr uint32_t k24Bits = (1 << 24) - 1;

template <typename T>
std::string raw(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string words(std::initializer_list<uint32_t> values) {
  std::string bytes;
  for (const uint32_t value : values) bytes += raw(value);
  return bytes;
}

uint32_t below(uint32_t end, Random& random) { return static_cast<uint32_t>(random() % end); }

Gid random_gid(Random& random) {
  Gid gid;
  for (char& byte : gid) byte = static_cast<char>(random());
  return gid;
}

QpAddress random_qp(Random& random) {
  return {.qpn = below(1 << 24, random),
          .psn = below(1 << 24, random),
          .lid = below(1 << 16, random),
          .gid = random_gid(random),
          .mtu = 1 + below(5, random),
          .reads_out = below(256, random),
          .reads_in = below(256, random),
          .ece = {below(UINT32_MAX, random), below(UINT32_MAX, random), below(UINT32_MAX, random)}};
}

template <typename Blob>
Blob make(Random& random);

template <>
Address make(Random& random) {
  Address address;
  for (uint32_t nics = 1 + below(kMaxNics, random); nics > 0; --nics) {
    address.nics.push_back({.name = std::string(below(65, random), static_cast<char>('a' + random() % 26)),
                            .ethernet = below(2, random),
                            .lid = below(1 << 16, random),
                            .gid = random_gid(random),
                            .mbps = 1 + below(UINT32_MAX, random)});
  }
  return address;
}

template <>
Hello make(Random& random) {
  return {.owner_nic = below(kMaxNics, random), .reader = random_qp(random)};
}

template <>
Reply make(Random& random) {
  return {.owner = random_qp(random)};
}

template <>
RemoteKey make(Random& random) {
  RemoteKey key{.access = static_cast<Access>(random() % (kLastAccess + 1)),
                .base = random() >> 1,
                .bytes = 1 + random() % (uint64_t{1} << 40),
                .slice_bytes = 0,
                .rkeys = {}};
  const uint64_t slices = 1 + random() % std::min<uint64_t>(key.bytes, 40);
  key.slice_bytes = (key.bytes - 1) / slices + 1;
  key.rkeys.resize(1 + random() % 4);
  for (auto& of_nic : key.rkeys) {
    of_nic.resize((key.bytes - 1) / key.slice_bytes + 1);
    std::generate(of_nic.begin(), of_nic.end(), [&] { return static_cast<uint32_t>(random()); });
  }
  return key;
}

bool in_bounds(const QpAddress& qp) {
  return qp.qpn <= k24Bits && qp.psn <= k24Bits && qp.lid <= 0xffff && qp.mtu >= 1 && qp.mtu <= 5 &&
         qp.reads_out <= 255 && qp.reads_in <= 255;
}

bool in_bounds(const Address& address) {
  return !address.nics.empty() && address.nics.size() <= kMaxNics &&
         std::all_of(address.nics.begin(), address.nics.end(), [](const NicAddress& nic) {
           return nic.name.size() <= 64 && nic.ethernet <= 1 && nic.lid <= 0xffff && nic.mbps > 0;
         });
}

bool in_bounds(const Hello& hello) { return hello.owner_nic < kMaxNics && in_bounds(hello.reader); }

bool in_bounds(const Reply& reply) { return in_bounds(reply.owner); }

/// Every byte of the region has an address and a key.
bool in_bounds(const RemoteKey& key) {
  if (key.bytes == 0 || key.slice_bytes == 0 || key.rkeys.empty() || key.rkeys.size() > kMaxNics)
    return false;
  if (static_cast<uint32_t>(key.access) > kLastAccess) return false;
  const uint64_t slices = key.bytes / key.slice_bytes + (key.bytes % key.slice_bytes != 0);
  return slices <= kMaxSlices && key.base + key.bytes >= key.base &&
         std::all_of(key.rkeys.begin(), key.rkeys.end(),
                     [=](const auto& keys) { return keys.size() == slices; });
}

/// tests/control/test_second_implementation.py packs and reads the same by code written from the formats
/// alone.
template <typename Blob>
void expect_kept(const std::string& wanted) {
  std::ifstream file(KVLINK_TESTS_FOLDER "/transports/verbs/blobs.txt");
  for (std::string name, hex; file >> name >> hex;) {
    if (name != wanted) continue;
    std::string blob;
    for (size_t at = 0; at < hex.size(); at += 2)
      blob += static_cast<char>(std::stoi(hex.substr(at, 2), nullptr, 16));
    const auto read = Blob::parse(blob);
    ASSERT_TRUE(read) << wanted << ": the second implementation has to learn this format, too";
    EXPECT_EQ(read->format(), blob) << wanted;
    return;
  }
  FAIL() << "blobs.txt has no " << wanted;
}

TEST(VerbsWire, IsWhatTheSecondImplementationSpeaks) {
  expect_kept<Address>("address");
  expect_kept<Hello>("hello");
  expect_kept<Reply>("reply");
  expect_kept<RemoteKey>("key");
}

template <typename Blob>
class VerbsBlobs : public ::testing::Test {};
using Blobs = ::testing::Types<Address, Hello, Reply, RemoteKey>;
TYPED_TEST_SUITE(VerbsBlobs, Blobs);

TYPED_TEST(VerbsBlobs, WhatIsWrittenIsRead) {
  Random random(31);
  for (int round = 0; round < 300; ++round) {
    const TypeParam written = make<TypeParam>(random);
    const auto read = TypeParam::parse(written.format());
    ASSERT_TRUE(read);
    ASSERT_EQ(read->format(), written.format());
  }
}

TYPED_TEST(VerbsBlobs, EveryLengthButTheRightOneIsRefused) {
  Random random(32);
  const std::string blob = make<TypeParam>(random).format();
  for (size_t bytes = 0; bytes < blob.size(); ++bytes) ASSERT_FALSE(TypeParam::parse(blob.substr(0, bytes)));
  EXPECT_FALSE(TypeParam::parse(blob + '\0'));
  EXPECT_FALSE(TypeParam::parse(blob + blob));
}

TYPED_TEST(VerbsBlobs, NoBlobPassesForAnother) {
  Random random(33);
  const std::string blob = make<TypeParam>(random).format();
  int taken_by = 0;
  taken_by += Address::parse(blob).has_value();
  taken_by += Hello::parse(blob).has_value();
  taken_by += Reply::parse(blob).has_value();
  taken_by += RemoteKey::parse(blob).has_value();
  EXPECT_EQ(taken_by, 1);
}

void mutate(std::string& bytes, Random& random) {
  constexpr uint32_t kEdges[] = {0, 1, 32, 33, 4096, 4097, 0xffff, 1 << 16, 1 << 24, 0x7fffffff, 0xffffffff};
  for (uint64_t flips = random() % 4; flips > 0; --flips) {
    bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
  }
  if (random() % 3 == 0) {
    const uint32_t edge = kEdges[random() % std::size(kEdges)];
    std::memcpy(&bytes[random() % (bytes.size() / 4) * 4], &edge, sizeof edge);
  }
  if (random() % 8 == 0) bytes.resize(random() % bytes.size());
  if (random() % 8 == 0) bytes.insert(random() % (bytes.size() + 1), raw(random()));
}

TYPED_TEST(VerbsBlobs, MutationsAreRefusedOrWithinBounds) {
  Random random(34);
  int taken = 0, refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string blob = make<TypeParam>(random).format();
    mutate(blob, random);
    const auto read = TypeParam::parse(blob);
    ++(read ? taken : refused);
    if (!read) continue;
    ASSERT_TRUE(in_bounds(*read)) << round;
    ASSERT_EQ(read->format(), blob) << round;
  }
  EXPECT_GT(taken, 1000);
  EXPECT_GT(refused, 1000);
}

TYPED_TEST(VerbsBlobs, GarbageBehindTheMagicNumberIsRefused) {
  Random random(35);
  const std::string magic = make<TypeParam>(random).format().substr(0, 4);
  for (int round = 0; round < 20'000; ++round) {
    std::string blob = magic;
    for (uint64_t count = random() % 40; count > 0; --count) {
      blob += raw(static_cast<uint32_t>(random() >> random() % 64));  // of every magnitude
    }
    const auto read = TypeParam::parse(blob);
    ASSERT_TRUE(!read || (in_bounds(*read) && read->format() == blob)) << round;
  }
}

/// `blob` with the word at `offset` replaced.
std::string with(std::string blob, size_t offset, uint32_t value) {
  std::memcpy(&blob[offset], &value, sizeof value);
  return blob;
}

constexpr Gid kGid{'0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'};
constexpr QpAddress kQp{.qpn = 0x12,
                        .psn = 0x34,
                        .lid = 5,
                        .gid = kGid,
                        .mtu = 3,
                        .reads_out = 16,
                        .reads_in = 9,
                        .ece = {0x15b3, 7, 1}};
const std::string kQpBytes =
    words({0x12, 0x34, 5, 3, 16, 9, 16}) + "0123456789abcdef" + words({0x15b3, 7, 1});

TEST(VerbsWireFormat, Address) {
  const Address address{{{"mlx5_0:1", 1, 7, kGid, false, 400}, {"", 0, 0xffff, {}}}};
  EXPECT_EQ(address.format(), "kva2" + words({2, 8}) + "mlx5_0:1" + words({1, 7, 400, 16}) +
                                  "0123456789abcdef" + words({0, 0, 0xffff, 1, 16}) + std::string(16, '\0'));
}

TEST(VerbsWireFormat, HelloAndReply) {
  EXPECT_EQ((Hello{3, kQp}.format()), "kvh2" + words({3}) + kQpBytes);
  EXPECT_EQ(Reply{kQp}.format(), "kvr2" + kQpBytes);
}

TEST(VerbsWireFormat, RemoteKey) {
  const RemoteKey key{Access::kWriteWords, 0x1000, 100, 40, {{1, 2, 3}, {4, 5, 6}}};
  EXPECT_EQ(key.format(), "kvk1" + words({2}) + raw(uint64_t{0x1000}) + raw(uint64_t{100}) +
                              raw(uint64_t{40}) + words({2, 1, 2, 3, 4, 5, 6}));
}

/// A word of a blob, the greatest value it may have, and whether it may be 0.
struct Bound {
  size_t offset;
  uint32_t most;
  bool may_be_zero = true;
};

template <typename Blob>
void expect_bounds(const std::string& blob, std::initializer_list<Bound> bounds) {
  for (const Bound& bound : bounds) {
    EXPECT_TRUE(Blob::parse(with(blob, bound.offset, bound.most))) << bound.offset;
    EXPECT_EQ(Blob::parse(with(blob, bound.offset, 0)).has_value(), bound.may_be_zero) << bound.offset;
    for (const uint32_t value : {bound.most + 1, bound.most << 8 | 0xff, 0xffff'ffffu}) {
      EXPECT_FALSE(Blob::parse(with(blob, bound.offset, value))) << bound.offset << ": " << value;
    }
  }
}

TEST(VerbsWireBounds, QueuePairs) {
  const std::string blob = Reply{kQp}.format();
  expect_bounds<Reply>(blob,
                       {{4, k24Bits}, {8, k24Bits}, {12, 0xffff}, {16, 5, false}, {20, 255}, {24, 255}});
  for (const uint32_t gid_bytes : {0, 15, 17}) EXPECT_FALSE(Reply::parse(with(blob, 28, gid_bytes)));
  expect_bounds<Hello>(Hello{0, kQp}.format(), {{4, kMaxNics - 1}});
}

TEST(VerbsWireBounds, Ports) {
  const std::string blob = Address{{{"n", 1, 7, kGid}}}.format();
  constexpr size_t kBehindName = 4 + 4 + 4 + 1;
  expect_bounds<Address>(blob, {{kBehindName, 3}, {kBehindName + 4, 0xffff}});
  EXPECT_TRUE(Address::parse(with(blob, kBehindName + 8, 0xffff'ffff)));
  EXPECT_FALSE(Address::parse(with(blob, kBehindName + 8, 0)));
  const auto with_nics = [](size_t count) { return Address{{count, NicAddress{"n", 1, 7, kGid}}}.format(); };
  EXPECT_FALSE(Address::parse(with_nics(0)));
  EXPECT_TRUE(Address::parse(with_nics(kMaxNics)));
  EXPECT_FALSE(Address::parse(with_nics(kMaxNics + 1)));
  const auto with_name = [](size_t bytes) {
    return Address{{{std::string(bytes, 'n'), 1, 7, kGid}}}.format();
  };
  for (const char* name : {"with space", "tab\t", "\x1b[31m", "\xff"}) {
    EXPECT_FALSE(Address::parse(Address{{{name, 1, 7, kGid}}}.format()));
  }
  EXPECT_TRUE(Address::parse(with_name(64)));
  EXPECT_FALSE(Address::parse(with_name(65)));
}

std::string key_blob(uint64_t base, uint64_t bytes, uint64_t slice_bytes, size_t nics, size_t slices) {
  const std::vector<uint32_t> keys(slices, 7);
  return RemoteKey{Access::kRead, base, bytes, slice_bytes, std::vector(nics, keys)}.format();
}

TEST(VerbsWireBounds, Regions) {
  EXPECT_TRUE(RemoteKey::parse(key_blob(0, 100, 40, 1, 3)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(0, 100, 40, 1, 2)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(0, 100, 40, 1, 4)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(0, 100, 40, 0, 3)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(0, 0, 40, 1, 0)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(0, 0, 40, 1, 1)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(0, 0, UINT64_MAX, 1, 2)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(0, 100, 0, 1, 1)));
  EXPECT_TRUE(RemoteKey::parse(key_blob(0, 100, UINT64_MAX, 1, 1)));
  EXPECT_FALSE(RemoteKey::parse(with(key_blob(0, 100, 40, 1, 3), 4, 3)));  // no such access

  EXPECT_TRUE(RemoteKey::parse(key_blob(UINT64_MAX - 100, 100, 100, 1, 1)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(UINT64_MAX - 99, 100, 100, 1, 1)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(1, UINT64_MAX, UINT64_MAX, 1, 1)));

  EXPECT_TRUE(RemoteKey::parse(key_blob(0, kMaxSlices, 1, 2, kMaxSlices)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(0, kMaxSlices + 1, 1, 1, kMaxSlices + 1)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(0, UINT64_MAX, 1, 1, 16)));
  EXPECT_TRUE(RemoteKey::parse(key_blob(0, 100, 40, kMaxNics, 3)));
  EXPECT_FALSE(RemoteKey::parse(key_blob(0, 100, 40, kMaxNics + 1, 3)));
}

}  // namespace
}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
// What the verbs transport says where the connection manager connects: every byte in its place, every bound
// kept.
#include <gtest/gtest.h>

#include <cstring>

#include "transports/verbs/protocol.h"

namespace kvlink::verbs {
namespace {

constexpr Gid kIp{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, '\xff', '\xff', 10, 0, 1, 1};
constexpr Secret kSecret{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr size_t kPortAt = 4 + 4 + 16;

std::string with(std::string blob, size_t offset, uint32_t value) {
  std::memcpy(blob.data() + offset, &value, sizeof value);
  return blob;
}

TEST(VerbsCmWire, ReplyNamesTheAddressThePortAndTheSecret) {
  const std::string blob = CmReply{kIp, 0x1234, kSecret}.format();
  EXPECT_EQ(blob, "kvc1" + std::string("\x10\0\0\0", 4) + std::string(kIp.data(), kIp.size()) +
                      std::string("\x34\x12\0\0", 4) + std::string("\x10\0\0\0", 4) +
                      std::string(kSecret.data(), kSecret.size()));
  const auto parsed = CmReply::parse(blob);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->ip, kIp);
  EXPECT_EQ(parsed->port, 0x1234u);
  EXPECT_EQ(parsed->secret, kSecret);
}

TEST(VerbsCmWire, MalformedRepliesAreRefused) {
  const std::string blob = CmReply{kIp, 0x1234, kSecret}.format();
  for (size_t bytes = 0; bytes < blob.size(); ++bytes) EXPECT_FALSE(CmReply::parse(blob.substr(0, bytes)));
  EXPECT_FALSE(CmReply::parse(blob + '\0'));
  EXPECT_FALSE(CmReply::parse(with(blob, 0, 0)));
  for (const uint32_t bytes : {0, 15, 17}) {
    EXPECT_FALSE(CmReply::parse(with(blob, 4, bytes)));
    EXPECT_FALSE(CmReply::parse(with(blob, kPortAt + 4, bytes)));
  }
  EXPECT_TRUE(CmReply::parse(with(blob, kPortAt, 65535)));
  for (const uint32_t port : {0u, 65536u, ~0u}) EXPECT_FALSE(CmReply::parse(with(blob, kPortAt, port)));
}

TEST(VerbsCmWire, TheTwoWaysAreNotMistakenForEachOther) {
  EXPECT_FALSE(CmReply::parse(Reply{{.mtu = 3}}.format()));
  EXPECT_FALSE(Reply::parse(CmReply{kIp, 1, kSecret}.format()));
}

TEST(VerbsCmWire, AnAddressSaysHowEachPortIsConnectedTo) {
  const auto address = Address::parse(Address{{{"a", 1, 7, kIp, true}, {"b", 0, 7, kIp, false}}}.format());
  ASSERT_TRUE(address);
  EXPECT_TRUE(address->nics[0].by_cm);
  EXPECT_EQ(address->nics[0].ethernet, 1u);
  EXPECT_FALSE(address->nics[1].by_cm);
  EXPECT_EQ(address->nics[1].ethernet, 0u);
}

}  // namespace
}  // namespace kvlink::verbs

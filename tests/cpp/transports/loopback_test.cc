// SPDX-License-Identifier: Apache-2.0
// What loopback does of its own.
#include "cpp/transports/copy_peers.h"

namespace kvlink::testing {
namespace {

TEST(Loopback, RevokesDestroyedRegions) {
  LocalPair pair("loopback");
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, 64).ok());
  pair.owner.pool_region.reset();
  pair.owner.pool.reset();
  EXPECT_EQ(pair.reader.read_at(kPool, 0, 64).code(), Code::kAccessDenied);
  EXPECT_TRUE(pair.reader.read_at(kTable, 0, 64).ok());
  EXPECT_FALSE(pair.reader.endpoint->import_region(LocalPair("loopback").owner.card().address).ok());
}

TEST(Loopback, RevokesUnderAReadInProgress) {
  for (int i = 0; i < 10; ++i) {
    LocalPair pair("loopback");
    std::thread revoking([&] {
      pair.owner.pool_region.reset();
      pair.owner.pool.reset();
    });
    Status status;
    while (status.ok()) status = pair.reader.read_at(kPool, 0, 4 << 20);
    revoking.join();
    ASSERT_EQ(status.code(), Code::kAccessDenied);
  }
}

TEST(Loopback, FencesOneConnection) {
  LocalPair pair("loopback");
  Reader other("loopback", pair.owner.card(),
               [&](const std::string& hello) { return *pair.owner.transport->accept(43, hello); });
  EXPECT_TRUE(pair.owner.transport->capabilities().can_fence);
  EXPECT_FALSE(pair.owner.transport->fence(41));
  EXPECT_TRUE(pair.owner.transport->fence(42));
  EXPECT_EQ(pair.reader.read_at(kPool, 0, 64).code(), Code::kPeerUnreachable);
  EXPECT_TRUE(other.read_at(kPool, 0, 64).ok());
}

TEST(Loopback, RefusesOtherProcesses) {
  RemoteOwner owner("loopback");
  auto transport = make_transport("loopback", {});
  const Status status = open_one(**transport, owner.card().address).status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_FALSE(status.fix().empty());
}

}  // namespace
}  // namespace kvlink::testing

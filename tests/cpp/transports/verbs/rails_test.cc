// SPDX-License-Identifier: Apache-2.0
// Pairing of ports: like with like, every port used, none beyond its rate.
#include "transports/verbs/rails.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

namespace kvlink::verbs {
namespace {

using Ports = std::vector<NicAddress>;

NicAddress port(uint32_t mbps, bool ethernet = true, bool by_cm = false) {
  return {.name = "nic", .ethernet = ethernet, .by_cm = by_cm, .mbps = mbps};
}

/// Local port, remote port, rate.
using Row = std::tuple<uint32_t, uint32_t, double>;
std::vector<Row> rows(const Ports& local, const Ports& remote) {
  std::vector<Row> rows;
  for (const Rail& rail : pair(local, remote)) rows.push_back({rail.local, rail.remote, rail.mbps});
  return rows;
}

TEST(VerbsRails, AsManyPortsOnBothSidesAreJoinedOneByOne) {
  EXPECT_EQ(rows({port(400), port(400)}, {port(400), port(400)}),
            (std::vector<Row>{{0, 0, 400}, {1, 1, 400}}));
}

TEST(VerbsRails, ARailIsAsWideAsItsSlowerEndAndTheWidestComesFirst) {
  EXPECT_EQ(rows({port(100), port(400)}, {port(400), port(300)}),
            (std::vector<Row>{{1, 1, 300}, {0, 0, 100}}));
}

TEST(VerbsRails, APortDividesItsRateAmongItsRails) {
  EXPECT_EQ(rows({port(400)}, {port(100), port(300)}), (std::vector<Row>{{0, 1, 200}, {0, 0, 100}}));
  EXPECT_EQ(rows({port(4), port(4)}, {port(4), port(4), port(4)}),
            (std::vector<Row>{{1, 1, 4}, {0, 0, 2}, {0, 2, 2}}));
}

TEST(VerbsRails, OnlyPortsThatReachEachOtherAreJoined) {
  const Ports mixed{port(400, false), port(100), port(100, true, true)};
  EXPECT_EQ(rows(mixed, {port(100)}), (std::vector<Row>{{1, 0, 100}}));
  EXPECT_EQ(rows(mixed, {port(400, false), port(100, true, true)}),
            (std::vector<Row>{{0, 0, 400}, {2, 1, 100}}));
  EXPECT_TRUE(pair(Ports{port(1, false)}, Ports{port(1)}).empty());
  EXPECT_NE(why_apart(port(1, false), port(1)).what().find("different kinds of fabric"), std::string::npos);
  EXPECT_NE(why_apart(port(1), port(1, true, true)).fix().find("KVLINK_RDMA_CONNECT"), std::string::npos);
}

TEST(VerbsRails, IPv4DoesNotReachIPv6AndTheRefusalNamesBothAddresses) {
  NicAddress v4 = port(100), v6 = port(100);
  v4.gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, '\xff', '\xff', 10, 0, 1, 1};
  v6.gid = {'\xfd', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2};
  EXPECT_TRUE(pair(Ports{v4}, Ports{v6}).empty());
  EXPECT_EQ(rows({v4, v6}, {v6}), (std::vector<Row>{{1, 0, 100}}));
  const Status why = why_apart(v4, v6);
  EXPECT_EQ(why.code(), Code::kTransportUnavailable);
  EXPECT_NE(why.what().find("nic is 10.0.1.1, and the owner's nic is fd00::2"), std::string::npos)
      << why.what();
  EXPECT_NE(why.fix().find("addresses of the same kind"), std::string::npos);
  v4.by_cm = v6.by_cm = true;  // which knows better
  EXPECT_EQ(rows({v4}, {v6}), (std::vector<Row>{{0, 0, 100}}));
}

TEST(VerbsRails, EveryPortThatReachesOneIsUsedAndNoneBeyondItsRate) {
  std::mt19937_64 random(7);
  const auto below = [&](uint32_t end) { return static_cast<uint32_t>(random() % end); };
  const auto some = [&] {
    Ports ports(1 + below(12));
    for (NicAddress& each : ports) each = port(1 + below(800'000), below(2), below(2));
    return ports;
  };
  const auto expect_used = [](const Ports& ports, const Ports& others, std::map<uint32_t, double>& load) {
    for (uint32_t i = 0; i < ports.size(); ++i) {
      const bool reaches = std::any_of(others.begin(), others.end(), [&](const NicAddress& other) {
        return other.ethernet == ports[i].ethernet && other.by_cm == ports[i].by_cm;
      });
      EXPECT_EQ(load[i] > 0, reaches);
      EXPECT_LE(load[i], ports[i].mbps * 1.000001);
    }
  };
  for (int round = 0; round < 2000; ++round) {
    const Ports local = some(), remote = some();
    std::map<uint32_t, double> of_local, of_remote;
    std::set<Row> seen, mirrored;
    for (const Rail& rail : pair(local, remote)) {
      EXPECT_TRUE((seen.insert({rail.local, rail.remote, rail.mbps}).second));
      of_local[rail.local] += rail.mbps;
      of_remote[rail.remote] += rail.mbps;
    }
    expect_used(local, remote, of_local);
    expect_used(remote, local, of_remote);
    for (const Rail& rail : pair(remote, local)) mirrored.insert({rail.remote, rail.local, rail.mbps});
    EXPECT_EQ(seen, mirrored);
  }
}

}  // namespace
}  // namespace kvlink::verbs

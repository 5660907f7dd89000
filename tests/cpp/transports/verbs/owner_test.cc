// SPDX-License-Identifier: Apache-2.0
// Owners of verbs, and the rails between two hosts.

#include "transports/verbs/owner.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <latch>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <tuple>

#include "cpp/transports/verbs/made_up_rdma.h"
#include "transports/verbs/rails.h"

namespace kvlink::verbs {
namespace {

using testing::device;
using Order = std::vector<std::string>;

/// A call waits here until it is let through.
struct Gate {
  void pass() {
    entered.count_down();
    opened.wait();
  }
  std::latch entered{1}, opened{1};
};

class VerbsOwner : public ::testing::Test {
 protected:
  VerbsOwner() {
    device = &made_up;
    std::filesystem::create_directory(node);
    ports = *Ports::make({testing::open_nic(pd, DeviceNode(node))}, [](const NicPlace&) {
      return Result<std::shared_ptr<Nic>>(Status::Config("it does not come back"));
    });
    EXPECT_TRUE(ports->register_everywhere({.base = base, .bytes = 4096}, Rights::kPeersRead).ok());
    owner = *Owner::make(*ports, LivenessTimeouts{});
  }
  ~VerbsOwner() override {
    std::filesystem::remove(node);
    owner.reset();
    ports.reset();
    device = nullptr;
  }

  Result<std::string> admit(ReaderId reader, const Hello& hello) {
    return owner->admit(reader, std::array{hello.format()}).front();
  }
  /// Admits a reader and returns the number of its queue pair here.
  uint32_t admit(ReaderId reader) {
    const auto reply = admit(reader, {0, {.qpn = 99, .mtu = 1, .reads_out = 1, .reads_in = 1}});
    EXPECT_TRUE(reply.ok()) << reply.status().what();
    return Reply::parse(*reply)->owner.qpn;
  }
  /// As the kernel does for a driver that says nothing; then one round of the owner's thread, and the end of
  /// what it left to others.
  void remove_device() {
    std::filesystem::remove(node);
    owner->serve();
    while (!made_up.is_closed()) std::this_thread::yield();
  }

  Gate gate;
  std::atomic<bool> stops{false};  // the next call that waits for `gate`
  testing::Device made_up;
  ibv_pd pd{};
  const std::filesystem::path node =
      std::filesystem::temp_directory_path() / ("owner-" + std::to_string(::getpid()));
  std::byte* const base = reinterpret_cast<std::byte*>(uint64_t{1} << 40);  // never touched
  std::unique_ptr<Ports> ports;
  std::unique_ptr<Owner> owner;
};

TEST_F(VerbsOwner, TellsItsReadersOfARemovalBeforeAnythingIsTakenApart) {
  const uint32_t first = admit(1), second = admit(2);
  remove_device();
  EXPECT_EQ(made_up.order(),
            (Order{"tell", "tell", "destroy qp", "destroy qp", "deregister", "destroy cq", "close"}));
  const auto told = made_up.all("tell");
  EXPECT_EQ(told[0].qpn, first);
  EXPECT_EQ(told[1].qpn, second);
}

TEST_F(VerbsOwner, ADeviceThatCarriesNothingAnyMoreIsLetGoOfAllTheSame) {
  admit(1);
  made_up.answers = false;
  remove_device();
  EXPECT_EQ(made_up.order(), (Order{"tell", "destroy qp", "deregister", "destroy cq", "close"}));
}

TEST_F(VerbsOwner, NobodyIsAdmittedOnceItIsGone) {
  remove_device();
  const auto reply = admit(1, {0, {.qpn = 99, .mtu = 1}});
  EXPECT_EQ(reply.status().code(), Code::kTransportUnavailable);
  EXPECT_EQ(reply.status().what(), "RDMA port made_up:1 was removed");
}

TEST_F(VerbsOwner, AFencedReaderIsToldAndNoOther) {
  const uint32_t late = admit(1);
  admit(2);
  EXPECT_TRUE(owner->fence(1));
  ASSERT_EQ(made_up.all("tell").size(), 1U);
  EXPECT_EQ(made_up.all("tell")[0].qpn, late);
  ASSERT_EQ(made_up.all("destroy qp").size(), 1U);
  EXPECT_EQ(made_up.all("destroy qp")[0].qpn, late);
  EXPECT_FALSE(owner->fence(1));
}

TEST_F(VerbsOwner, OneCallerCannotTakeAllQueuePairs) {
  const Hello hello{0, {.qpn = 99, .mtu = 1, .reads_out = 1, .reads_in = 1}};
  size_t admitted = 0;
  while (admitted < kServedCqes && admit({1, 7}, hello).ok()) ++admitted;
  EXPECT_EQ(admitted, kServedCqes / kServedWrs / 2);
  EXPECT_NE(admit({1, 7}, hello).status().what().find("of this reader's process or host"), std::string::npos);
  admit({2, 8});
  EXPECT_TRUE(owner->fence(1));
  admit({3, 7});
}

// ibv_modify_qp looks for a second for an address that nobody has.
TEST_F(VerbsOwner, AReaderThatIsNotFoundKeepsNobodyWaiting) {
  admit(1);
  stops = true;
  made_up.on_rtr = [&](uint32_t) {
    if (!stops.exchange(false)) return 0;
    gate.pass();
    return ETIMEDOUT;
  };
  std::thread unreachable(
      [&] { EXPECT_EQ(admit({2, 8}, {0, {.qpn = 99, .mtu = 1}}).status().code(), Code::kPeerUnreachable); });
  gate.entered.wait();
  owner->serve();
  EXPECT_TRUE(owner->fence(1));
  admit(3);
  gate.opened.count_down();
  unreachable.join();
}

TEST_F(VerbsOwner, TheFirstRefusalOfAPortEndsTheOtherLanesOfItsReader) {
  int num_tries = 0;
  made_up.on_rtr = [&](uint32_t) {
    ++num_tries;
    return ETIMEDOUT;
  };
  const std::vector<std::string> hellos(4, Hello{0, {.qpn = 99, .mtu = 1}}.format());
  for (const auto& reply : owner->admit({1, 7}, hellos))
    EXPECT_EQ(reply.status().code(), Code::kPeerUnreachable);
  EXPECT_EQ(num_tries, 1);
  EXPECT_FALSE(owner->admit({2, 7}, hellos).front().ok());
  EXPECT_EQ(num_tries, 2) << "its next connection may find it";
}

TEST_F(VerbsOwner, APortThatFindsNobodyKeepsNoLaneOfAnotherPortWaiting) {
  ibv_pd of_second{};
  const auto two = *Ports::make({testing::open_nic(pd), testing::open_nic(of_second)}, [](const NicPlace&) {
    return Result<std::shared_ptr<Nic>>(Status::Config("it does not come back"));
  });
  const auto both = *Owner::make(*two, LivenessTimeouts{});
  const auto lane = [](uint32_t port, uint32_t peer) {
    return Hello{port, {.qpn = peer, .mtu = 1}}.format();
  };
  constexpr uint32_t kNobody = 13;
  for (const uint32_t healthy : {0U, 1U}) {
    std::latch connecting{2};  // the lanes of the healthy port
    made_up.on_rtr = [&](uint32_t peer) {
      if (peer != kNobody) connecting.count_down();
      if (peer == kNobody) connecting.wait();
      return peer == kNobody ? ETIMEDOUT : 0;
    };
    const auto peer = [&](uint32_t port) { return port == healthy ? 1 : kNobody; };
    const std::vector<std::string> hellos{lane(0, peer(0)), lane(1, peer(1)), lane(0, peer(0)),
                                          lane(1, peer(1)), "nonsense",       lane(2, 1)};
    const auto replies = both->admit({1 + healthy, 7}, hellos);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(replies[i].ok(), i % 2 == healthy) << i;
    EXPECT_EQ(replies[4].status().code(), Code::kAccessDenied);
    EXPECT_EQ(replies[5].status().code(), Code::kAccessDenied);
  }
}

// A driver takes tens of seconds for the commands of a device that is dead.
TEST_F(VerbsOwner, QueuePairsThatFailedAreDestroyedAside) {
  stops = true;
  made_up.on_destroy = [&] {
    if (stops.exchange(false)) gate.pass();
  };
  testing::complete(admit(1), 0, IBV_WC_RETRY_EXC_ERR);
  owner->serve();  // takes the completion
  owner->serve();  // hands it over
  gate.entered.wait();
  owner->serve();
  admit(2);
  gate.opened.count_down();
  remove_device();  // which nothing of the job keeps open
}

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

/// 10.RAIL.0.HOST, of which this end knows that the first half is the network.
NicAddress on_rail(char rail, char host, uint32_t net_bits = 0) {
  NicAddress nic = port(100);
  nic.gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, '\xff', '\xff', 10, rail, 0, host};
  nic.net_bits = net_bits;
  return nic;
}

TEST(VerbsRails, PortsOfOneNetworkAreJoinedAmongThemselves) {
  constexpr uint32_t kBits = 96 + 16;
  const Ports all{on_rail(1, 2), on_rail(2, 2), on_rail(3, 2), on_rail(4, 2)};
  EXPECT_EQ(rows({on_rail(3, 1, kBits)}, all), (std::vector<Row>{{0, 2, 100}})) << "the others are apart";
  EXPECT_EQ(rows({on_rail(4, 1, kBits), on_rail(2, 1, kBits)}, all),
            (std::vector<Row>{{0, 3, 100}, {1, 1, 100}}));
  EXPECT_EQ(rows({on_rail(3, 1), on_rail(4, 1)}, {on_rail(4, 2), on_rail(3, 2)}),
            (std::vector<Row>{{0, 0, 100}, {1, 1, 100}}))
      << "where no network is known, the i-th ones";
  EXPECT_EQ(rows({on_rail(5, 1, kBits)}, {on_rail(6, 2)}), (std::vector<Row>{{0, 0, 100}}))
      << "routers may join them";
  EXPECT_EQ(rows({on_rail(1, 1, kBits), on_rail(7, 1, kBits)}, {on_rail(8, 2), on_rail(1, 2)}),
            (std::vector<Row>{{0, 1, 100}, {1, 0, 100}}));
}

TEST(VerbsRails, SeveralPortsOfOneHostInOneNetworkAreJoinedOneByOne) {
  constexpr uint32_t kBits = 96 + 16;
  EXPECT_EQ(rows({on_rail(1, 1, kBits), on_rail(1, 2, kBits)}, {on_rail(1, 3), on_rail(1, 4)}),
            (std::vector<Row>{{0, 0, 100}, {1, 1, 100}}));
  EXPECT_EQ(rows({on_rail(1, 1, kBits), on_rail(1, 2, kBits)}, {on_rail(1, 3)}),
            (std::vector<Row>{{0, 0, 50}, {1, 0, 50}}));
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

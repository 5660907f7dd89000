// SPDX-License-Identifier: Apache-2.0
// Ports of NICs and the addresses between them.

#include "transports/verbs/ports.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <filesystem>
#include <map>
#include <set>
#include <thread>

#include "base/clock.h"
#include "cpp/transports/verbs/made_up_machine.h"
#include "transports/factories.h"
#include "transports/verbs/endpoint.h"
#include "transports/verbs/queue_pair.h"

namespace kvlink::verbs {
namespace {

/// One device at a time: the library's functions carry no object.
struct Device {
  std::atomic<bool> present{true}, fatal{false};
  std::atomic<int> num_contexts{0}, num_regions{0}, num_attempts{0};
  std::atomic<uint32_t> next_key{1};
  std::set<std::string> refuses;  // devices that register nothing
} device;

std::map<const ibv_pd*, std::string> names;  // of devices by protection domain
std::deque<ibv_pd> domains;

const Api& made_up() {
  static const Api api = [] {
    Api api{};
    api.close_device = [](ibv_context* context) {
      --device.num_contexts;
      delete context;
      return 0;
    };
    api.dealloc_pd = [](ibv_pd*) { return 0; };
    api.create_cq = [](ibv_context*, int, void*, ibv_comp_channel*, int) { return new ibv_cq{}; };
    api.destroy_cq = [](ibv_cq* cq) {
      delete cq;
      return 0;
    };
    api.reg_mr_iova2 = [](ibv_pd* pd, void*, size_t, uint64_t, unsigned) -> ibv_mr* {
      if (pd && device.refuses.contains(names.at(pd))) {
        errno = EOPNOTSUPP;
        return nullptr;
      }
      ++device.num_regions;
      auto* const mr = new ibv_mr{};
      mr->rkey = mr->lkey = device.next_key++;
      return mr;
    };
    api.dereg_mr = [](ibv_mr* mr) {
      --device.num_regions;
      delete mr;
      return 0;
    };
    api.get_async_event = [](ibv_context*, ibv_async_event* event) {
      if (!device.fatal.exchange(false)) return -1;
      event->event_type = IBV_EVENT_DEVICE_FATAL;
      return 0;
    };
    api.ack_async_event = [](ibv_async_event*) {};
    api.event_type_str = [](ibv_event_type) { return "local catastrophic error"; };
    return api;
  }();
  return api;
}

std::shared_ptr<Nic> open_nic(const NicPlace& place, const DeviceNode& node = {}) {
  ++device.num_contexts;
  ibv_pd* const pd = &domains.emplace_back();
  names[pd] = place.device;
  return std::make_shared<Nic>(made_up(), Owned<ibv_context>(new ibv_context{}, made_up().close_device),
                               Owned<ibv_pd>(pd, made_up().dealloc_pd), place, Manner{}, node);
}

class VerbsPorts : public ::testing::Test {
 protected:
  VerbsPorts() {
    device.present = true;
    device.fatal = false;
    device.num_attempts = 0;
    ports = *Ports::make({open_nic(place)}, [](const NicPlace& at) -> Result<std::shared_ptr<Nic>> {
      ++device.num_attempts;
      if (!device.present) return Status::Config("there is no RDMA device " + at.device);
      return open_nic(at);
    });
    EXPECT_EQ(*ports->register_everywhere({.base = base, .bytes = 4096}, Rights::kPeersRead), 0U);
    EXPECT_EQ(*ports->register_everywhere({.base = base, .bytes = 64}, Rights::kPeersReadWords), 1U);
  }
  ~VerbsPorts() override {
    ports.reset();
    EXPECT_EQ(device.num_contexts, 0);
    EXPECT_EQ(device.num_regions, 0);
  }

  std::vector<uint32_t> rkeys() const {
    return {ports->key(0, Access::kRead).rkeys[0][0], ports->key(1, Access::kReadWords).rkeys[0][0]};
  }
  PortState state() const { return ports->states().front(); }

  /// As the owner's thread does when the device is gone.
  void lose() {
    device.fatal = true;
    ports->at(0)->nic->take_events();
    ASSERT_EQ(ports->poll(0, now), Ports::Change::kLost);
    ports->release(0, now);
  }
  /// Looks every 250 ms of made-up time, in which jobs take none.
  Ports::Change look_for(int64_t ns) {
    for (const int64_t end = now + ns; now < end;) {
      now += 250'000'000;
      for (int look = 0; look < 2; ++look) {  // one begins a job, one sees how it ended
        await_job();
        if (ports->poll(0, now) == Ports::Change::kBack) return Ports::Change::kBack;
      }
    }
    await_job();
    return Ports::Change::kNone;
  }
  void await_job() {
    while (ports->busy(0)) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  std::byte* const base = reinterpret_cast<std::byte*>(uint64_t{1} << 40);  // never touched
  const NicPlace place{"made_up", 1, 100'000};
  std::unique_ptr<Ports> ports;
  int64_t now = 1'000'000'000;
};

/// Makes two ports of which one does not register, as a NIC whose driver takes no dma-buf.
std::unique_ptr<Ports> two_ports(bool named) {
  NicPlace able{"able", 1, 100'000}, unable{"unable", 1, 100'000};
  able.named = unable.named = named;
  return *Ports::make({open_nic(unable), open_nic(able)}, [](const NicPlace&) {
    return Result<std::shared_ptr<Nic>>(Status::Config("they stay"));
  });
}

TEST(VerbsLeftOut, APortThatCannotRegisterThePoolLeavesTheOthers) {
  std::byte* const base = reinterpret_cast<std::byte*>(uint64_t{1} << 40);
  const auto chosen = two_ports(false);
  device.refuses = {"unable"};
  ASSERT_TRUE(chosen->register_everywhere({.base = base, .bytes = 4096}, Rights::kPeersRead).ok());
  EXPECT_EQ(chosen->size(), 1u);
  EXPECT_EQ(chosen->address().nics[0].name, "able:1");
  EXPECT_EQ(chosen->key(0, Access::kRead).rkeys.size(), 1u);
  ASSERT_EQ(chosen->left_out().size(), 1u);
  EXPECT_EQ(chosen->left_out()[0].name, "unable:1");
  EXPECT_NE(chosen->left_out()[0].away.find("cannot register"), std::string::npos);
  const auto named = two_ports(true);
  EXPECT_EQ(named->register_everywhere({.base = base, .bytes = 4096}, Rights::kPeersRead).status().code(),
            Code::kTransportUnavailable);
  device.refuses = {"unable", "able"};
  EXPECT_FALSE(two_ports(false)->register_everywhere({.base = base, .bytes = 64}, Rights::kLocal).ok());
  device.refuses.clear();
}

TEST_F(VerbsPorts, ADeviceThatDiedIsClosedAndNothingOfItIsLeft) {
  device.present = false;
  lose();
  EXPECT_EQ(ports->at(0), nullptr);
  look_for(1'000'000'000);
  EXPECT_EQ(device.num_contexts, 0);
  EXPECT_EQ(device.num_regions, 0);
  EXPECT_EQ(rkeys(), (std::vector<uint32_t>{0, 0}));
  EXPECT_TRUE(ports->locals(0).empty());
  EXPECT_EQ(state(), (PortState{"made_up:1", "failed: local catastrophic error", 1, false}));
  EXPECT_EQ(ports->why_away(0).what(), "RDMA port made_up:1 failed: local catastrophic error");
}

TEST_F(VerbsPorts, ItIsFoundAgainWithAllThatWasRegisteredUnderOtherKeys) {
  const std::vector<uint32_t> before = rkeys();
  device.present = false;
  lose();
  EXPECT_EQ(look_for(20'000'000'000), Ports::Change::kNone);
  device.present = true;
  EXPECT_EQ(look_for(6'000'000'000), Ports::Change::kBack);
  EXPECT_EQ(state(), (PortState{"made_up:1", "", 1, false}));
  const std::vector<uint32_t> after = rkeys();
  EXPECT_NE(after[0], before[0]);
  EXPECT_NE(after[1], before[1]);
  EXPECT_EQ(device.num_regions, 2);
  ASSERT_EQ(ports->locals(0).size(), 2U);
  EXPECT_EQ(ports->locals(0)[0].base, base);
  EXPECT_EQ(ports->locals(0)[0].lkeys, std::vector<uint32_t>{after[0]});
}

TEST_F(VerbsPorts, ARegionThatIsDroppedGoesAndTheNextHasAnotherNumber) {
  ports->drop(0);
  EXPECT_EQ(device.num_regions, 1);
  EXPECT_EQ(ports->key(0, Access::kRead).rkeys[0], std::vector<uint32_t>{});
  ASSERT_EQ(ports->locals(0).size(), 2U);
  EXPECT_EQ(ports->locals(0)[0].bytes, 0U);  // so that nothing fits into it
  EXPECT_EQ(*ports->register_everywhere({.base = base, .bytes = 64}, Rights::kPeersRead), 2U);
  lose();
  EXPECT_EQ(look_for(6'000'000'000), Ports::Change::kBack);
  EXPECT_EQ(device.num_regions, 2);
  EXPECT_EQ(ports->locals(0).size(), 3U);
}

TEST_F(VerbsPorts, ARegionThatIsRefusedCountsAndLeavesNoPortOut) {
  ASSERT_TRUE(ports->register_everywhere({.base = base, .bytes = 64}, Rights::kPeersWriteWords).ok());
  device.refuses = {"made_up"};
  EXPECT_FALSE(ports->register_everywhere({.base = base, .bytes = 64}, Rights::kPeersRead).ok());
  device.refuses.clear();
  EXPECT_EQ(ports->size(), 1U);
  EXPECT_EQ(*ports->register_everywhere({.base = base, .bytes = 64}, Rights::kPeersRead), 4U);
}

TEST_F(VerbsPorts, WhoStillHoldsWhatIsGoneIsTold) {
  auto held = ports->at(0)->nic;
  device.present = false;
  lose();
  look_for(1'000'000'000);
  EXPECT_TRUE(state().held);
  EXPECT_EQ(device.num_contexts, 1);
  EXPECT_EQ(device.num_regions, 0);
  EXPECT_FALSE(held->check().ok());
  held.reset();
  EXPECT_FALSE(state().held);
  EXPECT_EQ(device.num_contexts, 0);
}

TEST_F(VerbsPorts, ItIsLookedForEverLessOften) {
  device.present = false;
  lose();
  look_for(2'000'000'000);
  EXPECT_GE(device.num_attempts, 3);
  const int at_first = device.num_attempts;
  look_for(60'000'000'000);
  EXPECT_LE(device.num_attempts - at_first, 16);
  EXPECT_GE(device.num_attempts - at_first, 11);
}

TEST_F(VerbsPorts, ClosingEndsTheSearch) {
  device.present = false;
  lose();
  ports->close();
  EXPECT_EQ(ports->poll(0, now + 60'000'000'000), Ports::Change::kNone);
  EXPECT_EQ(device.num_attempts, 0);
}

TEST(VerbsSearch, WaitsTwiceAsLongEachTimeUpToABound) {
  ReopenBackoff backoff;
  backoff.lost(0);
  int64_t now = 0, last = 0;
  std::vector<int64_t> waits;
  for (; waits.size() < 9; now += 10'000'000) {
    if (!backoff.due(now)) continue;
    waits.push_back((now - last) / 1'000'000);
    last = now;
    backoff.missed(now);
  }
  EXPECT_EQ(waits, (std::vector<int64_t>{100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000}));
}

TEST(VerbsSearch, OneThatComesAndGoesIsTrustedLess) {
  ReopenBackoff backoff;
  backoff.lost(0);
  for (int times = 0; times < 4; ++times) {
    backoff.found(0);
    backoff.lost(1'000'000'000);
  }
  EXPECT_FALSE(backoff.due(1'000'000'000 + 8 * ReopenBackoff::kFirstNs));
  backoff.found(0);
  backoff.lost(ReopenBackoff::kSteadyNs);
  EXPECT_TRUE(backoff.due(ReopenBackoff::kSteadyNs + ReopenBackoff::kFirstNs));
}

TEST(VerbsNode, GoesWithItsDeviceAndIsNotTakenForTheNext) {
  const auto path = std::filesystem::temp_directory_path() / ("node-" + std::to_string(::getpid()));
  EXPECT_FALSE(DeviceNode(path).removed());  // never seen
  std::filesystem::create_directory(path);
  const DeviceNode node(path);
  EXPECT_FALSE(node.removed());
  const auto aside = path.string() + "-aside";
  std::filesystem::rename(path, aside);
  EXPECT_TRUE(node.removed());
  std::filesystem::create_directory(path);
  EXPECT_TRUE(node.removed());
  std::filesystem::remove(path);
  std::filesystem::remove(aside);
}

TEST(VerbsNode, ARemovalThatNoEventTellsOfIsSeen) {
  const auto path = std::filesystem::temp_directory_path() / ("nic-" + std::to_string(::getpid()));
  std::filesystem::create_directory(path);
  const auto nic = open_nic({"made_up", 1, 1}, DeviceNode(path));
  nic->poll();
  EXPECT_FALSE(nic->removed());
  std::filesystem::remove(path);
  nic->poll();
  nic->poll();
  EXPECT_TRUE(nic->removed());
  EXPECT_EQ(nic->losses(), 1U);
  EXPECT_EQ(nic->why_lost().what(), "RDMA port made_up:1 was removed");
}

Gid gid_of(const std::string& text) {
  Gid gid{};
  EXPECT_EQ(::inet_pton(AF_INET6, text.c_str(), gid.data()), 1) << text;
  return gid;
}

class VerbsAddressing : public ::testing::Test {
 protected:
  /// Connects a queue pair of this port, and returns what it was told on its way to INIT, RTR and RTS.
  std::vector<ibv_qp_attr> connect(const std::shared_ptr<Nic>& nic, const std::string& peer = "fe80::9",
                                   LivenessTimeouts timeouts = {}) {
    machine.modified.clear();
    const std::unique_ptr<Cq> cq = *Cq::create(nic, 16, false);
    const std::unique_ptr<Qp> qp = *Qp::create(nic, *cq, 4, 1);
    const QpAddress to{.lid = 33, .gid = gid_of(peer), .mtu = 1, .reads_out = 1, .reads_in = 1};
    EXPECT_TRUE(qp->connect(to, timeouts).ok());
    EXPECT_EQ(machine.modified.size(), 3U);
    machine.modified.resize(3);
    return machine.modified;
  }
  ibv_ah_attr path(const std::string& peer) {
    auto nic = machine.open("mlx5_0");
    EXPECT_TRUE(nic.ok()) << nic.status().what();
    return connect(*nic, peer)[1].ah_attr;
  }
  Result<std::shared_ptr<Nic>> open_with(const std::string& gid) {
    return machine.open("mlx5_0", {.gid = *GidChoice::parse(gid)});
  }

  testing::MadeUpMachine machine;
};

TEST_F(VerbsAddressing, APortThatNeedsAGlobalHeaderHasOneWithinItsSubnetToo) {
  testing::MadeUpPort& port = machine.add_infiniband("mlx5_0");
  EXPECT_EQ(path("fe80::9").is_global, 0);
  port.attributes.flags = IBV_QPF_GRH_REQUIRED;
  const ibv_ah_attr global = path("fe80::9");
  EXPECT_EQ(global.is_global, 1);
  EXPECT_EQ(global.dlid, 33);
  EXPECT_EQ(std::memcmp(global.grh.dgid.raw, gid_of("fe80::9").data(), 16), 0);
}

TEST_F(VerbsAddressing, APortThatNeedsAGlobalHeaderAndHasNoGidIsRefused) {
  testing::MadeUpPort& port = machine.add_infiniband("mlx5_0");
  port.gids.clear();
  EXPECT_TRUE(machine.open("mlx5_0").ok());
  port.attributes.flags = IBV_QPF_GRH_REQUIRED;
  EXPECT_EQ(machine.open("mlx5_0").status().what(), "RDMA port mlx5_0:1 needs global routes and has no GID");
}

TEST_F(VerbsAddressing, AnotherSubnetIsReachedByTheLidOfItsRoutableGid) {
  machine.add_infiniband("mlx5_0").gids = {{"fe80::1", ""}, {"fec0:0:5:1::1", ""}};
  const ibv_ah_attr across = path("fec0:0:9:2::7");
  EXPECT_EQ(across.is_global, 1);
  EXPECT_EQ(across.dlid, 9);
  EXPECT_EQ(across.grh.sgid_index, 1);
  const ibv_ah_attr within = path("fec0:0:6:1::7");
  EXPECT_EQ(within.is_global, 0);
  EXPECT_EQ(within.dlid, 33);
  const ibv_ah_attr without = path("fec0:0:0:2::7");
  EXPECT_EQ(without.is_global, 1);
  EXPECT_EQ(without.dlid, 33) << "it has none";
}

TEST_F(VerbsAddressing, AGidIsChosenByIndexAddressOrSubnet) {
  machine.add_roce("mlx5_0").gids = {{"fe80::2", "RoCE v2"},         {"::ffff:10.0.0.1", "IB/RoCE v1"},
                                     {"::ffff:10.0.0.1", "RoCE v2"}, {"::ffff:10.1.0.1", "RoCE v2"},
                                     {"2001:db8:1::5", "RoCE v2"},   {"::ffff:10.1.128.1", "RoCE v2"}};
  const std::vector<std::pair<std::string, int>> choices{{"", 2},
                                                         {"3", 3},
                                                         {"0", 0},
                                                         {"10.1.0.1", 3},
                                                         {"10.1.0.0/16", 3},
                                                         {"10.1.128.0/17", 5},
                                                         {"10.0.0.0/8", 2},
                                                         {"2001:db8::/32", 4},
                                                         {"::/0", 2},
                                                         {"fe80::/10", 0}};
  for (const auto& [text, index] : choices) {
    const auto nic = open_with(text);
    ASSERT_TRUE(nic.ok()) << text << ": " << nic.status().what();
    EXPECT_EQ((*nic)->gid_index(), index) << text;
    EXPECT_EQ(connect(*nic, "::ffff:10.1.0.2")[1].ah_attr.grh.sgid_index, index);
  }
}

TEST_F(VerbsAddressing, AGidThatThePortDoesNotHaveIsRefusedWithThoseItHas) {
  machine.add_roce("mlx5_0").gids = {{"::ffff:10.0.0.1", "IB/RoCE v1"}, {"::ffff:10.0.0.1", "RoCE v2"}};
  for (const std::string text : {"0", "7", "10.1.0.0/16", "2001:db8::1"}) {
    EXPECT_EQ(open_with(text).status().what(),
              "RDMA port mlx5_0:1 has no GID " + text + ": it has 10.0.0.1 (index 1)");
  }
}

TEST_F(VerbsAddressing, MalformedChoicesOfAGidAreRefused) {
  for (const char* text :
       {"256", "-1", "1.5", "x", "10.0.0.0/33", "10.0.0.0/", "::/129", "/8", "10.0.0.0/-1"}) {
    EXPECT_EQ(GidChoice::parse(text).status().code(), Code::kConfig) << text;
  }
}

TEST_F(VerbsAddressing, APartitionIsFoundByItsKey) {
  machine.add_infiniband("mlx5_0").pkeys = {0xffff, 0x8001, 0x0002, 0x0000, 0x8002};
  const std::vector<std::pair<uint16_t, int>> keys{{0, 0}, {0xffff, 0}, {0x8001, 1}, {0x0001, 1}, {2, 4}};
  for (const auto& [key, index] : keys) {
    const auto nic = machine.open("mlx5_0", {.pkey = key});
    ASSERT_TRUE(nic.ok()) << nic.status().what();
    EXPECT_EQ(connect(*nic)[0].pkey_index, index) << key;
  }
  EXPECT_EQ(machine.open("mlx5_0", {.pkey = 0x8003}).status().what(),
            "RDMA port mlx5_0:1 is not in the partition 0x8003: it is in 0xffff, 0x8001, 0x0002, 0x8002");
}

TEST_F(VerbsAddressing, ClassesAndTimeoutsReachTheQueuePair) {
  machine.add_infiniband("mlx5_0").attributes.flags = IBV_QPF_GRH_REQUIRED;
  const auto nic = machine.open("mlx5_0", {.traffic_class = 106, .service_level = 5});
  const std::vector<ibv_qp_attr> told = connect(*nic, "fe80::9", {.timeout = 17, .retries = 3});
  EXPECT_EQ(told[1].ah_attr.sl, 5);
  EXPECT_EQ(told[1].ah_attr.grh.traffic_class, 106);
  EXPECT_EQ(told[2].timeout, 17);
  EXPECT_EQ(told[2].retry_cnt, 3);
}

TEST_F(VerbsAddressing, TwoNicsAgreeOnTheirVendorsOptions) {
  machine.add_infiniband("mlx5_0");
  const auto nic = *machine.open("mlx5_0");
  const std::unique_ptr<Cq> cq = *Cq::create(nic, 16, false);
  machine.ece_known = 0b0111;
  const std::unique_ptr<Qp> reader = *Qp::create(nic, *cq, 4, 1);
  const QpAddress hello = reader->address();
  EXPECT_EQ(hello.ece, (Ece{machine.kVendor, 0b0111, 0}));
  machine.ece_known = 0b1110;  // the owner's
  const std::unique_ptr<Qp> owner = *Qp::create(nic, *cq, 4, 1);
  ASSERT_TRUE(owner->connect(hello, {}).ok());
  const QpAddress reply = owner->address();
  EXPECT_EQ(reply.ece, (Ece{machine.kVendor, 0b0110, 0}));
  ASSERT_TRUE(reader->connect(reply, {}).ok());
  ASSERT_EQ(machine.ece_set.size(), 2U);
  EXPECT_EQ(machine.ece_set[0].first, owner->get());
  EXPECT_EQ(machine.ece_set[0].second.options, 0b0111U);
  EXPECT_EQ(machine.ece_set[1].second.options, 0b0110U);
}

TEST_F(VerbsAddressing, NicsWithoutSuchOptionsConnectWithoutThem) {
  machine.add_infiniband("mlx5_0");
  const auto nic = *machine.open("mlx5_0");
  const std::unique_ptr<Cq> cq = *Cq::create(nic, 16, false);
  QpAddress peer{.mtu = 1, .reads_out = 1, .reads_in = 1};
  const auto agreed = [&](const Ece& offered) {
    const std::unique_ptr<Qp> qp = *Qp::create(nic, *cq, 4, 1);
    peer.ece = offered;
    EXPECT_TRUE(qp->connect(peer, {}).ok());
    return qp->address().ece;
  };
  EXPECT_EQ(agreed({machine.kVendor, 1, 0}), Ece{}) << "this one has none";
  machine.ece_known = 1;
  EXPECT_EQ(agreed({}), Ece{}) << "the other has none";
  EXPECT_EQ(agreed({77, 1, 0}), Ece{}) << "another vendor";
  EXPECT_EQ(agreed({machine.kVendor, 1, 0}), (Ece{machine.kVendor, 1, 0}));
  machine.api.query_ece = nullptr;  // an old library
  EXPECT_EQ(agreed({machine.kVendor, 1, 0}), Ece{});
}

TEST_F(VerbsAddressing, TheSendQueuesOfAPeerAreBounded) {
  machine.add_infiniband("mlx5_0");
  for (const int sges : {1, 2, 16, 30, 32, 100}) {
    machine.max_sge = sges;
    const auto nic = *machine.open("mlx5_0");
    const Nic::Limits& limits = nic->limits();
    const uint64_t wr_bytes = (32 + 16 * uint64_t{limits.max_sge} + 63) / 64 * 64;
    EXPECT_LE(limits.max_wrs * wr_bytes, 128U << 10) << sges;
    EXPECT_GE(limits.max_wrs, 200U) << "many times what is in flight";
  }
  machine.max_wrs = 100;
  EXPECT_EQ((*machine.open("mlx5_0"))->limits().max_wrs, 100U);
}

TEST_F(VerbsAddressing, QueuesThatAreSleptOnUseAllCompletionVectorsInTurn) {
  machine.num_vectors = 3;
  machine.add_infiniband("mlx5_0");
  const auto nic = machine.open("mlx5_0");
  std::vector<std::unique_ptr<Cq>> queues;
  for (const bool sleeps : {true, true, false, true, true}) queues.push_back(*Cq::create(*nic, 16, sleeps));
  EXPECT_EQ(machine.vectors, (std::vector<int>{0, 1, 0, 2, 0}));
}

TEST_F(VerbsAddressing, APortThatGoesDownEndsItsConnectionsUnlessTheyAreToWait) {
  for (const bool waits : {false, true}) {
    machine.api.get_async_event = [](ibv_context*, ibv_async_event* event) {
      static int num_events;
      if (++num_events % 2 == 0) return -1;
      event->event_type = IBV_EVENT_PORT_ERR;
      event->element.port_num = 1;
      return 0;
    };
    machine.api.ack_async_event = [](ibv_async_event*) {};
    if (!waits) machine.add_infiniband("mlx5_0");
    const auto nic = machine.open("mlx5_0", {.rides_out_link_loss = waits});
    (*nic)->take_events();
    EXPECT_EQ((*nic)->losses(), waits ? 0U : 1U);
  }
}

// A NIC that pods share shows each of them the addresses of all.
TEST_F(VerbsAddressing, GidsOfThisNetworkNamespaceComeFirst) {
  machine.api.local_ips = [] {
    return std::vector<LocalIp>{{gid_of("::ffff:10.56.0.12"), 96 + 24}, {gid_of("2001:db8::7"), 64}};
  };
  testing::MadeUpPort& port = machine.add_roce("mlx5_0");
  const std::vector<std::pair<std::vector<std::string>, int>> cases{
      {{"::ffff:10.56.0.11", "::ffff:10.56.0.12"}, 1},
      {{"::ffff:10.56.0.11", "2001:db8::7"}, 1},
      {{"::ffff:10.56.0.11", "fe80::2"}, 1},
      {{"::ffff:10.56.0.11"}, 0}};
  for (const auto& [addresses, index] : cases) {
    port.attributes.gid_tbl_len = static_cast<int>(addresses.size());
    port.gids.clear();
    for (const std::string& address : addresses) port.gids.emplace_back(address, "RoCE v2");
    const auto nic = machine.open("mlx5_0");
    ASSERT_TRUE(nic.ok()) << nic.status().what();
    EXPECT_EQ((*nic)->gid_index(), index) << addresses.front();
    const bool here = addresses.back() == "::ffff:10.56.0.12";
    EXPECT_EQ((*nic)->address().net_bits, here ? 96U + 24 : addresses.back() == "2001:db8::7" ? 64U : 0U);
  }
}

/// The next event that the device tells.
ibv_event_type next_event = IBV_EVENT_PORT_ACTIVE;
bool has_event = false;

TEST_F(VerbsAddressing, TablesAreReadAgainAfterWhateverMayChangeThem) {
  machine.api.get_async_event = [](ibv_context*, ibv_async_event* event) {
    if (!std::exchange(has_event, false)) return -1;
    event->event_type = next_event;
    event->element.port_num = 1;
    return 0;
  };
  machine.api.ack_async_event = [](ibv_async_event*) {};
  testing::MadeUpPort& port = machine.add_infiniband("mlx5_0");
  for (const ibv_event_type type : {IBV_EVENT_PKEY_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_SM_CHANGE,
                                    IBV_EVENT_CLIENT_REREGISTER, IBV_EVENT_GID_CHANGE}) {
    port.pkeys = {0xffff, 0x8001};
    const auto nic = *machine.open("mlx5_0", {.pkey = 0x8001});
    EXPECT_EQ(nic->pkey_index(), 1);
    next_event = type;
    has_event = true;
    nic->take_events();
    EXPECT_EQ(nic->losses(), 0U) << "nothing has moved";
    port.pkeys = {0x8001, 0xffff};
    has_event = true;
    nic->take_events();
    EXPECT_EQ(nic->pkey_index(), 0) << type;
    EXPECT_EQ(nic->losses(), 1U) << "queue pairs name their partition by its old index";
  }
}

TEST_F(VerbsAddressing, EachConnectionAsksForTheMtu) {
  testing::MadeUpPort& port = machine.add_infiniband("mlx5_0");
  const auto nic = *machine.open("mlx5_0");
  const auto mtu_of = [&] {
    const std::unique_ptr<Cq> cq = *Cq::create(nic, 16, false);
    const std::unique_ptr<Qp> qp = *Qp::create(nic, *cq, 4, 1);
    EXPECT_TRUE(qp->connect({.lid = 33, .mtu = IBV_MTU_4096, .reads_out = 1, .reads_in = 1}, {}).ok());
    EXPECT_EQ(qp->address().mtu, machine.modified[machine.modified.size() - 2].path_mtu);
    return qp->address().mtu;
  };
  EXPECT_EQ(mtu_of(), IBV_MTU_4096);
  port.attributes.active_mtu = IBV_MTU_1024;  // ip link set mtu 1500, which no event tells
  EXPECT_EQ(mtu_of(), IBV_MTU_1024);
}

TEST_F(VerbsAddressing, WhereLargePacketsWereLostTheNextAreSmall) {
  machine.add_infiniband("mlx5_0");
  const auto nic = *machine.open("mlx5_0");
  const Gid peer = gid_of("fe80::9");
  const auto mtu_of = [&](const Gid& owner) {
    auto endpoint = *open_endpoint(nic, nullptr, {0, "here->there", 1, owner}, {}, {});
    return Hello::parse(endpoint->hello())->reader.mtu;
  };
  EXPECT_EQ(mtu_of(peer), IBV_MTU_4096);
  nic->note_large_lost(peer);
  EXPECT_EQ(mtu_of(peer), kSmallMtu);
  EXPECT_EQ(mtu_of(gid_of("fe80::8")), IBV_MTU_4096);
}

Status made_with(const RdmaOptions& rdma) {
  TransportOptions options;
  options.nics.emplace();
  options.rdma = rdma;
  return verbs_make(options).status();
}

TEST(VerbsOptions, OfATransportAreCheckedBeforeAnyDeviceIsOpened) {
  for (const RdmaOptions& wrong :
       {RdmaOptions{.connect = "maybe"}, RdmaOptions{.gid = "x"}, RdmaOptions{.service_level = 16},
        RdmaOptions{.timeout = 32, .silence_ns = INT64_MAX}, RdmaOptions{.retries = 8},
        RdmaOptions{.timeout = 15}, RdmaOptions{.silence_ns = 200'000'000}}) {
    EXPECT_EQ(made_with(wrong).code(), Code::kConfig);
  }
  const Status status = made_with({.timeout = 17, .retries = 7});
  EXPECT_EQ(status.what(), "a NIC resends for 4294 ms, and readers give up after 600 ms");
  EXPECT_NE(status.fix().find("KVLINK_RDMA_SILENCE_S"), std::string::npos);
  EXPECT_EQ(made_with({}).code(), Code::kTransportUnavailable);
  EXPECT_EQ(made_with({.timeout = 17, .retries = 7, .silence_ns = 4'300'000'000}).code(),
            Code::kTransportUnavailable);
}

}  // namespace
}  // namespace kvlink::verbs

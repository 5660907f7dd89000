// SPDX-License-Identifier: Apache-2.0
// NICs: how one is opened, which ones are, and those that reach a GPU's memory directly.

#include "transports/verbs/nic.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "cpp/transports/verbs/made_up_machine.h"
#include "transports/verbs/devices.h"
#include "transports/verbs/queue_pair.h"
#include "transports/verbs/registration.h"

namespace kvlink::verbs {
namespace {

/// The calls that the fake device received. One device at a time: the library's functions carry no object.
struct Device {
  std::mutex mutex;
  std::set<std::pair<uint64_t, uint64_t>> slices;  // address, bytes
  std::set<int> access;
  uint64_t refused_at = 0;  // an address; 0: nothing is refused
  std::atomic<int> num_registered{0};
  struct Attached {
    int fd;
    uint64_t offset, bytes, iova;
  };
  std::vector<Attached> attached;  // parts of dma-bufs
  std::deque<ibv_async_event> events;
  ibv_port_attr port{};
  ibv_qp qp{};
  std::vector<ibv_qp_attr> modified;
} device;

ibv_mr* register_slice(ibv_pd*, void* at, size_t bytes, uint64_t, unsigned access) {
  const auto address = reinterpret_cast<uint64_t>(at);
  std::lock_guard lock(device.mutex);
  if (address == device.refused_at) {
    errno = ENOMEM;
    return nullptr;
  }
  device.slices.emplace(address, bytes);
  device.access.insert(static_cast<int>(access));
  ++device.num_registered;
  auto* const mr = new ibv_mr{};
  mr->rkey = static_cast<uint32_t>(address >> 30);
  return mr;
}

ibv_mr* attach(ibv_pd*, uint64_t offset, size_t bytes, uint64_t iova, int fd, int) {
  std::lock_guard lock(device.mutex);
  device.attached.push_back({fd, offset, bytes, iova});
  ++device.num_registered;
  return new ibv_mr{};
}

int deregister(ibv_mr* mr) {
  --device.num_registered;
  delete mr;
  return 0;
}

int next_event(ibv_context*, ibv_async_event* event) {
  if (device.events.empty()) return -1;
  *event = device.events.front();
  device.events.pop_front();
  return 0;
}

int query_port(ibv_context*, uint8_t, ibv_port_attr* port) {
  *port = device.port;
  return 0;
}

const Api& made_up() {
  static const Api api = [] {
    Api api{};
    api.reg_mr_iova2 = register_slice;
    api.reg_dmabuf_mr = attach;
    api.dereg_mr = deregister;
    api.get_async_event = next_event;
    api.ack_async_event = [](ibv_async_event*) {};
    api.event_type_str = [](ibv_event_type) { return "an event"; };
    api.wc_status_str = [](ibv_wc_status) { return "a status"; };
    api.query_port = query_port;
    api.create_cq = [](ibv_context*, int, void*, ibv_comp_channel*, int) { return new ibv_cq{}; };
    api.destroy_cq = [](ibv_cq* cq) {
      delete cq;
      return 0;
    };
    api.create_qp = [](ibv_pd*, ibv_qp_init_attr*) { return &device.qp; };
    api.destroy_qp = [](ibv_qp*) { return 0; };
    api.modify_qp = [](ibv_qp*, ibv_qp_attr* attributes, int) {
      device.modified.push_back(*attributes);
      return 0;
    };
    return api;
  }();
  return api;
}

class VerbsNic : public ::testing::Test {
 protected:
  VerbsNic() {
    device.slices.clear();
    device.access.clear();
    device.attached.clear();
    device.refused_at = 0;
    device.events.clear();
    device.port = {};
    device.port.state = IBV_PORT_ACTIVE;
  }
  ~VerbsNic() override { EXPECT_EQ(device.num_registered, 0); }

  Result<std::vector<std::shared_ptr<const Memory>>> register_everywhere(uint64_t bytes,
                                                                         Rights rights = Rights::kPeersRead) {
    const std::vector nics{nic};
    return Memory::register_everywhere(nics, MemoryRange{.base = base, .bytes = bytes}, rights);
  }

  /// Never touched.
  std::byte* const base = reinterpret_cast<std::byte*>(uint64_t{1} << 40);
  ibv_context context{};
  std::shared_ptr<Nic> nic = std::make_shared<Nic>(
      made_up(), Owned<ibv_context>(&context, [](ibv_context*) { return 0; }),
      Owned<ibv_pd>(nullptr, [](ibv_pd*) { return 0; }), NicPlace{"made_up", 1, 100'000}, Manner{});
};

TEST_F(VerbsNic, SlicesCoverARangeOnceAndInOrder) {
  for (const uint64_t bytes : {uint64_t{1}, kSliceBytes, kSliceBytes + 1, 21 * kSliceBytes + 5}) {
    device.slices.clear();
    auto memory = register_everywhere(bytes);
    ASSERT_TRUE(memory.ok());
    uint64_t end = reinterpret_cast<uint64_t>(base);
    std::vector<uint32_t> keys;
    for (const auto& [address, slice] : device.slices) {
      EXPECT_EQ(address, end);
      EXPECT_LE(slice, kSliceBytes);
      end += slice;
      keys.push_back(static_cast<uint32_t>(address >> 30));
    }
    EXPECT_EQ(end, reinterpret_cast<uint64_t>(base) + bytes);
    EXPECT_EQ(memory->front()->rkeys(), keys);
  }
}

// A driver maps the whole dma-buf for each registration: with one for all slices, 35 times 70 GiB.
TEST_F(VerbsNic, EachSliceOfDeviceMemoryIsRegisteredFromADmabufOfItsOwn) {
  constexpr uint64_t kInPage = 512, kBytes = 20 * kSliceBytes + 5;
  MemoryRange range{.base = base + kInPage, .bytes = kBytes, .dmabuf_offset = kInPage, .device = true};
  for (int fd = 100; fd < 121; ++fd) range.dmabuf_fds.push_back(fd);
  const std::vector nics{nic, nic};
  const auto memory = Memory::register_everywhere(nics, range, Rights::kPeersRead);
  ASSERT_TRUE(memory.ok()) << memory.status().what();
  std::map<int, int> times;
  for (const Device::Attached& slice : device.attached) {
    ++times[slice.fd];
    EXPECT_EQ(slice.offset, kInPage);
    EXPECT_EQ(slice.iova, iova_of(range) + static_cast<uint64_t>(slice.fd - 100) * kSliceBytes);
    EXPECT_EQ(slice.iova % 4096, slice.offset % 4096) << "the kernel refuses it";
    EXPECT_EQ(slice.bytes, slice.fd == 120 ? 5 : kSliceBytes);
  }
  EXPECT_EQ(times.size(), 21U);
  for (const auto& [fd, count] : times) EXPECT_EQ(count, 2) << "one for each NIC";
}

TEST_F(VerbsNic, DeviceMemoryWithADmabufTooFewIsRefused) {
  MemoryRange range{.base = base, .bytes = kSliceBytes + 1, .dmabuf_fds = {100}, .device = true};
  const std::vector nics{nic};
  const Status status = Memory::register_everywhere(nics, range, Rights::kPeersRead).status();
  EXPECT_EQ(status.code(), Code::kConfig);
  EXPECT_NE(status.what().find("needs 2 dma-bufs, and has 1"), std::string::npos) << status.what();
  EXPECT_TRUE(device.attached.empty());
}

TEST_F(VerbsNic, OneRefusedSliceIsNamedAndNoneIsLeftRegistered) {
  device.refused_at = reinterpret_cast<uint64_t>(base) + 9 * kSliceBytes;
  const Status status = register_everywhere(20 * kSliceBytes).status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_NE(status.what().find("made_up:1 cannot register"), std::string::npos) << status.what();
  EXPECT_NE(status.fix().find("ulimit -l"), std::string::npos) << status.fix();
  EXPECT_EQ(device.num_registered, 0);
}

TEST_F(VerbsNic, OnlyThePeerWordsAreWritableFromOutsideAndNoWordsAreRelaxed) {
  ASSERT_TRUE(register_everywhere(4096, Rights::kLocal).ok());
  ASSERT_TRUE(register_everywhere(4096, Rights::kPeersRead).ok());
  for (const int access : device.access) {
    EXPECT_FALSE(access & IBV_ACCESS_REMOTE_WRITE);
    EXPECT_TRUE(access & IBV_ACCESS_RELAXED_ORDERING);
  }
  device.access.clear();
  ASSERT_TRUE(register_everywhere(4096, Rights::kPeersReadWords).ok());
  EXPECT_EQ(device.access, std::set<int>{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ});
  device.access.clear();
  ASSERT_TRUE(register_everywhere(4096, Rights::kPeersWriteWords).ok());
  EXPECT_EQ(device.access, std::set<int>{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE});
}

TEST_F(VerbsNic, ALostDeviceOrPortEndsEveryConnectionAndSaysWhy) {
  ibv_async_event removed{.element = {}, .event_type = IBV_EVENT_DEVICE_FATAL};
  ibv_async_event down{.element = {}, .event_type = IBV_EVENT_PORT_ERR};
  down.element.port_num = 1;
  ibv_async_event elsewhere = down;
  elsewhere.element.port_num = 2;

  device.events = {elsewhere};
  nic->take_events();
  EXPECT_EQ(nic->losses(), 0U);
  device.events = {removed};
  nic->take_events();
  EXPECT_EQ(nic->losses(), 1U);
  EXPECT_EQ(nic->why_lost().what(), "RDMA port made_up:1 failed: an event");
  device.events = {down};
  nic->take_events();
  EXPECT_EQ(nic->losses(), 2U);
  EXPECT_EQ(nic->why_lost().what(), "RDMA port made_up:1 went down");
}

TEST_F(VerbsNic, TheTrafficClassIsThatOfWhatAQueuePairSends) {
  for (const uint8_t traffic_class : {0, 106, 255}) {
    device.modified.clear();
    const auto marked =
        std::make_shared<Nic>(made_up(), Owned<ibv_context>(&context, [](ibv_context*) { return 0; }),
                              Owned<ibv_pd>(nullptr, [](ibv_pd*) { return 0; }), NicPlace{"made_up", 1, 1},
                              Manner{.traffic_class = traffic_class});
    const std::unique_ptr<Cq> cq = *Cq::create(marked, 16, false);
    const std::unique_ptr<Qp> qp = *Qp::create(marked, *cq, 4, 1);
    ASSERT_TRUE(qp->connect(QpAddress{.mtu = 1, .reads_out = 1, .reads_in = 1}, LivenessTimeouts{}).ok());
    ASSERT_EQ(device.modified.size(), 3U);
    EXPECT_EQ(device.modified[1].qp_state, IBV_QPS_RTR);
    EXPECT_EQ(device.modified[1].ah_attr.grh.traffic_class, traffic_class);
  }
}

TEST_F(VerbsNic, APortThatIsDownSaysWhatToDo) {
  EXPECT_TRUE(nic->check().ok());
  device.port.state = IBV_PORT_DOWN;
  EXPECT_NE(nic->check().fix().find("check the cable"), std::string::npos);
}

TEST_F(VerbsNic, EveryErrorOfACompletionNamesWhereAndTheVendorsError) {
  for (int status = IBV_WC_LOC_LEN_ERR; status <= IBV_WC_GENERAL_ERR; ++status) {
    ibv_wc completion{};
    completion.status = static_cast<ibv_wc_status>(status);
    completion.vendor_err = 77;
    const Status means = failure(made_up(), completion, "rxe0:1 qp 17 -> qp 23");
    EXPECT_TRUE(means.code() == Code::kPeerUnreachable || means.code() == Code::kAccessDenied) << status;
    EXPECT_EQ(means.what().find("rxe0:1 qp 17 -> qp 23: a status (vendor error 77): "), 0U) << means.what();
  }
}

TEST_F(VerbsNic, WhatTheOwnersNicRefusesIsNoLostPeer) {
  for (const auto status : {IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_LOC_PROT_ERR}) {
    ibv_wc completion{};
    completion.status = status;
    EXPECT_EQ(failure(made_up(), completion, "here").code(), Code::kAccessDenied);
  }
  for (const auto status : {IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR, IBV_WC_FATAL_ERR}) {
    ibv_wc completion{};
    completion.status = status;
    EXPECT_EQ(failure(made_up(), completion, "here").code(), Code::kPeerUnreachable);
  }
}

using Names = std::vector<std::string>;
using Nics = std::vector<std::shared_ptr<Nic>>;

class VerbsOpen : public ::testing::Test {
 protected:
  static Names names(const Nics& nics) {
    Names names;
    for (const auto& nic : nics) names.push_back(nic->name());
    return names;
  }

  testing::MadeUpMachine machine;
  std::vector<PortState> left_out;
};

TEST_F(VerbsOpen, WithoutAListEveryActivePortIsOpenedOnce) {
  machine.add_infiniband("mlx5_0");
  machine.add_infiniband("mlx5_1").attributes.state = IBV_PORT_DOWN;
  machine.add_infiniband("mlx5_2");
  const auto nics = open_nics(machine.api, std::nullopt, {}, left_out);
  ASSERT_TRUE(nics.ok()) << nics.status().what();
  EXPECT_EQ(names(*nics), (Names{"mlx5_0:1", "mlx5_2:1"}));
  EXPECT_EQ(machine.num_opened, 3);
  EXPECT_EQ(machine.num_open, 2);
}

// It was asked for ports without end.
TEST_F(VerbsOpen, ADeviceThatCannotBeOpenedIsTriedOnce) {
  machine.add_infiniband("mlx5_0");
  static int num_tries;
  num_tries = 0;
  machine.api.open_device = [](ibv_device*) -> ibv_context* {
    ++num_tries;
    errno = EACCES;
    return nullptr;
  };
  const Status status = open_nics(machine.api, std::nullopt, {}, left_out).status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_EQ(num_tries, 1);
}

TEST_F(VerbsOpen, AnEmptyListOpensNone) {
  machine.add_infiniband("mlx5_0");
  const auto nics = open_nics(machine.api, std::vector<NicOption>{}, {}, left_out);
  ASSERT_FALSE(nics.ok());
  EXPECT_EQ(nics.status().code(), Code::kTransportUnavailable);
  EXPECT_EQ(nics.status().what(), "no RDMA port of this machine serves this pool");
  EXPECT_EQ(machine.num_opened, 0);
}

TEST_F(VerbsOpen, NamedPortsAreOpenedOnceAndNoOthers) {
  machine.add_infiniband("mlx5_0");
  machine.add_infiniband("mlx5_1");
  const auto nics =
      open_nics(machine.api, std::vector<NicOption>{{.port = "mlx5_1:1", .mbps = 5}}, {}, left_out);
  ASSERT_TRUE(nics.ok()) << nics.status().what();
  EXPECT_EQ(names(*nics), Names{"mlx5_1:1"});
  EXPECT_EQ(machine.num_opened, 1);
}

// One VF of many in a pod, or no /dev/infiniband at all: sysfs shows every device of the host.
TEST_F(VerbsOpen, ChosenPortsThatDoNotOpenAreLeftOutOneByOne) {
  testing::MadeUpPort& port = machine.add_infiniband("mlx5_1");
  machine.add_infiniband("mlx5_2").attributes.state = IBV_PORT_DOWN;
  const std::vector<NicOption> chosen{{.port = "mlx5_0:1"}, {.port = "mlx5_1:1"}, {.port = "mlx5_2:1"}};
  const auto nics = open_nics(machine.api, chosen, {}, left_out);
  ASSERT_TRUE(nics.ok()) << nics.status().what();
  EXPECT_EQ(names(*nics), Names{"mlx5_1:1"});
  ASSERT_EQ(left_out.size(), 2u);
  EXPECT_EQ(left_out[0].name, "mlx5_0:1");
  EXPECT_NE(left_out[0].away.find("--device=/dev/infiniband"), std::string::npos) << left_out[0].away;
  EXPECT_NE(left_out[1].away.find("is down"), std::string::npos) << left_out[1].away;
  port.attributes.state = IBV_PORT_DOWN;
  EXPECT_EQ(open_nics(machine.api, chosen, {}, left_out).status().code(), Code::kTransportUnavailable);
}

TEST_F(VerbsOpen, ANameThatAUserGaveIsAnError) {
  machine.add_infiniband("mlx5_1");
  const std::vector<NicOption> named{{.port = "mlx5_0:1", .named = true},
                                     {.port = "mlx5_1:1", .named = true}};
  const Status status = open_nics(machine.api, named, {}, left_out).status();
  EXPECT_EQ(status.code(), Code::kConfig);
  EXPECT_EQ(status.fix(), "choose from mlx5_1");
}

TEST_F(VerbsOpen, APeerAcceptsEveryAddressThatIsMade) {
  std::vector<NicOption> all;
  for (int number = 0; number < 40; ++number) {
    const std::string device = "mlx5_" + std::to_string(number);
    machine.add_infiniband(device);
    all.push_back({.port = device + ":1"});
  }
  const auto nics = open_nics(machine.api, all, {}, left_out);
  ASSERT_TRUE(nics.ok());
  EXPECT_EQ((*nics).size(), size_t{kMaxNics});
  EXPECT_EQ(left_out.size(), 40 - size_t{kMaxNics});
  all.back().named = true;
  EXPECT_EQ(open_nics(machine.api, all, {}, left_out).status().code(), Code::kConfig);
}

TEST_F(VerbsOpen, AnElasticFabricAdapterIsRefusedByName) {
  machine.add_efa("rdmap79s0");
  for (const auto& wanted : {std::optional<std::vector<NicOption>>(),
                             std::optional(std::vector<NicOption>{{.port = "rdmap79s0:1"}})}) {
    const Status status = open_nics(machine.api, wanted, {}, left_out).status();
    EXPECT_EQ(status.code(), Code::kTransportUnavailable);
    EXPECT_EQ(status.what(),
              "RDMA device rdmap79s0 is an Elastic Fabric Adapter (EFA), which has no reliable connections");
  }
  EXPECT_EQ(find_active_port(machine.api).code(), Code::kTransportUnavailable);
  EXPECT_EQ(machine.num_opened, 0);
  machine.add_infiniband("mlx5_0");
  EXPECT_EQ(names(*open_nics(machine.api, std::nullopt, {}, left_out)), Names{"mlx5_0:1"});
}

TEST_F(VerbsOpen, OtherDevicesWithoutReliableConnectionsAreRefused) {
  machine.add("usnic_0", IBV_TRANSPORT_USNIC_UDP, IBV_LINK_LAYER_ETHERNET);
  const Status status = machine.open("usnic_0").status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_NE(status.what().find("has no reliable connections"), std::string::npos) << status.what();
}

TEST_F(VerbsOpen, TheProbeOpensNoDevice) {
  EXPECT_EQ(find_active_port(machine.api).what(), "this machine has no RDMA device");
  machine.add_infiniband("mlx5_0");
  EXPECT_TRUE(find_active_port(machine.api).ok());
  machine.write("sys/mlx5_0/ports/1/state", "1: DOWN");
  EXPECT_EQ(find_active_port(machine.api).what(), "RDMA port mlx5_0:1 is down");
  machine.write("sys/mlx5_0/ports/2/state", "4: ACTIVE");
  EXPECT_TRUE(find_active_port(machine.api).ok());
  machine.remove("dev/uverbs-mlx5_0");
  const Status status = find_active_port(machine.api);
  EXPECT_NE(status.fix().find("--device=/dev/infiniband"), std::string::npos) << status.fix();
  EXPECT_EQ(machine.num_opened, 0);
}

using Keys = std::vector<uint32_t>;

class VerbsDirectNic : public ::testing::Test {
 protected:
  std::shared_ptr<const Memory> registered(const MemoryRange& range, Rights rights = Rights::kPeersRead) {
    machine.attached.clear();
    const std::vector nics{*machine.open("mlx5_0")};
    const auto memory = Memory::register_everywhere(nics, range, rights);
    EXPECT_TRUE(memory.ok()) << memory.status().what();
    return memory->front();
  }
  void expect_plain(const MemoryRange& range) {
    const auto memory = registered(range);
    EXPECT_EQ(memory->rkeys(), Keys{100});
    EXPECT_EQ(memory->lkeys(), Keys{100});
    ASSERT_EQ(machine.attached.size(), 1U);
  }

  testing::MadeUpMachine machine;
  const MemoryRange both{.base = reinterpret_cast<std::byte*>(uint64_t{1} << 40),  // never touched
                         .bytes = 4096,
                         .dmabuf_fds = {100},
                         .pcie_dmabuf_fds = {200},
                         .device = true};
};

// A completion takes the other way to the CPU, so nothing may land by this one.
TEST_F(VerbsDirectNic, PeersReadDirectlyAndNothingLandsDirectly) {
  machine.add_infiniband("mlx5_0");
  machine.reaches_directly = true;
  const auto memory = registered(both);
  EXPECT_EQ(memory->rkeys(), Keys{200});
  EXPECT_EQ(memory->lkeys(), Keys{100});
  for (const auto& [fd, directly, rights] : machine.attached) {
    EXPECT_EQ(directly, fd == 200);
    EXPECT_EQ((rights & IBV_ACCESS_LOCAL_WRITE) != 0, !directly);
    EXPECT_EQ((rights & IBV_ACCESS_REMOTE_READ) != 0, directly);
    EXPECT_EQ(rights & IBV_ACCESS_REMOTE_WRITE, 0);
  }
  EXPECT_EQ(registered(both, Rights::kLocal)->lkeys(), Keys{100});
  EXPECT_EQ(machine.attached.size(), 1U) << "a staging buffer";
}

TEST_F(VerbsDirectNic, WhereAnythingIsMissingMemoryIsRegisteredAsBefore) {
  machine.add_infiniband("mlx5_0");
  expect_plain(both);  // no such function
  machine.reaches_directly = true;
  MemoryRange plain = both;
  plain.pcie_dmabuf_fds.clear();
  expect_plain(plain);
  plain.pcie_dmabuf_fds = {200, 201};
  expect_plain(plain);  // one too many
  machine.refuses_direct = true;
  expect_plain(both);
  machine.refuses_direct = false;
  machine.api.mlx5 = nullptr;
  expect_plain(both);
}

}  // namespace
}  // namespace kvlink::verbs

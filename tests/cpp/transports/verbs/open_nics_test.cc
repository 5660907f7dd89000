// SPDX-License-Identifier: Apache-2.0
// Which ports of a made-up machine are opened, and how often.
#include <gtest/gtest.h>

#include <cerrno>

#include "cpp/transports/verbs/made_up_machine.h"
#include "transports/verbs/devices.h"

namespace kvlink::verbs {
namespace {

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

}  // namespace
}  // namespace kvlink::verbs

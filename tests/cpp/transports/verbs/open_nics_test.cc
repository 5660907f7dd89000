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
};

TEST_F(VerbsOpen, WithoutAListEveryActivePortIsOpenedOnce) {
  machine.add_infiniband("mlx5_0");
  machine.add_infiniband("mlx5_1").attributes.state = IBV_PORT_DOWN;
  machine.add_infiniband("mlx5_2");
  const auto nics = open_nics(machine.api, std::nullopt, {});
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
  const Status status = open_nics(machine.api, std::nullopt, {}).status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_EQ(num_tries, 1);
}

TEST_F(VerbsOpen, AnEmptyListOpensNone) {
  machine.add_infiniband("mlx5_0");
  const auto nics = open_nics(machine.api, std::vector<NicOption>{}, {});
  ASSERT_FALSE(nics.ok());
  EXPECT_EQ(nics.status().code(), Code::kTransportUnavailable);
  EXPECT_EQ(nics.status().what(), "no RDMA port of this machine serves this pool");
  EXPECT_EQ(machine.num_opened, 0);
}

TEST_F(VerbsOpen, NamedPortsAreOpenedOnceAndNoOthers) {
  machine.add_infiniband("mlx5_0");
  machine.add_infiniband("mlx5_1");
  const auto nics = open_nics(machine.api, std::vector<NicOption>{{.port = "mlx5_1:1", .mbps = 5}}, {});
  ASSERT_TRUE(nics.ok()) << nics.status().what();
  EXPECT_EQ(names(*nics), Names{"mlx5_1:1"});
  EXPECT_EQ(machine.num_opened, 1);
}

TEST_F(VerbsOpen, AnElasticFabricAdapterIsRefusedByName) {
  machine.add_efa("rdmap79s0");
  for (const auto& wanted : {std::optional<std::vector<NicOption>>(),
                             std::optional(std::vector<NicOption>{{.port = "rdmap79s0:1"}})}) {
    const Status status = open_nics(machine.api, wanted, {}).status();
    EXPECT_EQ(status.code(), Code::kTransportUnavailable);
    EXPECT_EQ(status.what(),
              "RDMA device rdmap79s0 is an Elastic Fabric Adapter (EFA), which has no reliable connections");
  }
  EXPECT_EQ(find_active_port(machine.api).code(), Code::kTransportUnavailable);
  EXPECT_EQ(machine.num_opened, 0);
  machine.add_infiniband("mlx5_0");
  EXPECT_EQ(names(*open_nics(machine.api, std::nullopt, {})), Names{"mlx5_0:1"});
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

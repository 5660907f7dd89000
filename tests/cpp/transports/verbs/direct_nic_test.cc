// SPDX-License-Identifier: Apache-2.0
// A NIC with a PCIe function of its own beside the GPU registers memory through it.
#include <gtest/gtest.h>

#include "cpp/transports/verbs/made_up_machine.h"
#include "transports/verbs/registration.h"

namespace kvlink::verbs {
namespace {

using Attached = std::vector<std::pair<int, bool>>;

class VerbsDirectNic : public ::testing::Test {
 protected:
  Attached attached(const MemoryRange& range) {
    machine.attached.clear();
    const std::vector nics{*machine.open("mlx5_0")};
    EXPECT_TRUE(Memory::register_everywhere(nics, range, Rights::kPeersRead).ok());
    return machine.attached;
  }

  testing::MadeUpMachine machine;
  const MemoryRange both{.base = reinterpret_cast<std::byte*>(uint64_t{1} << 40),  // never touched
                         .bytes = 4096,
                         .dmabuf_fds = {100},
                         .pcie_dmabuf_fds = {200},
                         .device = true};
};

TEST_F(VerbsDirectNic, MemoryWithBothMappingsIsRegisteredDirectly) {
  machine.add_infiniband("mlx5_0");
  EXPECT_EQ(attached(both), (Attached{{100, false}})) << "it has no such function";
  machine.reaches_directly = true;
  EXPECT_EQ(attached(both), (Attached{{200, true}}));
  MemoryRange plain = both;
  plain.pcie_dmabuf_fds.clear();
  EXPECT_EQ(attached(plain), (Attached{{100, false}}));
}

TEST_F(VerbsDirectNic, ARefusalOrAnOldLibraryLeavesTheOtherWay) {
  machine.add_infiniband("mlx5_0");
  machine.reaches_directly = machine.refuses_direct = true;
  EXPECT_EQ(attached(both), (Attached{{100, false}}));
  machine.refuses_direct = false;
  machine.api.mlx5 = nullptr;
  EXPECT_EQ(attached(both), (Attached{{100, false}}));
}

}  // namespace
}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
// A NIC with a PCIe function of its own beside the GPU registers memory through it.
#include <gtest/gtest.h>

#include "cpp/transports/verbs/made_up_machine.h"
#include "transports/verbs/registration.h"

namespace kvlink::verbs {
namespace {

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

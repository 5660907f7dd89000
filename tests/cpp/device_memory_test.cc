// SPDX-License-Identifier: Apache-2.0
// Pools in GPU memory: which transports are not given any, and what then is said. A mapping that nobody may
// touch stands for the GPU: a transport that followed the address would end the test.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "engine.h"

namespace kvlink {
namespace {

constexpr uint64_t kBytes = 1 << 20;
constexpr const char* kHostTransports[] = {"loopback", "shm", "cma", "tcp", "fault+tcp"};

class Untouchable {
 public:
  Untouchable() : base_(::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Untouchable() { ::munmap(base_, kBytes); }
  Untouchable(const Untouchable&) = delete;
  Untouchable& operator=(const Untouchable&) = delete;

  MemoryRange range() const {
    return {.base = static_cast<std::byte*>(base_), .bytes = kBytes, .device = true};
  }

 private:
  void* const base_;
};

std::unique_ptr<Engine> make(const std::string& transport) {
  EngineOptions options;
  options.transports = {transport};
  auto made = Engine::make(options);
  EXPECT_TRUE(made.ok()) << made.status().what();
  return std::move(*made);
}

struct DeviceMemory : testing::TestWithParam<const char*> {};

TEST_P(DeviceMemory, IsNotLentByHostTransports) {
  const Untouchable gpu;
  const auto engine = make(GetParam());
  ASSERT_TRUE(engine->add_pool_region(gpu.range()).ok());
  ASSERT_TRUE(engine->start().ok());
  const TransportAccess access = engine->access().front();
  EXPECT_NE(access.refused.find("the pool is GPU memory; use verbs"), std::string::npos) << access.refused;
  EXPECT_TRUE(access.pool_keys.empty());
  EXPECT_EQ(engine->accept(GetParam(), {"hello"}).status().code(), Code::kTransportUnavailable);
}

TEST_P(DeviceMemory, IsNoDestinationOfHostTransports) {
  const auto host = *HostMemory::allocate(kBytes, false);
  const auto owner = make(GetParam());
  ASSERT_TRUE(owner->add_pool_region(host->range()).ok());
  ASSERT_TRUE(owner->start().ok());

  const Untouchable gpu;
  const auto reader = make(GetParam());
  ASSERT_TRUE(reader->add_pool_region(host->range()).ok());  // one region of a GPU is enough
  ASSERT_TRUE(reader->add_pool_region(gpu.range()).ok());
  ASSERT_TRUE(reader->start().ok());
  const Status refused = reader->open(GetParam(), owner->access().front().address).status();
  EXPECT_EQ(refused.code(), Code::kTransportUnavailable);
  EXPECT_NE(refused.what().find("GPU memory"), std::string::npos) << refused.what();
}

INSTANTIATE_TEST_SUITE_P(HostTransports, DeviceMemory, testing::ValuesIn(kHostTransports),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '+', '_');
                           return name;
                         });

TEST(Refused, HostMemoryThatCannotBeLentIsStillADestination) {
  const auto lent = *HostMemory::allocate(kBytes, false);
  const auto owner = make("shm");
  ASSERT_TRUE(owner->add_pool_region(lent->range()).ok());
  ASSERT_TRUE(owner->start().ok());

  std::vector<std::byte> foreign(kBytes);
  const auto reader = make("shm");
  ASSERT_TRUE(reader->add_pool_region({.base = foreign.data(), .bytes = kBytes}).ok());
  ASSERT_TRUE(reader->start().ok());
  EXPECT_NE(reader->access().front().refused, "");
  EXPECT_TRUE(reader->open("shm", owner->access().front().address).ok());
}

TEST(Refused, ATransportThatWasGivenUpSaysWhy) {
  const auto host = *HostMemory::allocate(kBytes, false);
  const auto engine = make("tcp");
  const std::string address = engine->access().front().address;
  engine->refuse("tcp", "the moon is full");
  engine->refuse("shm", "not one of this engine's");
  ASSERT_TRUE(engine->add_pool_region(host->range()).ok());
  ASSERT_TRUE(engine->start().ok());
  ASSERT_EQ(engine->access().size(), 1u);
  EXPECT_EQ(engine->access().front().refused, "the moon is full");
  EXPECT_TRUE(engine->access().front().pool_keys.empty());
  EXPECT_EQ(engine->open("tcp", address).status().what(), "this worker does not use tcp: the moon is full");
  EXPECT_FALSE(engine->accept("tcp", {"hello"}).ok());
}

}  // namespace
}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// Pools in GPU memory: which transports export them, and the reason if none does.
#include "cpp/device/fake_device.h"
#include "engine/engine.h"

namespace kvlink::testing {
namespace {

constexpr uint64_t kBytes = 1 << 20;
constexpr const char* kHostTransports[] = {"loopback", "shm", "cma", "tcp", "fault+tcp"};

Result<std::shared_ptr<DeviceCopier>> no_driver(const std::byte*) {
  return Status::Unavailable("libcuda.so.1 is absent", "install the driver");
}

std::unique_ptr<Engine> make(const std::string& transport, MakeDeviceCopier make_copier = no_driver,
                             uint64_t bounce_bytes = Bounce::kLeastBytes) {
  EngineOptions options;
  options.transports = {transport};
  options.make_copier = std::move(make_copier);
  options.bounce_bytes = bounce_bytes;
  auto made = Engine::make(options);
  EXPECT_TRUE(made.ok()) << made.status().what();
  return std::move(*made);
}

bool mentions(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

TransportAccess access_of(const std::string& transport, FakeDevice& gpu, MakeDeviceCopier make_copier,
                          uint64_t bounce_bytes = Bounce::kLeastBytes, const std::string& why = {}) {
  const auto engine = make(transport, std::move(make_copier), bounce_bytes);
  if (!why.empty()) engine->force_bounce(transport, why);
  EXPECT_TRUE(engine->add_pool_region(gpu.range()).ok());
  EXPECT_TRUE(engine->start().ok());
  const TransportAccess access = engine->access().front();
  EXPECT_EQ(access.pool_keys.empty(), !access.refused.empty());
  const bool given_up = !access.refused.empty() && !access.bounces;
  EXPECT_EQ(mentions(engine->accept(transport, {"hello"}).status().what(), "does not offer"), given_up);
  return access;
}

struct DeviceMemory : ::testing::TestWithParam<const char*> {};

TEST_P(DeviceMemory, IsRefusedWhereNothingCanCopy) {
  FakeDevice gpu(kBytes);
  const TransportAccess access = access_of(GetParam(), gpu, no_driver);
  EXPECT_FALSE(access.bounces);
  EXPECT_TRUE(mentions(access.refused, "libcuda.so.1 is absent; install the driver")) << access.refused;
  EXPECT_TRUE(mentions(access.refused, "use verbs (KVLINK_TRANSPORTS) or a pool in host memory"));

  const auto host = *HostMemory::allocate(kBytes, false);
  const auto owner = make(GetParam()), reader = make(GetParam());
  ASSERT_TRUE(owner->add_pool_region(host->range()).ok());
  ASSERT_TRUE(owner->start().ok());
  ASSERT_TRUE(reader->add_pool_region(gpu.range()).ok());
  ASSERT_TRUE(reader->start().ok());
  const Status refused = reader->open(GetParam(), owner->access().front().address).status();
  EXPECT_EQ(refused.code(), Code::kTransportUnavailable);
  EXPECT_TRUE(mentions(refused.what(), "GPU memory")) << refused.what();
}

TEST_P(DeviceMemory, IsRefusedWhereStagingIsNotAllowed) {
  FakeDevice gpu(kBytes);
  const TransportAccess access = access_of(GetParam(), gpu, gpu.maker(), 0);
  EXPECT_FALSE(access.bounces);
  EXPECT_TRUE(mentions(access.refused, "bounce is not allowed; add it to KVLINK_GPUDIRECT"))
      << access.refused;
}

TEST_P(DeviceMemory, IsLentByWhoSendsIt) {
  FakeDevice gpu(kBytes);
  const TransportAccess access = access_of(GetParam(), gpu, gpu.maker());
  EXPECT_TRUE(access.bounces);
  EXPECT_EQ(gpu.pinned_bytes(), Bounce::kLeastBytes);
  const bool sends = mentions(GetParam(), "tcp");
  EXPECT_EQ(access.refused.empty(), sends) << access.refused;
  EXPECT_TRUE(sends || mentions(access.refused, "by themselves; allow tcp, which sends from it"));
}

INSTANTIATE_TEST_SUITE_P(HostTransports, DeviceMemory, ::testing::ValuesIn(kHostTransports),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '+', '_');
                           return name;
                         });

TEST(DevicePool, PeersAreToldWhyNicsDoNotReachIt) {
  FakeDevice gpu(kBytes);
  const TransportAccess access = access_of("shm", gpu, gpu.maker(), Bounce::kLeastBytes, "no dma-buf here");
  EXPECT_TRUE(access.bounces);
  EXPECT_EQ(access.refused, "no dma-buf here");
}

TEST(DevicePool, IsNotMixedWithOther) {
  FakeDevice gpu(kBytes);
  const auto host = *HostMemory::allocate(kBytes, false);
  const auto engine = make("tcp");
  ASSERT_TRUE(engine->add_pool_region(host->range()).ok());
  EXPECT_EQ(engine->add_pool_region(gpu.range()).status().code(), Code::kConfig);
}

TEST(Refused, HostMemoryThatCannotBeLentIsStillADestination) {
  const auto exported = *HostMemory::allocate(kBytes, false);
  const auto owner = make("shm");
  ASSERT_TRUE(owner->add_pool_region(exported->range()).ok());
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
  engine->disable("tcp", "the moon is full");
  engine->disable("shm", "not one of this engine's");
  ASSERT_TRUE(engine->add_pool_region(host->range()).ok());
  ASSERT_TRUE(engine->start().ok());
  ASSERT_EQ(engine->access().size(), 1u);
  EXPECT_EQ(engine->access().front().refused, "the moon is full");
  EXPECT_TRUE(engine->access().front().pool_keys.empty());
  EXPECT_EQ(engine->open("tcp", address).status().what(), "this worker does not use tcp: the moon is full");
  EXPECT_FALSE(engine->accept("tcp", {"hello"}).ok());
}

}  // namespace
}  // namespace kvlink::testing

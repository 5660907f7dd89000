// SPDX-License-Identifier: Apache-2.0
// Reads by way of the staging buffer, in the memory of the GPU that tests/fake_cuda stands for.
#include "staging/device_staging.h"

#include "cpp/transports/cuda/peers.h"
#include "device/cuda_copier.h"

namespace kvlink::testing {
namespace {

constexpr uint32_t kHostRegion = 1, kStagingRegion = 2;  // behind the pool
constexpr uint64_t kStagingBytes = 2 * SlotRing::kSlotBytes;

struct StagedReader {
  explicit StagedReader(const GpuOwner& owner, const std::string& image) {
    TransportOptions options;
    const auto kernel = fake_kernel(image);
    options.cuda_kernel = kernel;
    const MakeDeviceCopier copiers = [kernel](const std::byte* memory) {
      return make_cuda_copier(memory, kernel, 0);
    };
    staging = *make_staging(buffer.range(), copiers);
    transport = std::move(*make_transport("cuda", options));
    [[maybe_unused]] const auto region = transport->register_memory(pool.range(), Access::kRead);
    EXPECT_TRUE(transport->register_memory({.base = host.data(), .bytes = host.size()}, Access::kLocal).ok());
    EXPECT_TRUE(transport->register_memory(buffer.range(), Access::kLocal).ok());
    poison();
    auto opened = open_one(*transport, owner.card().address);
    EXPECT_TRUE(opened.ok()) << opened.status().what();
    auto wrapped = DeviceStaging(staging, "cuda", true, kStagingRegion).wrap(std::move(*opened));
    EXPECT_TRUE(wrapped.ok()) << wrapped.status().what();
    endpoint = std::move(*wrapped);
    const Status status =
        endpoint->establish(*owner.transport->accept(42, endpoint->hello()), 20 * kSecondNs);
    EXPECT_TRUE(status.ok()) << status.what();
    for (const std::string& key : {owner.card().pool_key, owner.card().table_key, owner.card().words_key}) {
      EXPECT_TRUE(endpoint->import_region(key).ok());
    }
  }
  std::byte* at(uint64_t offset) const { return pool.range().base + offset; }
  void poison() { std::fill(pool.bytes(), pool.bytes() + kPoolBytes, kPoison); }
  Status post(uint64_t token, const Scatter& scatter, bool staged) {
    return staged ? endpoint->post_staged(token, scatter.chunk())
                  : endpoint->post_read(token, scatter.chunk());
  }
  std::vector<SlotRing::Slot> take_all() const {
    std::vector<SlotRing::Slot> taken;
    for (auto slot = staging->ring().take(); slot; slot = staging->ring().take()) {
      taken.push_back(std::move(slot));
    }
    return taken;
  }

  GpuPool pool, buffer{GpuPool::Kind::kKvlink, kStagingBytes};
  std::vector<std::byte> host = std::vector<std::byte>(64);
  std::shared_ptr<StagingBuffer> staging;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<StageableEndpoint> endpoint;
};

/// An owner and a reader of it; with an image the kernel copies.
struct Staging : ::testing::TestWithParam<const char*> {
  void SetUp() override { live = from_fake_cuda<int()>("fake_cuda_live")(); }
  void TearDown() override {
    reader.reset();
    server.reset();
    owner.reset();
    EXPECT_EQ(from_fake_cuda<int()>("fake_cuda_live")(), live) << "something was not freed";
  }
  void open() {
    owner = std::make_unique<GpuOwner>();
    server = std::make_unique<Server>(*owner->transport);
    reader = std::make_unique<StagedReader>(*owner, GetParam());
  }
  /// The bytes of the pool after `scatter` has landed.
  void expect_landed(const Scatter& scatter) {
    std::vector<std::byte> wanted(kPoolBytes, kPoison);
    for (const ReadOp& op : scatter.ops) {
      const std::byte* from = owner->pool.bytes() + op.offset;
      for (uint32_t i = 0; i < op.num_segments; ++i) {
        const Segment& to = scatter.segments[op.first_segment + i];
        std::memcpy(&wanted[static_cast<size_t>(to.local - reader->at(0))], from, to.bytes);
        from += to.bytes;
      }
    }
    EXPECT_EQ(std::memcmp(reader->pool.bytes(), wanted.data(), kPoolBytes), 0);
    EXPECT_EQ(reader->take_all().size(), 2u);
  }

  int live = 0;
  std::unique_ptr<GpuOwner> owner;
  std::unique_ptr<Server> server;
  std::unique_ptr<StagedReader> reader;
};

/// Blocks of 16 tokens and 8 heads of 64 bytes, each token's heads side by side at the owner, each head's
/// tokens here; only heads [first, end).
Scatter converted(const StagedReader& reader, uint32_t num_blocks, uint32_t first, uint32_t end) {
  constexpr uint32_t kTokens = 16, kHeads = 8, kRow = 64, kBlock = kTokens * kHeads * kRow;
  Scatter scatter;
  for (uint32_t block = 0; block < num_blocks; ++block) {
    const uint64_t from = uint64_t{block * 7 % num_blocks} * kBlock, to = uint64_t{block} * kBlock;
    for (uint32_t token = 0; token < kTokens; ++token) {
      std::vector<Segment> places;
      for (uint32_t head = first; head < end; ++head) {
        places.push_back({reader.at(to + (head * kTokens + token) * kRow), kRow, 0});
      }
      scatter.add(kPool, from + (token * kHeads + first) * kRow, places);
    }
  }
  return scatter;
}

TEST_P(Staging, ConvertsLayoutsAndTakesHeads) {
  open();
  for (const auto& [first, end] : {std::pair{0u, 8u}, {2u, 4u}, {7u, 8u}}) {
    reader->poison();
    const Scatter scatter = converted(*reader, 1000, first, end);
    ASSERT_TRUE(reader->post(1, scatter, true).ok());
    const Status status = wait_for(*reader->endpoint, 1);
    ASSERT_TRUE(status.ok()) << status.what();
    expect_landed(scatter);
  }
}

TEST_P(Staging, LeavesOtherReadsAsTheyAre) {
  open();
  const Scatter scatter = converted(*reader, 100, 0, 8);
  std::vector<SlotRing::Slot> all = reader->take_all();
  ASSERT_TRUE(reader->post(1, scatter, false).ok());
  ASSERT_TRUE(wait_for(*reader->endpoint, 1).ok()) << "it wanted a slot";
  all.clear();
  expect_landed(scatter);
}

TEST_P(Staging, ReadsTheTableOnceTheDataHasLanded) {
  open();
  const Scatter scatter = converted(*reader, 500, 0, 8);
  Scatter look;
  look.add(kTable, 0, {{reader->host.data(), 64, kHostRegion}});
  for (int round = 0; round < 10; ++round) {
    reader->poison();
    ASSERT_TRUE(reader->post(1, scatter, true).ok());
    ASSERT_TRUE(reader->post(2, look, false).ok());
    ASSERT_TRUE(wait_for(*reader->endpoint, 2).ok());
    expect_landed(scatter);
  }
}

TEST_P(Staging, WaitsForSlotsThatOthersHold) {
  open();
  const Scatter scatter = converted(*reader, 500, 0, 8);
  std::vector<SlotRing::Slot> all = reader->take_all();
  std::vector<Completion> ended;
  ASSERT_TRUE(reader->post(1, scatter, true).ok());
  for (int poll = 0; poll < 100; ++poll) ASSERT_TRUE(poll_once(*reader->endpoint, ended).status.ok());
  EXPECT_TRUE(ended.empty());
  all.clear();
  ASSERT_TRUE(wait_for(*reader->endpoint, 1).ok());
  expect_landed(scatter);
}

TEST_P(Staging, OutOfBoundsLandsNothing) {
  open();
  Scatter beyond;
  beyond.add(kPool, kPoolBytes - 64, {{reader->at(0), 128, 0}});
  ASSERT_TRUE(reader->post(1, beyond, true).ok());
  EXPECT_EQ(wait_for(*reader->endpoint, 1).code(), Code::kAccessDenied);
  expect_landed({});
}

TEST(MakeStaging, WantsASlotAtLeast) {
  const MakeDeviceCopier none = [](const std::byte*) -> Result<std::shared_ptr<DeviceCopier>> {
    return Status::Unavailable("no GPU", "install one");
  };
  EXPECT_EQ(make_staging({.bytes = SlotRing::kSlotBytes - 1}, none).status().code(), Code::kConfig);
  EXPECT_EQ(make_staging({.bytes = SlotRing::kSlotBytes}, none).status().what(), "no GPU");
}

INSTANTIATE_TEST_SUITE_P(Copies, Staging, ::testing::Values("fake image", ""),
                         [](const auto& info) { return *info.param ? "ByKernel" : "OneByOne"; });

}  // namespace
}  // namespace kvlink::testing

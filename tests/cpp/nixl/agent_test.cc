// SPDX-License-Identifier: Apache-2.0
// Agents of the NIXL backend in one process, without NIXL, also while threads do everything at once.
#include "agent.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "cpp/transports/cuda/peers.h"
#include "release.h"

namespace kvlink::nixl {
namespace {

using Phase = Request::Phase;
using Bytes = std::vector<std::byte>;

constexpr size_t kBytes = 1 << 20, kPieces = 64;
constexpr int64_t kSecond = 1'000'000'000;

Bytes filled(uint8_t seed) {
  Bytes made(kBytes);
  for (size_t at = 0; at < kBytes; ++at) made[at] = static_cast<std::byte>(at * 7 + at / 251 + seed);
  return made;
}

std::unique_ptr<Agent> agent(const std::string& name, const std::string& transports) {
  Settings settings;
  settings.agent = name;
  settings.transports = {transports};
  if (transports == "cuda,tcp") settings.transports = {"cuda", "tcp"};
  auto made = Agent::make(settings);
  EXPECT_TRUE(made.ok()) << made.status().what();
  return std::move(*made);
}

uint64_t address(const Bytes& memory) { return reinterpret_cast<uint64_t>(memory.data()); }

/// Loads the metadata of a region, as NIXL does.
std::shared_ptr<PeerRegion> loaded(const Agent& reader, const Agent& owner, const OwnRegion& region) {
  return std::make_shared<PeerRegion>(PeerRegion{reader.peer(owner.name()),
                                                 {region.pool, region.number},
                                                 reinterpret_cast<uint64_t>(region.base),
                                                 region.bytes});
}

/// Pieces in reverse order.
std::vector<Wish> wishes(const std::shared_ptr<OwnRegion>& into, const std::shared_ptr<PeerRegion>& from) {
  std::vector<Wish> all;
  constexpr uint64_t kSize = kBytes / kPieces;
  for (uint64_t piece = 0; piece < kPieces; ++piece) {
    all.push_back({into, from, reinterpret_cast<uint64_t>(into->base) + (kPieces - 1 - piece) * kSize,
                   from->base + piece * kSize, kSize});
  }
  return all;
}

bool holds(const Bytes& into, const Bytes& from) {
  constexpr size_t kSize = kBytes / kPieces;
  for (size_t piece = 0; piece < kPieces; ++piece) {
    const auto at = into.begin() + static_cast<ptrdiff_t>((kPieces - 1 - piece) * kSize);
    if (!std::equal(at, at + kSize, from.begin() + static_cast<ptrdiff_t>(piece * kSize))) return false;
  }
  return true;
}

Phase ended(Request& request) {
  Phase phase = request.check();
  for (const int64_t until = now_ns() + 40 * kSecond; now_ns() < until; phase = request.check()) {
    if (phase != Phase::kConnecting && phase != Phase::kReading) break;
    std::this_thread::yield();
  }
  return phase;
}

struct Agents : ::testing::TestWithParam<const char*> {
  Bytes from = filled(1), into = Bytes(kBytes);
  std::unique_ptr<Agent> owner = agent("owner", GetParam()), reader = agent("reader", GetParam());
  std::shared_ptr<OwnRegion> theirs = *owner->add(from.data(), kBytes),
                             ours = *reader->add(into.data(), kBytes);

  void SetUp() override { ASSERT_TRUE(reader->add_peer("owner", owner->info()).ok()); }
  std::shared_ptr<Request> prepared() {
    auto request = reader->prepare(wishes(ours, loaded(*reader, *owner, *theirs)), reader->peer("owner"));
    EXPECT_TRUE(request.ok()) << request.status().what();
    return *request;
  }
};

TEST_P(Agents, ReadAndNotifyInOrder) {
  const auto request = prepared();
  std::vector<std::pair<std::string, std::string>> got, wanted;
  for (int round = 0; round < 20; ++round) {
    std::fill(into.begin(), into.end(), std::byte{});
    ASSERT_TRUE(request->post(std::to_string(round)).ok());
    ASSERT_EQ(ended(*request), Phase::kDone) << request->failure().what();
    ASSERT_TRUE(holds(into, from));
    wanted.emplace_back("reader", std::to_string(round));
  }
  while (got.size() < wanted.size()) owner->take_notifications(got);
  EXPECT_EQ(got, wanted);
  reader->release(request);
  EXPECT_FALSE(request->post({}).ok());
}

TEST_P(Agents, RefuseWhatLeavesItsRegion) {
  const auto region = loaded(*reader, *owner, *theirs);
  const auto refuses = [&](const Wish& wish) {
    return reader->prepare({wish}, reader->peer("owner")).status().code() == Code::kConfig;
  };
  const uint64_t to = address(into), at = address(from);
  EXPECT_FALSE(refuses({ours, region, to, at, kBytes}));
  EXPECT_TRUE(refuses({ours, region, to, at, kBytes + 1}));
  EXPECT_TRUE(refuses({ours, region, to + 1, at, kBytes}));
  EXPECT_TRUE(refuses({ours, region, to, at - 1, 8}));
  EXPECT_TRUE(refuses({ours, region, to, at + 1, UINT64_MAX}));
  auto gpu = std::make_shared<PeerRegion>(*region);
  gpu->name.pool = 1;
  EXPECT_EQ(
      reader->prepare({{ours, region, to, at, 8}, {ours, gpu, to, at, 8}}, region->peer).status().code(),
      Code::kConfig);
  // Metadata that lies about its bounds is refused at the other end.
  auto longer = std::make_shared<PeerRegion>(*region);
  longer->bytes *= 2;
  const auto request = *reader->prepare({{ours, longer, to, at + kBytes, 64}}, region->peer);
  ASSERT_TRUE(request->post({}).ok());
  EXPECT_EQ(ended(*request), Phase::kFailed);
  auto unknown = std::make_shared<PeerRegion>(*region);
  unknown->name.number = 77;
  const auto other = *reader->prepare({{ours, unknown, to, at, 64}}, region->peer);
  ASSERT_TRUE(other->post({}).ok());
  EXPECT_EQ(ended(*other), Phase::kFailed);
  EXPECT_EQ(other->failure().code(), Code::kAccessDenied);
}

TEST_P(Agents, ADroppedRegionIsNotRead) {
  const auto request = prepared();
  ASSERT_TRUE(request->post({}).ok());
  ASSERT_EQ(ended(*request), Phase::kDone);
  owner->drop(theirs);
  ASSERT_TRUE(request->post("never sent").ok());
  EXPECT_EQ(ended(*request), Phase::kFailed);
  EXPECT_EQ(request->failure().code(), Code::kAccessDenied) << request->failure().what();
  reader->drop(ours);
  ASSERT_TRUE(request->post({}).ok());
  EXPECT_EQ(ended(*request), Phase::kFailed);
  EXPECT_EQ(request->failure().code(), Code::kCancelled);
}

TEST_P(Agents, AnOwnerThatEndsIsKnownToHaveEnded) {
  const auto request = prepared();
  ASSERT_TRUE(request->post({}).ok());
  ASSERT_EQ(ended(*request), Phase::kDone);
  owner->close();
  ASSERT_TRUE(request->post({}).ok());
  EXPECT_EQ(ended(*request), Phase::kFailed);
  EXPECT_TRUE(request->peer_is_dead()) << request->failure().what();
  const auto again = agent("owner", GetParam());
  EXPECT_TRUE(reader->add_peer("owner", again->info()).ok());
  EXPECT_EQ(reader->add_peer("owner", owner->info()).code(), Code::kConfig);  // the new one lives
}

TEST_P(Agents, AllAtOnce) {
  std::atomic<bool> stop{false};
  std::thread comes_and_goes([&] {
    Bytes theirs_too = filled(3), ours_too(kBytes);
    while (!stop) {
      owner->drop(*owner->add(theirs_too.data(), kBytes));
      reader->drop(*reader->add(ours_too.data(), kBytes));
    }
  });
  std::vector<std::thread> readers;
  std::atomic<int> done{0}, wrong{0};
  for (int number = 0; number < 3; ++number) {
    readers.emplace_back([&, number] {
      Bytes to(kBytes);
      const auto region = *reader->add(to.data(), kBytes);
      const auto source = loaded(*reader, *owner, *theirs);
      for (int round = 0; round < 40; ++round) {
        const auto request = *reader->prepare(wishes(region, source), reader->peer("owner"));
        static_cast<void>(request->post(std::to_string(number)));
        if (round % 3 == 0) {
          reader->release(request);
          std::fill(to.begin(), to.end(), std::byte{});
          std::this_thread::yield();
          wrong += std::any_of(to.begin(), to.end(), [](std::byte each) { return each != std::byte{}; });
          continue;
        }
        if (ended(*request) == Phase::kDone) {
          ++done;
          wrong += !holds(to, from);
        }
        reader->release(request);
      }
      reader->drop(region);
    });
  }
  for (std::thread& each : readers) each.join();
  stop = true;
  comes_and_goes.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(done, 0);
}

INSTANTIATE_TEST_SUITE_P(All, Agents, ::testing::Values("cma", "tcp"),
                         [](const auto& of) { return std::string(of.param); });

/// The driver is the stand-in of tests/fake_cuda.
TEST(GpuAgents, HaveHostAndGpuMemoryWhateverTheLabelSays) {
  ASSERT_NE(testing::from_fake_cuda<int(unsigned)>("cuInit"), nullptr);
  testing::GpuPool theirs, ours;
  const Bytes wanted = filled(5);
  std::copy(wanted.begin(), wanted.end(), testing::behind(theirs.range().base));
  Bytes host_from = filled(6), host_into(kBytes);
  const auto owner = agent("owner", "cuda,tcp"), reader = agent("reader", "cuda,tcp");
  const auto gpu = *owner->add(theirs.range().base, kBytes), host = *owner->add(host_from.data(), kBytes);
  const auto gpu_into = *reader->add(ours.range().base, kBytes),
             into = *reader->add(host_into.data(), kBytes);
  EXPECT_EQ(gpu->pool, 1U);
  EXPECT_EQ(host->pool, kHostPool);
  ASSERT_TRUE(reader->add_peer("owner", owner->info()).ok());
  const auto peer = reader->peer("owner");
  const auto read = [&](const auto& to, const auto& from) {
    const auto request = *reader->prepare(wishes(to, loaded(*reader, *owner, *from)), peer);
    EXPECT_TRUE(request->post({}).ok());
    EXPECT_EQ(ended(*request), Phase::kDone) << request->failure().what();
    reader->release(request);
  };
  const auto on_gpu = [&] {
    return Bytes(testing::behind(ours.range().base), testing::behind(ours.range().base) + kBytes);
  };
  read(gpu_into, gpu);
  EXPECT_TRUE(holds(on_gpu(), wanted));
  read(gpu_into, host);
  EXPECT_TRUE(holds(on_gpu(), host_from));
  read(into, gpu);
  EXPECT_TRUE(holds(host_into, wanted));
  read(into, host);
  EXPECT_TRUE(holds(host_into, host_from));
}

TEST(Metadata, ForgedBytesAreRefused) {
  const auto one = agent("one", "tcp");
  Bytes memory(kBytes);
  ASSERT_TRUE(one->add(memory.data(), kBytes).ok());
  const std::string info = one->info(), region = write_region({1, 2});
  EXPECT_TRUE(read_info(info));
  EXPECT_EQ(read_region(region)->number, 2U);
  EXPECT_FALSE(read_region(write_region({kMaxPools, 0})));
  AgentCard card{{0, 1, {1, 2, kSharedSeat}, {{"tcp", "a", {}, {"k", "l"}, {}}}, {{0, 8, {"key"}, {""}}}}};
  const std::string body = write_card(card);
  ASSERT_TRUE(read_card(body));
  EXPECT_EQ((*read_card(body))[0].owner().transports[0].pool_keys, std::vector<std::string>{"key"});
  for (size_t size = 0; size < info.size(); ++size) EXPECT_FALSE(read_info(info.substr(0, size)));
  for (size_t size = 0; size < body.size(); ++size) EXPECT_FALSE(read_card(body.substr(0, size)));
  for (size_t at = 0; at < body.size(); ++at) {
    std::string forged = body;
    forged[at] = static_cast<char>(0xff);
    static_cast<void>(read_card(forged));  // no memory for what it claims, and no crash
  }
}

TEST(Release, OnlyThoseThatWereComparedLoad) {
  for (const char* known : {"1.0.0", "1.3.2", "1.5.1"}) EXPECT_TRUE(check_release(known).ok()) << known;
  for (const char* other : {"", "0.10.1", "1.5.2", "1.6.0", "2.0.0", "1.5", "1.5.1.1", "1.5.x"})
    EXPECT_FALSE(check_release(other).ok()) << other;
}

}  // namespace
}  // namespace kvlink::nixl

// SPDX-License-Identifier: Apache-2.0
// Ports over a made-up libibverbs whose device dies and returns.
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
    ASSERT_EQ(ports->look(0, now), Ports::Change::kLost);
    ports->release(0, now);
  }
  /// Looks every 250 ms of made-up time, in which jobs take none.
  Ports::Change look_for(int64_t ns) {
    for (const int64_t end = now + ns; now < end;) {
      now += 250'000'000;
      for (int look = 0; look < 2; ++look) {  // one begins a job, one sees how it ended
        await_job();
        if (ports->look(0, now) == Ports::Change::kBack) return Ports::Change::kBack;
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
  EXPECT_EQ(ports->look(0, now + 60'000'000'000), Ports::Change::kNone);
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
  EXPECT_FALSE(DeviceNode(path).gone());  // never seen
  std::filesystem::create_directory(path);
  const DeviceNode node(path);
  EXPECT_FALSE(node.gone());
  const auto aside = path.string() + "-aside";
  std::filesystem::rename(path, aside);
  EXPECT_TRUE(node.gone());
  std::filesystem::create_directory(path);
  EXPECT_TRUE(node.gone());
  std::filesystem::remove(path);
  std::filesystem::remove(aside);
}

TEST(VerbsNode, ARemovalThatNoEventTellsOfIsSeen) {
  const auto path = std::filesystem::temp_directory_path() / ("nic-" + std::to_string(::getpid()));
  std::filesystem::create_directory(path);
  const auto nic = open_nic({"made_up", 1, 1}, DeviceNode(path));
  nic->look();
  EXPECT_FALSE(nic->gone());
  std::filesystem::remove(path);
  nic->look();
  nic->look();
  EXPECT_TRUE(nic->gone());
  EXPECT_EQ(nic->losses(), 1U);
  EXPECT_EQ(nic->why_lost().what(), "RDMA port made_up:1 was removed");
}

}  // namespace
}  // namespace kvlink::verbs

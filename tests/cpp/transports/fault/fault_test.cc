// SPDX-License-Identifier: Apache-2.0
// Every action of the fault transport, over every transport that copies.
#include "cpp/transports/copy_peers.h"
#include "transports/fault/plan.h"

namespace kvlink::testing {
namespace {

constexpr uint32_t kDataBytes = 4096;

class Fault : public ::testing::TestWithParam<const char*> {
 protected:
  void connect(const std::string& plan) {
    pair_ = std::make_unique<LocalPair>("fault+" + std::string(GetParam()), plan);
  }
  Reader& reader() { return pair_->reader; }
  Status read_data() { return reader().read_at(kPool, 0, kDataBytes); }
  Status read_under_a_lease() {
    Scatter scatter;
    scatter.add(kPool, 0, {{reader().destination.data(), kDataBytes, 0}});
    Chunk chunk = scatter.chunk();
    chunk.guard = {.offset = 128, .value = 7700, .region = kTable};
    std::memcpy(pair_->owner.table->range().base + chunk.guard.offset, &chunk.guard.value, sizeof(uint64_t));
    const Status posted = reader().endpoint->post_read(7, chunk);
    return posted.ok() ? reader().wait(7) : posted;
  }
  Status read_slot() { return reader().read_at(kTable, 64, 64); }
  /// Bytes of the destination that differ from the owner's.
  int num_wrong(const HostMemory& memory, uint64_t offset, uint32_t bytes) {
    int wrong = 0;
    for (uint32_t i = 0; i < bytes; ++i) wrong += reader().destination[i] != memory.range().base[offset + i];
    return wrong;
  }
  int num_wrong_data() { return num_wrong(*pair_->owner.pool, 0, kDataBytes); }
  int num_wrong_slot() { return num_wrong(*pair_->owner.table, 64, 64); }
  /// Polls for a fifth of a second.
  bool completes_soon(uint64_t token) {
    std::vector<Completion> ended;
    for (const int64_t deadline = now_ns() + kSecondNs / 5; now_ns() < deadline;) {
      EXPECT_TRUE(poll_once(*reader().endpoint, ended).status.ok());
    }
    return std::any_of(ended.begin(), ended.end(), [=](const Completion& c) { return c.token == token; });
  }
  Scatter post_data(uint64_t token) {
    Scatter scatter;
    scatter.add(kPool, 0, {{reader().destination.data(), kDataBytes, 0}});
    EXPECT_TRUE(reader().endpoint->post_read(token, scatter.chunk()).ok());
    return scatter;
  }

  std::unique_ptr<LocalPair> pair_;
};
INSTANTIATE_TEST_SUITE_P(All, Fault, ::testing::Values("loopback", "shm", "cma"),
                         [](const auto& param) { return std::string(param.param); });

class SleepingFault : public Fault {};
INSTANTIATE_TEST_SUITE_P(All, SleepingFault, ::testing::Values("shm", "cma"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(Fault, PassesEverythingElse) {
  connect("");
  ASSERT_TRUE(read_data().ok());
  EXPECT_EQ(num_wrong_data(), 0);
  ASSERT_TRUE(reader().write_word(8, 5).ok());
  EXPECT_EQ(pair_->owner.words->range().base[8], std::byte{5});
}

TEST_P(Fault, DropsTheNthPost) {
  connect("drop@2");
  ASSERT_TRUE(read_data().ok());
  reader().poison();
  const Scatter dropped = post_data(5);
  EXPECT_FALSE(completes_soon(5));
  EXPECT_TRUE(reader().is_poisoned());
  reader().endpoint->cancel(5);
  ASSERT_TRUE(read_data().ok());
  EXPECT_EQ(num_wrong_data(), 0);
}

TEST_P(Fault, CountsOverAllEndpoints) {
  connect("fail@2");
  auto other = open_one(*reader().transport, pair_->owner.card().address);
  ASSERT_TRUE((*other)->establish(pair_->accept((*other)->hello()), 20 * kSecondNs).ok());
  ASSERT_TRUE((*other)->import_region(pair_->owner.card().pool_key).ok());
  Scatter scatter;
  scatter.add(0, 0, {{reader().destination.data(), 64, 0}});
  ASSERT_TRUE((*other)->post_read(1, scatter.chunk()).ok());
  EXPECT_EQ(read_data().code(), Code::kPeerUnreachable);
}

TEST_P(Fault, DelaysCompletions) {
  connect("delay=150ms@1..2");
  for (int i = 0; i < 2; ++i) {
    const int64_t start_ns = now_ns();
    ASSERT_TRUE(read_data().ok());
    EXPECT_GE(now_ns() - start_ns, 150'000'000);
    EXPECT_EQ(num_wrong_data(), 0);
  }
}

TEST_P(Fault, ForgetsADelayedCompletionThatIsCancelled) {
  connect("delay=50ms@1");
  const Scatter delayed = post_data(5);
  std::vector<Completion> ended;
  ASSERT_TRUE(poll_once(*reader().endpoint, ended).status.ok());
  reader().endpoint->cancel(5);
  EXPECT_FALSE(completes_soon(5));
}

TEST_P(SleepingFault, WakesForDelayedCompletions) {
  connect("delay=50ms@1");
  const int wake_fd = reader().endpoint->traits().wake_fd;
  const Scatter delayed = post_data(5);
  std::vector<Completion> ended;
  ASSERT_TRUE(poll_once(*reader().endpoint, ended).status.ok());
  ASSERT_TRUE(ended.empty());
  pollfd wake{wake_fd, POLLIN, 0};
  ASSERT_EQ(::poll(&wake, 1, 20'000), 1);
  EXPECT_TRUE(reader().wait(5).ok());
  EXPECT_EQ(::poll(&wake, 1, 0), 0);
}

TEST_P(Fault, HangsForGood) {
  connect("hang@2");
  ASSERT_TRUE(read_data().ok());
  const Scatter hung = post_data(5), after = post_data(6);
  ASSERT_TRUE(reader().endpoint->post_write(8, kWords, 0, 1).ok());
  EXPECT_FALSE(completes_soon(5));
  EXPECT_FALSE(completes_soon(6));
  EXPECT_EQ(pair_->owner.words->range().base[0], std::byte{0});
}

TEST_P(Fault, FailsAndDenies) {
  connect("fail@1;deny@2");
  EXPECT_EQ(read_data().code(), Code::kPeerUnreachable);
  EXPECT_EQ(read_data().code(), Code::kAccessDenied);
  EXPECT_TRUE(reader().is_poisoned());
  EXPECT_TRUE(read_data().ok()) << "the endpoint itself lives on";
}

TEST_P(Fault, BreaksTheConnection) {
  connect("break@2");
  ASSERT_TRUE(read_data().ok());
  const Scatter broken = post_data(5);
  std::vector<Completion> ended;
  EXPECT_EQ(poll_once(*reader().endpoint, ended).status.code(), Code::kPeerUnreachable);
  EXPECT_EQ(poll_once(*reader().endpoint, ended).status.code(), Code::kPeerUnreachable);
  EXPECT_TRUE(ended.empty());
}

TEST_P(Fault, CorruptsOneByte) {
  connect("corrupt@every:2");
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(read_data().ok());
    EXPECT_EQ(num_wrong_data(), 0);
    ASSERT_TRUE(read_data().ok());
    EXPECT_EQ(num_wrong_data(), 1);
  }
}

TEST_P(Fault, CorruptsOnlySlotsOrOnlyData) {
  connect("corrupt-slot@2;corrupt-data@1");
  ASSERT_TRUE(read_slot().ok());
  EXPECT_EQ(num_wrong_slot(), 0);
  ASSERT_TRUE(read_data().ok());
  EXPECT_EQ(num_wrong_data(), 0) << "what no lease covers tries a connection, and is neither";
  ASSERT_TRUE(read_under_a_lease().ok());
  EXPECT_EQ(num_wrong_data(), 1);
  ASSERT_TRUE(read_under_a_lease().ok());
  EXPECT_EQ(num_wrong_data(), 0);
  ASSERT_TRUE(read_slot().ok());
  EXPECT_EQ(num_wrong_slot(), 1);
  EXPECT_TRUE(std::any_of(reader().destination.begin(), reader().destination.begin() + 8, [](std::byte byte) {
    return byte != std::byte{0};
  })) << "a spoilt slot has a spoilt nonce";
}

TEST(FaultPlan, ParsesItsGrammar) {
  auto rules = parse_fault_plan("drop@3;delay=5ms@1..10;corrupt-data@every:7");
  ASSERT_TRUE(rules.ok());
  ASSERT_EQ(rules->size(), 3);
  EXPECT_TRUE((*rules)[0].hits(3) && !(*rules)[0].hits(2) && !(*rules)[0].hits(4));
  EXPECT_EQ((*rules)[1].delay_ns, 5'000'000);
  EXPECT_TRUE((*rules)[1].hits(1) && (*rules)[1].hits(10) && !(*rules)[1].hits(11));
  EXPECT_EQ((*rules)[2].target, FaultTarget::kData);
  EXPECT_TRUE((*rules)[2].hits(14) && !(*rules)[2].hits(15));
  EXPECT_EQ(parse_fault_plan("delay=250us@1")->front().delay_ns, 250'000);
  EXPECT_EQ(parse_fault_plan("delay=2s@1")->front().delay_ns, 2'000'000'000);
}

TEST(FaultPlan, RefusesEverythingElse) {
  for (const char* plan : {"drop",
                           "drop@",
                           "drop@0",
                           "drop@x",
                           "drop@1..",
                           "drop@3..2",
                           "drop@every:0",
                           "drop@every:",
                           "drop=1ms@1",
                           "delay@1",
                           "delay=@1",
                           "delay=5@1",
                           "delay=5min@1",
                           "delay=99999999999999999999s@1",
                           "drop-@1",
                           "drop-x@1",
                           "explode@1",
                           "@1",
                           ";",
                           "drop@1;;drop@2",
                           "drop@1 ",
                           "drop@99999999999999999999",
                           "drop@-1",
                           "drop@1..2..3"}) {
    const auto rules = parse_fault_plan(plan);
    ASSERT_FALSE(rules.ok()) << plan;
    EXPECT_EQ(rules.status().code(), Code::kConfig);
    EXPECT_NE(rules.status().fix().find("every:K"), std::string::npos);
  }
  EXPECT_EQ(make_transport("fault+shm", {.fault = "nonsense"}).status().code(), Code::kConfig);
}

}  // namespace
}  // namespace kvlink::testing

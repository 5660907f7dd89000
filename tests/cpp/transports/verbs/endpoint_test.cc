// SPDX-License-Identifier: Apache-2.0
// Endpoints of verbs: their work, and how the death of the other end is noticed.

#include "transports/verbs/endpoint.h"

#include <gtest/gtest.h>

#include <deque>

#include "base/clock.h"
#include "cpp/transports/verbs/made_up_rdma.h"
#include "transports/verbs/liveness.h"
#include "transports/verbs/registration.h"

namespace kvlink::verbs {
namespace {

using testing::device;

constexpr uint64_t kBytes = 8 << 20;
constexpr uint64_t kMostUnsigned = 256 << 10;

class VerbsEndpoint : public ::testing::Test {
 protected:
  struct Read {
    std::vector<ReadOp> ops;
    std::vector<Segment> segments;
  };

  VerbsEndpoint() {
    device = &made_up;
    nic = testing::open_nic(pd);
    open(LivenessTimeouts{});
  }
  ~VerbsEndpoint() override {
    endpoint.reset();
    nic.reset();
    device = nullptr;
  }

  void open(LivenessTimeouts timeouts) {
    const LocalRegion local{base, kBytes, 0, {1}};
    endpoint = *open_endpoint(nic, nullptr, {.path = "here->there"}, {local}, timeouts);
    const QpAddress owner{.qpn = 99, .mtu = 1, .reads_out = 1, .reads_in = 1};
    ASSERT_TRUE(endpoint->establish(Reply{owner}.format(), 0).ok());
    for (const Access access : {Access::kRead, Access::kReadWords, Access::kWriteWords}) {
      const RemoteKey key{access, 0, kBytes, kSliceBytes, {{7}}};
      ASSERT_TRUE(endpoint->import_region(key.format()).ok());
    }
  }
  /// Reads `count` runs of the owner.
  void post(uint32_t count, uint32_t bytes, uint32_t region = 0) {
    Read& read = reads.emplace_back();
    for (uint32_t i = 0; i < count; ++i) {
      read.ops.push_back({uint64_t{i} * bytes, bytes, region, i, 1});
      read.segments.push_back({base + uint64_t{i} * bytes, bytes, 0});
    }
    ASSERT_TRUE(endpoint->post_read(reads.size(), {read.ops, read.segments.data()}).ok());
  }
  Status poll() { return endpoint->poll(now_ns(), false, ended).status; }
  /// Polls for a pull that waits; when it is to be called again.
  int64_t check(int64_t now) {
    const PollResult result = endpoint->poll(now, true, ended);
    EXPECT_TRUE(result.status.ok()) << result.status.what();
    return result.next_check_ns;
  }
  /// Polls on until it breaks.
  Status why_broken() {
    Status status;
    while (status.ok()) status = poll();
    return status;
  }
  /// Bytes of the reads posted so far, from one signal to the next.
  std::vector<uint64_t> bytes_between_signals() {
    std::vector<uint64_t> all{0};
    for (const testing::Asked& read : made_up.all("read")) {
      all.back() += read.bytes;
      if (read.signaled) all.push_back(0);
    }
    EXPECT_EQ(all.back(), 0U) << "the last one is signaled";
    all.pop_back();
    return all;
  }

  testing::Device made_up;
  ibv_pd pd{};
  std::byte* const base = reinterpret_cast<std::byte*>(uint64_t{1} << 40);  // never touched
  std::shared_ptr<Nic> nic;
  std::unique_ptr<Endpoint> endpoint;
  std::deque<Read> reads;
  std::vector<Completion> ended;
};

TEST_F(VerbsEndpoint, AnOwnerThatAnswersNothingIsGivenUpWhateverItsNicDoes) {
  open(LivenessTimeouts{.silence_ns = 1'000'000});
  made_up.answers = false;
  post(4, 4096);
  const Status why = why_broken();
  EXPECT_EQ(why.code(), Code::kPeerUnreachable);
  EXPECT_NE(why.what().find("the owner's NIC answered nothing for 1 ms"), std::string::npos) << why.what();
  EXPECT_TRUE(ended.empty());
}

TEST_F(VerbsEndpoint, OneThatWaitsIsToLookSeveralTimesBeforeItGivesUp) {
  made_up.answers = false;
  post(4, 4096);
  EXPECT_EQ(check(1), 1 + kTickNs);
  EXPECT_EQ(check(1 + kTickNs), 1 + 2 * kTickNs);
}

TEST_F(VerbsEndpoint, OneThatStandsByAsksWhetherTheOwnerIsThere) {
  EXPECT_EQ(check(1), 1 + kTickNs);
  EXPECT_EQ(check(kTickNs), 1 + kTickNs);
  EXPECT_EQ(made_up.all("ask").size(), 0U);
  EXPECT_EQ(check(1 + kTickNs), 1 + 2 * kTickNs);
  EXPECT_EQ(made_up.all("ask").size(), 1U);
  EXPECT_EQ(check(2 + kTickNs), 2 + 2 * kTickNs) << "it has answered: a tick begins";
  EXPECT_EQ(made_up.all("ask").size(), 1U);
  post(4, 4096);
  EXPECT_TRUE(poll().ok());
  EXPECT_EQ(ended.size(), 1U);
}

TEST_F(VerbsEndpoint, OneThatIsNotWaitedForAsksNothing) {
  for (const int64_t now : {int64_t{1}, 2 * kTickNs, 4 * kTickNs}) {
    EXPECT_TRUE(endpoint->poll(now, false, ended).status.ok());
  }
  EXPECT_EQ(made_up.all("ask").size(), 0U);
}

TEST_F(VerbsEndpoint, OneThatStandsByGivesUpBeforeItIsHandedAnything) {
  open(LivenessTimeouts{.silence_ns = 1'000'000});
  made_up.answers = false;
  check(1);
  EXPECT_EQ(check(1 + kTickNs), 1 + kTickNs + 1'000'000);
  EXPECT_EQ(check(2 + kTickNs), 1 + kTickNs + 1'000'000) << "no second question";
  EXPECT_EQ(made_up.all("ask").size(), 1U);
  EXPECT_EQ(why_broken().code(), Code::kPeerUnreachable);
  EXPECT_FALSE(endpoint->poll(3 + kTickNs, true, ended).status.ok());
}

// A stopped pull ends its endpoint when its reads do not come back. That must not wait for the NIC's resends.
TEST_F(VerbsEndpoint, RecalledReadsEndWithTheQueuePairHoweverLongItMayBeSilent) {
  open(LivenessTimeouts{.timeout = 20, .retries = 6, .silence_ns = 30'000'000'000});
  made_up.answers = false;
  post(4, 4096);
  ASSERT_TRUE(poll().ok());
  EXPECT_FALSE(endpoint->cancel(1)) << "the NIC has it";
  made_up.asked.clear();
  endpoint->close();
  EXPECT_EQ(made_up.order(), (std::vector<std::string>{"halt", "destroy qp", "destroy cq"}));
  EXPECT_FALSE(poll().ok());
  EXPECT_TRUE(ended.empty());
}

// Behind the data on the same queue pair, a slot vouches for it only if the NIC loads it last.
TEST_F(VerbsEndpoint, ReadsOfLeaseSlotsAreFencedAndThoseOfBlocksAreNot) {
  post(4, 4096);
  post(1, 8, 1);
  post(4, 4096);
  while (ended.size() < 3) ASSERT_TRUE(poll().ok());
  std::vector<uint64_t> fenced;
  for (const testing::Asked& read : made_up.all("read")) {
    if (read.fenced) fenced.push_back(read.bytes);
  }
  EXPECT_EQ(fenced, std::vector<uint64_t>{8});
}

TEST_F(VerbsEndpoint, StoresGoToPeerWordsAlone) {
  EXPECT_EQ(endpoint->post_write(1, 0, 64, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(endpoint->post_write(1, 1, 64, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(endpoint->post_write(1, 2, 60, 1).code(), Code::kAccessDenied);
  EXPECT_TRUE(endpoint->post_write(1, 2, 64, 1).ok());
}

TEST_F(VerbsEndpoint, LongWorkGivesSignsOfLifeOnItsWay) {
  post(128, 16 << 10);
  post(1, kBytes);
  post(512, 4 << 10);
  while (ended.size() < 3) ASSERT_TRUE(poll().ok());
  for (const uint64_t bytes : bytes_between_signals()) EXPECT_LT(bytes, kMostUnsigned);
}

TEST_F(VerbsEndpoint, WhatANicFailsOnItsWayOutIsPutDownToItsRemoval) {
  made_up.fails_with = IBV_WC_LOC_PROT_ERR;
  post(1, 4096);
  nic->remove();
  const Status why = why_broken();
  EXPECT_EQ(why.code(), Code::kPeerUnreachable);
  EXPECT_EQ(why.what(), "RDMA port made_up:1 was removed");
}

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kStart = 5'000'000'000;

/// Looks whenever it is time to, until it has been too long.
int64_t time_until_too_long(Liveness& liveness, int64_t now) {
  const int64_t start = now;
  while (!liveness.too_long(now)) now = liveness.next_check_ns();
  return now - start;
}

TEST(VerbsSilence, EndsToTheNanosecondForWhoLooksInTime) {
  Liveness liveness;
  EXPECT_EQ(liveness.next_check_ns(), INT64_MAX);
  EXPECT_EQ(time_until_too_long(liveness, kStart), kSilenceNs);
  Liveness odd(250 * kMs);
  EXPECT_EQ(time_until_too_long(odd, kStart), 250 * kMs);
}

TEST(VerbsSilence, BeginsAgainWithEverySignOfLife) {
  Liveness liveness;
  for (int64_t now = kStart; now < kStart + 20 * kSilenceNs; now += kTickNs) {
    if ((now - kStart) % (kSilenceNs - kTickNs) == 0) liveness.answered();
    ASSERT_FALSE(liveness.too_long(now)) << (now - kStart) / kMs;
  }
  liveness.answered();
  EXPECT_EQ(liveness.next_check_ns(), INT64_MAX);
  EXPECT_EQ(time_until_too_long(liveness, kStart), kSilenceNs);
}

TEST(VerbsSilence, OnesOwnAbsenceIsNotTheOthersSilence) {
  Liveness liveness;
  EXPECT_FALSE(liveness.too_long(kStart));
  EXPECT_FALSE(liveness.too_long(kStart + 60'000 * kMs));  // stopped for a minute
  EXPECT_EQ(time_until_too_long(liveness, kStart + 60'000 * kMs), kSilenceNs - 2 * kTickNs);
}

TEST(VerbsSilence, WhoStandsByAsksOnceATick) {
  Liveness liveness;
  int num_asked = 0;
  for (int64_t now = kStart; now < kStart + 1000 * kMs; now += kMs) {
    if (!liveness.idle_too_long(now)) {
      EXPECT_LE(liveness.next_check_ns(), now + kTickNs);
      continue;
    }
    ++num_asked;
    EXPECT_FALSE(liveness.too_long(now));
    liveness.answered();
  }
  EXPECT_EQ(num_asked, 9);
}

}  // namespace
}  // namespace kvlink::verbs

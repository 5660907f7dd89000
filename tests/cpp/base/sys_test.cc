// SPDX-License-Identifier: Apache-2.0
// Parts of base: calls of the system, invitations between processes, and marks of a process.

#include "base/sys.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

#include "base/completion_queue.h"
#include "base/host_identity.h"
#include "base/invitations.h"
#include "base/process_mark.h"
#include "engine/engine.h"

namespace kvlink {
namespace {

// The nth call of `name` (null: of any name but getrandom, which secrets need) fails with `error`.
struct Plan {
  const char* name = nullptr;
  int error = EMFILE;
  std::atomic<int> calls_left{0};
  std::atomic<bool> hit{false};
} plan;

int refuse(const char* call) {
  const bool meant = plan.name ? std::strcmp(call, plan.name) == 0 : std::strcmp(call, "getrandom") != 0;
  if (!meant || plan.calls_left.fetch_sub(1) != 0) return 0;
  plan.hit = true;
  return plan.error;
}

class Refusing {
 public:
  explicit Refusing(const char* name, int error, int nth = 0) {
    plan.name = name;
    plan.error = error;
    plan.calls_left = nth;
    plan.hit = false;
    sys::refuse_calls(&refuse);
  }
  ~Refusing() { sys::refuse_calls(nullptr); }
  bool hit() const { return plan.hit; }
};

size_t num_fds() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                           std::filesystem::directory_iterator{}));
}

bool says(const Status& status, const std::string& text) {
  return status.sentence().find(text) != std::string::npos;
}

std::shared_ptr<HostMemory> pool() {
  static const std::shared_ptr<HostMemory> memory = *HostMemory::allocate(1 << 16, false);
  return memory;
}

Result<std::unique_ptr<Engine>> start(const std::string& transport) {
  EngineOptions options;
  options.epoch = 1;
  options.transports = {transport};
  options.num_lease_slots = 8;
  options.num_progress_threads = 2;
  auto engine = Engine::make(options);
  if (!engine.ok()) return engine;
  if (auto added = (*engine)->add_pool_region(pool()->range()); !added.ok()) return added.status();
  if (Status status = (*engine)->start(); !status.ok()) {
    EXPECT_FALSE((*engine)->grant(1, 1, 0, 1'000'000).ok()) << "a worker that did not start gives leases";
    return status;
  }
  return engine;
}

class OutOfDescriptors : public ::testing::TestWithParam<const char*> {};

TEST_P(OutOfDescriptors, AtAnyCallOfAStartIsNamedAndLeavesNothingBehind) {
  static_cast<void>(pool());
  int num_refused = 0;
  for (;; ++num_refused) {
    const size_t before = num_fds();
    const Refusing refusing(nullptr, EMFILE, num_refused);
    const auto started = start(GetParam());
    if (!refusing.hit()) {
      EXPECT_TRUE(started.ok()) << started.status().sentence();
      break;
    }
    ASSERT_FALSE(started.ok()) << "call " << num_refused << " failed and nobody noticed";
    EXPECT_EQ(started.status().code(), Code::kConfig) << started.status().sentence();
    EXPECT_TRUE(says(started.status(), "no descriptor left")) << started.status().sentence();
    EXPECT_EQ(started.status().fix(), "raise ulimit -n");
    EXPECT_EQ(num_fds(), before);
  }
  EXPECT_GT(num_refused, 10);
}

/// The same without a seam: the kernel refuses the nth descriptor.
TEST_P(OutOfDescriptors, OfTheKernelIsNamedAndCloseReturns) {
  static_cast<void>(pool());
  rlimit whole{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &whole), 0);
  bool started = false;
  for (rlim_t left = 0; left < 64 && !started; ++left) {
    const UniqueFd lowest(::dup(0));
    const rlimit tight{static_cast<rlim_t>(lowest.get()) + 1 + left, whole.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
    const auto engine = start(GetParam());
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &whole), 0);
    started = engine.ok();
    if (started) {
      (*engine)->close();
    } else {
      EXPECT_EQ(engine.status().code(), Code::kConfig);
      EXPECT_EQ(engine.status().fix(), "raise ulimit -n") << engine.status().sentence();
    }
  }
  EXPECT_TRUE(started);
}

INSTANTIATE_TEST_SUITE_P(Transports, OutOfDescriptors, ::testing::Values("loopback", "shm", "cma", "tcp"));

/// Kept alive: whoever holds a closed worker holds no descriptor of it.
TEST(SysTest, AClosedEngineHasNoDescriptors) {
  static_cast<void>(pool());
  for (const char* const transport : {"loopback", "shm", "cma", "tcp", "fault+tcp"}) {
    const size_t before = num_fds();
    const auto engine = start(transport);
    ASSERT_TRUE(engine.ok());
    EXPECT_GT(num_fds(), before);
    (*engine)->close();
    EXPECT_EQ(num_fds(), before) << transport;
    EXPECT_FALSE((*engine)->grant(1, 1, 0, 1'000'000).ok());
    (*engine)->leases().set_ready(1, 1);
  }
}

/// Watchers belong to whoever watches.
TEST(SysTest, AWatcherThatIsGoneIsForgotten) {
  const auto engine = start("loopback");
  ASSERT_TRUE(engine.ok());
  const size_t before = num_fds();
  auto gone = *CompletionQueue::make();
  const auto kept = *CompletionQueue::make();
  (*engine)->watch_ended(gone);
  (*engine)->watch_ended(kept);
  gone.reset();
  EXPECT_EQ(num_fds(), before + 1);
  ASSERT_TRUE((*engine)->grant(1, 1, 0, 1'000'000'000).ok());
  (*engine)->leases().abort(1);
  EXPECT_EQ((*engine)->take_ended().size(), 1u);
  EXPECT_EQ(kept->drain(), std::vector<uint64_t>{1});
}

TEST(SysTest, AReaderWithoutDescriptorsHasNoPathAndIsToldWhy) {
  for (const char* const transport : {"shm", "tcp", "fault+tcp"}) {
    const auto owner = start(std::string(transport).substr(std::string(transport).find('+') + 1));
    const auto reader = start(transport);
    ASSERT_TRUE(owner.ok() && reader.ok());
    const TransportAccess access = (*owner)->access().front();
    int num_refused = 0;
    for (;; ++num_refused) {
      auto connection = (*reader)->open(transport, access.address);
      ASSERT_TRUE(connection.ok());
      const auto accepted = (*owner)->accept(access.name, (*connection)->hellos());
      ASSERT_TRUE(accepted.ok());
      // The owner's thread makes calls of its own meanwhile, of these names none.
      const Refusing refusing(num_refused == 0 ? "socket" : "epoll_create1", EMFILE);
      const auto regions = (*connection)
                               ->establish(accepted->connection_id, accepted->replies, access.pool_keys,
                                           access.lease_keys, 1, 5'000'000'000);
      if (num_refused == 2 || !refusing.hit()) break;
      ASSERT_FALSE(regions.ok());
      EXPECT_EQ(regions.status().code(), Code::kTransportUnavailable) << regions.status().sentence();
      EXPECT_EQ(regions.status().fix(), "raise ulimit -n");
    }
    EXPECT_GE(num_refused, 1);
  }
}

TEST(SysTest, AReaderThatTheOwnerCannotWatchIsClosedAtOnce) {
  const auto owner = start("tcp"), reader = start("tcp");
  ASSERT_TRUE(owner.ok() && reader.ok());
  const TransportAccess access = (*owner)->access().front();
  auto connection = (*reader)->open("tcp", access.address);
  ASSERT_TRUE(connection.ok());
  const auto accepted = (*owner)->accept("tcp", (*connection)->hellos());
  ASSERT_TRUE(accepted.ok());
  const Refusing refusing("epoll_ctl", ENOSPC);
  const int64_t an_hour = 3'600'000'000'000;  // it would be waited for
  const auto regions = (*connection)
                           ->establish(accepted->connection_id, accepted->replies, access.pool_keys,
                                       access.lease_keys, 1, an_hour);
  ASSERT_FALSE(regions.ok());
  EXPECT_EQ(regions.status().code(), Code::kPeerUnreachable) << regions.status().sentence();
}

TEST(SysTest, AForbiddenCallIsNotAskedToBeGivenMemory) {
  for (const int error : {EPERM, ENOSYS, EACCES}) {
    const Refusing refusing("memfd_create", error);
    const Status status = HostMemory::allocate(4096, false).status();
    EXPECT_EQ(status.code(), Code::kConfig);
    EXPECT_TRUE(says(status, "allow memfd_create in the container's seccomp profile")) << status.sentence();
    EXPECT_FALSE(says(status, "fewer blocks")) << status.sentence();
  }
}

TEST(SysTest, EachLackOfTheHostHasItsOwnAdvice) {
  const auto advice = [](const char* call, int error) {
    return sys::failed(Code::kConfig, "", call, error).fix();
  };
  EXPECT_EQ(advice("socket", EMFILE), "raise ulimit -n");
  EXPECT_EQ(advice("socket", ENFILE), "raise sysctl fs.file-max");
  EXPECT_EQ(advice("epoll_ctl", ENOSPC), "raise sysctl fs.epoll.max_user_watches");
  EXPECT_NE(advice("madvise", ENOMEM).find("fewer blocks"), std::string::npos);
  EXPECT_NE(advice("pthread_create", EAGAIN).find("ulimit -u"), std::string::npos);
  EXPECT_EQ(advice("mmap", EAGAIN), "raise ulimit -l");
  EXPECT_EQ(advice("socket", ECONNRESET), "");
}

TEST(SysTest, MemoryThatIsNotThereIsNamedAsMemory) {
  const Refusing refusing("ftruncate", ENOSPC);
  const Status status = HostMemory::allocate(4096, false).status();
  EXPECT_TRUE(says(status, "no memory is left") && says(status, "fewer blocks")) << status.sentence();
}

TEST(SysTest, AThreadThatCannotBeMadeEndsTheStart) {
  for (const int nth : {0, 1, 2}) {  // two progress threads, and the owner's
    const Refusing refusing("pthread_create", EAGAIN, nth);
    const auto engine = start("loopback");
    ASSERT_FALSE(engine.ok());
    EXPECT_EQ(engine.status().code(), Code::kConfig);
    EXPECT_TRUE(says(engine.status(), "raise ulimit -u")) << engine.status().sentence();
  }
}

TEST(SysTest, AnEventLoopIsToldThatItCannotWait) {
  const Refusing refusing("eventfd", EMFILE);
  const Status status = CompletionQueue::make().status();
  EXPECT_EQ(status.code(), Code::kConfig);
  EXPECT_EQ(status.fix(), "raise ulimit -n");
}

TEST(SysTest, WithoutRandomNumbersNoWorkerStarts) {
  const Refusing refusing("getrandom", EPERM);
  const auto engine = start("loopback");
  ASSERT_FALSE(engine.ok());
  EXPECT_TRUE(says(engine.status(), "allow getrandom")) << engine.status().sentence();
}

TEST(SysTest, ATransportThatMayNotBeUsedLeavesTheOthers) {
  const Refusing refusing("socket", EACCES);
  EngineOptions options;
  options.transports = {"tcp", "loopback"};
  const auto engine = Engine::make(options);
  ASSERT_TRUE(engine.ok()) << engine.status().sentence();
  const auto rows = (*engine)->access();
  EXPECT_NE(rows[0].refused.find("allow socket"), std::string::npos) << rows[0].refused;
  EXPECT_EQ(rows[1].refused, "");
}

TEST(SysTest, HostsThatDoNotTellTheirBootAreNotOneHost) {
  EXPECT_FALSE(is_this_boot(""));
  EXPECT_EQ(is_this_boot(boot_id()), !boot_id().empty());
}

constexpr Invitations::Limits kLimits{
    .secret_bytes = 24, .most_of_one = 64, .most = 256, .lifetime_ns = 1'000'000};

TEST(SysTest, ThreadsLeaveTheSignalsOfTheProcessToTheProgram) {
  sigset_t before{}, there{}, after{};
  ::pthread_sigmask(SIG_BLOCK, nullptr, &before);
  auto thread = sys::start_thread("testing", "kvlink-test",
                                  [&there] { ::pthread_sigmask(SIG_BLOCK, nullptr, &there); });
  ASSERT_TRUE(thread.ok());
  thread->join();
  for (const int each : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD, SIGPIPE, SIGALRM}) {
    EXPECT_EQ(::sigismember(&there, each), 1) << each;
  }
  EXPECT_EQ(::sigismember(&there, SIGSEGV), 0) << "faults must be told where they happen";
  ::pthread_sigmask(SIG_BLOCK, nullptr, &after);
  EXPECT_EQ(std::memcmp(&before, &after, sizeof after), 0);
}

TEST(Invitations, AdmitOnceWhoShowsTheSecret) {
  Invitations invitations(kLimits);
  const Invitation issued = invitations.issue(0, 5, 0);
  EXPECT_EQ(issued.secret.size(), kLimits.secret_bytes);
  for (size_t index = 0; index < issued.secret.size(); ++index) {
    Invitation guessed = issued;
    guessed.secret[index] ^= 1;
    EXPECT_FALSE(invitations.redeem(guessed, 0));
  }
  EXPECT_FALSE(invitations.redeem({issued.id, ""}, 0));
  EXPECT_EQ(invitations.redeem(issued, 0), 5U);
  EXPECT_FALSE(invitations.redeem(issued, 0));
}

TEST(Invitations, ExpireAndAreWithdrawn) {
  Invitations invitations(kLimits);
  EXPECT_FALSE(invitations.redeem(invitations.issue(0, 1, 0), kLimits.lifetime_ns));
  const Invitation issued = invitations.issue(0, 1, 0);
  EXPECT_TRUE(invitations.withdraw(1));
  EXPECT_FALSE(invitations.withdraw(1));
  EXPECT_FALSE(invitations.redeem(issued, 0));
}

TEST(Invitations, AFloodLeavesThoseOfOthersAlone) {
  Invitations invitations(kLimits);
  const Invitation before = invitations.issue(7, 1, 0);
  const Invitation flooders = invitations.issue(8, 2, 0);
  for (size_t count = 0; count < 2 * kLimits.most; ++count) invitations.issue(8, 2, 0);
  const Invitation after = invitations.issue(9, 3, 0);
  EXPECT_EQ(invitations.redeem(before, 1), 1U);
  EXPECT_EQ(invitations.redeem(after, 1), 3U);
  EXPECT_FALSE(invitations.redeem(flooders, 1)) << "the oldest of the flood lapsed";
}

TEST(Invitations, AFloodByManyLeavesThoseOfOthersAlone) {
  Invitations invitations(kLimits);
  const Invitation before = invitations.issue(1, 1, 0);
  for (uint64_t count = 0; count < 2 * kLimits.most; ++count) invitations.issue(100 + count % 50, 2, 0);
  EXPECT_EQ(invitations.redeem(before, 1), 1U);
}

TEST(Invitations, OneThatFloodsGetsInAllTheSame) {
  Invitations invitations(kLimits);
  for (size_t count = 0; count < 2 * kLimits.most; ++count) invitations.issue(8, 2, 0);
  const Invitation last = invitations.issue(8, 3, 0);
  for (size_t count = 1; count < kLimits.most_of_one; ++count) invitations.issue(8, 4, 0);
  EXPECT_EQ(invitations.redeem(last, 1), 3U);
}

TEST(Invitations, WhenAllPlacesAreTakenTheCallerThatHasMostGivesOneUp) {
  Invitations invitations({.secret_bytes = 24, .most_of_one = 3, .most = 4, .lifetime_ns = 10});
  std::vector<Invitation> of_first;
  for (int count = 0; count < 3; ++count) of_first.push_back(invitations.issue(1, 1, 0));
  std::vector<Invitation> others{invitations.issue(2, 1, 0)};
  others.push_back(invitations.issue(3, 1, 0));
  others.push_back(invitations.issue(2, 1, 0));
  for (const Invitation& other : others) EXPECT_TRUE(invitations.redeem(other, 0));
  EXPECT_FALSE(invitations.redeem(of_first[0], 0));
  EXPECT_FALSE(invitations.redeem(of_first[1], 0));
  EXPECT_TRUE(invitations.redeem(of_first[2], 0));
}

TEST(Invitations, WhatIsRedeemedMakesRoom) {
  Invitations invitations({.secret_bytes = 24, .most_of_one = 2, .most = 3, .lifetime_ns = 10});
  const Invitation first = invitations.issue(1, 1, 0), second = invitations.issue(1, 2, 0);
  EXPECT_EQ(invitations.redeem(first, 0), 1U);
  const Invitation third = invitations.issue(1, 3, 0);
  const Invitation fourth = invitations.issue(1, 4, 0);
  EXPECT_FALSE(invitations.redeem(second, 0));
  EXPECT_EQ(invitations.redeem(third, 0), 3U);
  invitations.clear();
  EXPECT_FALSE(invitations.redeem(fourth, 0));
}

TEST(Invitations, TheOldestLapsesAfterALaterOneWasRedeemed) {
  Invitations invitations({.secret_bytes = 24, .most_of_one = 2, .most = 3, .lifetime_ns = 10});
  const Invitation first = invitations.issue(1, 1, 0), second = invitations.issue(1, 2, 0);
  EXPECT_EQ(invitations.redeem(second, 0), 2U);
  const Invitation third = invitations.issue(1, 3, 0);
  invitations.issue(1, 4, 0);
  EXPECT_FALSE(invitations.redeem(first, 0));
  EXPECT_EQ(invitations.redeem(third, 0), 3U);
}

TEST(Invitations, WithoutALifetimeTheyStay) {
  Invitations invitations({.secret_bytes = 24, .most_of_one = 1, .most = 1, .lifetime_ns = INT64_MAX});
  EXPECT_TRUE(invitations.redeem(invitations.issue(0, 1, 1000), INT64_MAX - 1));
}

/// Whether `holds` in a forked child.
bool in_child(const std::function<bool()>& holds) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(holds() ? 0 : 1);
  int status = 0;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

struct Counted {
  explicit Counted(int* deleted) : deleted(deleted) {}
  ~Counted() { ++*deleted; }
  const ProcessMark& process() const { return mark; }

  int* deleted;
  ProcessMark mark = {};
};

TEST(ProcessMarkTest, AChildInheritsWhatItsParentMadeAndOwnsWhatItMakes) {
  const ProcessMark mark;
  EXPECT_FALSE(mark.inherited());
  EXPECT_TRUE(mark.check().ok());
  EXPECT_TRUE(in_child([&] {
    const ProcessMark own;
    return mark.inherited() && !own.inherited() && mark.check().code() == Code::kConfig &&
           in_child([&] { return mark.inherited() && own.inherited(); });
  }));
  EXPECT_FALSE(mark.inherited());
}

TEST(ProcessMarkTest, AChildLeavesWhatItInheritedAsItIs) {
  int deleted = 0;
  std::shared_ptr<Counted> object(new Counted(&deleted), DeleteOwn());
  EXPECT_TRUE(in_child([&] {
    object.reset();
    std::shared_ptr<Counted>(new Counted(&deleted), DeleteOwn()).reset();
    return deleted == 1;
  }));
  object.reset();
  EXPECT_EQ(deleted, 1);
}

TEST(ProcessMarkTest, AChildDoesNotWaitForTheThreadsOfAnEngine) {
  const auto memory = *HostMemory::allocate(4096, false);
  EngineOptions options;
  options.transports = {"tcp"};
  auto made = Engine::make(options);
  ASSERT_TRUE(made.ok());
  ASSERT_TRUE((*made)->add_pool_region(memory->range()).ok());
  ASSERT_TRUE((*made)->start().ok());
  std::shared_ptr<Engine> engine(made->release(), DeleteOwn());
  EXPECT_TRUE(in_child([&] {
    engine->close();  // would join them
    engine.reset();
    return true;
  }));
  EXPECT_TRUE(engine->grant(1, 1, 0, 1'000'000'000).ok());
}

}  // namespace
}  // namespace kvlink

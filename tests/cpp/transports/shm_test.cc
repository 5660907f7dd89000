// SPDX-License-Identifier: Apache-2.0
// Transports within one host.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <thread>
#include <vector>

#include "cpp/transports/copy_peers.h"
#include "transports/same_host/copy_helper.h"
#include "transports/same_host/fd_protocol.h"

namespace kvlink::testing {
namespace {

TEST(Shm, RefusesMemoryOfOthers) {
  auto transport = make_transport("shm", {});
  std::vector<std::byte> memory(4096);
  const Status status = (*transport)->register_memory({memory.data(), 4096, -1, 0}, Access::kRead).status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_NE(status.fix().find("BlockPool.allocate"), std::string::npos);
  const int unsealed = ::memfd_create("unsealed", MFD_CLOEXEC);
  EXPECT_FALSE((*transport)->register_memory({memory.data(), 4096, unsealed, 0}, Access::kRead).ok());
  ::close(unsealed);
}

TEST(Shm, ExportsPartsThatDoNotStartOnAPage) {
  Owner owner("shm");
  Server server(*owner.transport);
  MemoryRange part = owner.pool->range();
  part.base += 5000;
  part.memfd_offset += 5000;
  part.bytes = 70'000;
  auto region = owner.transport->register_memory(part, Access::kRead);
  ASSERT_TRUE(region.ok());
  Reader reader("shm", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  auto index = reader.endpoint->import_region((*region)->remote_key());
  ASSERT_TRUE(index.ok()) << index.status().what();
  ASSERT_TRUE(reader.read_at(*index, 1, 69'999).ok());
  EXPECT_EQ(std::memcmp(reader.destination.data(), part.base + 1, 69'999), 0);
  EXPECT_EQ(reader.read_at(*index, 1, 70'000).code(), Code::kAccessDenied);
}

TEST(Shm, ExportsManyRegions) {
  Owner owner("shm");
  Server server(*owner.transport);
  std::vector<std::unique_ptr<MemoryRegion>> regions;
  for (uint64_t i = 0; i < 300; ++i) {
    MemoryRange part = owner.pool->range();
    part.base += i * 4096;
    part.memfd_offset = i * 4096;
    part.bytes = 4096;
    regions.push_back(std::move(*owner.transport->register_memory(part, Access::kRead)));
  }
  Reader reader("shm", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  for (uint64_t i = 0; i < regions.size(); ++i) {
    auto index = reader.endpoint->import_region(regions[i]->remote_key());
    ASSERT_TRUE(index.ok()) << index.status().what();
    ASSERT_TRUE(reader.read_at(*index, 0, 4096).ok());
    ASSERT_EQ(std::memcmp(reader.destination.data(), owner.pool->range().base + i * 4096, 4096), 0);
  }
}

TEST(Shm, GivesPoolsReadOnly) {
  LocalPair pair("shm");
  std::ifstream maps("/proc/self/maps");
  int num_read_only = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:kvlink") != std::string::npos && line.find(" r--s ") != std::string::npos)
      ++num_read_only;
  }
  EXPECT_EQ(num_read_only, 2) << "the reader's mappings of pool and lease table; the owner's are writable";
}

TEST(Shm, AdmitsEachInvitationOnce) {
  LocalPair pair("shm");
  const Card card = pair.owner.card();
  auto first = open_one(*pair.reader.transport, card.address);
  auto second = open_one(*pair.reader.transport, card.address);
  const std::string reply = pair.accept((*first)->hello());
  EXPECT_TRUE((*first)->establish(reply, 20 * kSecondNs).ok());
  EXPECT_EQ((*second)->establish(reply, 20 * kSecondNs).code(), Code::kAccessDenied);
  std::string guessed = pair.accept((*second)->hello());
  guessed.back() ^= 1;
  EXPECT_EQ((*second)->establish(guessed, 20 * kSecondNs).code(), Code::kAccessDenied);
}

TEST(Shm, AFloodOfHellosLeavesInvitationsOfOthersAlone) {
  LocalPair pair("shm");
  const Card card = pair.owner.card();
  auto endpoint = open_one(*pair.reader.transport, card.address);
  const std::string reply = *pair.owner.transport->accept({1, 7}, (*endpoint)->hello());
  for (int count = 0; count < 3000; ++count) {
    ASSERT_TRUE(pair.owner.transport->accept({2, 8}, (*endpoint)->hello()).ok());
  }
  EXPECT_TRUE((*endpoint)->establish(reply, 20 * kSecondNs).ok());
}

int connect_raw(const Card& card) {
  const std::string name = HostAddress::parse(0x316d'6873, card.address)->socket;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  for (int tries = 0; tries < 2000; ++tries) {
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), size) == 0) break;
    ::usleep(1000);
  }
  return fd;
}

TEST(Shm, ServesReadersDespiteSilentAndNoisyClients) {
  LocalPair pair("shm");
  std::vector<int> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(connect_raw(pair.owner.card()));
    if (i % 3 == 0) ::send(strangers.back(), "noise", 5, MSG_NOSIGNAL);
  }
  Reader reader("shm", pair.owner.card(), [&](const std::string& hello) { return pair.accept(hello); });
  EXPECT_TRUE(reader.read_at(kPool, 0, 4096).ok());
  for (const int fd : strangers) ::close(fd);
}

TEST(Shm, TimesOutOnAStoppedOwner) {
  RemoteOwner owner("shm");
  auto transport = make_transport("shm", {});
  auto endpoint = open_one(**transport, owner.card().address);
  const std::string reply = owner.accept(1, (*endpoint)->hello());
  owner.stop();
  EXPECT_EQ((*endpoint)->establish(reply, kSecondNs / 10).code(), Code::kTimeout);
}

TEST(Shm, StopsConnectingToAStoppedOwnerWhenTheCallerGivesUp) {
  RemoteOwner owner("shm");
  auto transport = make_transport("shm", {});
  auto endpoint = open_one(**transport, owner.card().address);
  const std::string reply = owner.accept(1, (*endpoint)->hello());
  owner.stop();
  Atomic<bool> given_up{false};
  Status status;
  std::thread connecting(
      [&] { status = (*endpoint)->establish(reply, Patience(3600 * kSecondNs, given_up)); });
  given_up = true;
  connecting.join();
  EXPECT_EQ(status.code(), Code::kCancelled) << status.what();
}

TEST(Shm, SignalsDoNotDisturbWhoConnects) {
  RemoteOwner owner("shm");
  auto transport = make_transport("shm", {});
  auto endpoint = open_one(**transport, owner.card().address);
  const std::string reply = owner.accept(1, (*endpoint)->hello());
  struct sigaction heard{};
  struct sigaction before{};
  heard.sa_handler = [](int) {};
  ::sigaction(SIGUSR1, &heard, &before);
  owner.stop();
  Status status;
  std::thread connecting([&] { status = (*endpoint)->establish(reply, 20 * kSecondNs); });
  for (int signal = 0; signal < 50; ++signal) {
    ::pthread_kill(connecting.native_handle(), SIGUSR1);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  owner.go_on();
  connecting.join();
  ::sigaction(SIGUSR1, &before, nullptr);
  EXPECT_TRUE(status.ok()) << status.what();
}

TEST(Shm, RefusesAnOwnerThatHasEnded) {
  RemoteOwner owner("shm");
  auto transport = make_transport("shm", {});
  auto endpoint = open_one(**transport, owner.card().address);
  const std::string reply = owner.accept(1, (*endpoint)->hello());
  owner.kill(SIGKILL);
  EXPECT_EQ((*endpoint)->establish(reply, kSecondNs).code(), Code::kPeerUnreachable);
}

TEST(Shm, NoticesAnOwnerWhoseChildLivesOn) {
  RemotePair pair("shm");
  const pid_t child = pair.owner.fork_child();  // inherits the owner's end of the socket
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, 4096).ok());
  pair.owner.kill(SIGKILL);
  EXPECT_EQ(pair.reader.wait_broken().code(), Code::kPeerUnreachable);
  EXPECT_EQ(::kill(child, SIGKILL), 0);
}

void become_nobody() {
  if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(9);
}

/// Runs `body` in a child and returns what it says.
std::string said_in_child(const std::function<std::string()>& body) {
  std::array<int, 2> pipe;
  EXPECT_EQ(::pipe(pipe.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string said = body();
    (void)!::write(pipe[1], said.data(), said.size());
    ::_exit(0);
  }
  ::close(pipe[1]);
  std::array<char, 1024> bytes;
  const ssize_t size = ::read(pipe[0], bytes.data(), bytes.size());
  ::close(pipe[0]);
  ::waitpid(child, nullptr, 0);
  return {bytes.data(), static_cast<size_t>(std::max<ssize_t>(size, 0))};
}

std::string why_not(const std::string& transport_name, const Card& card) {
  auto transport = make_transport(transport_name, {});
  const Status status = open_one(**transport, card.address).status();
  return status.code() == Code::kTransportUnavailable && !status.fix().empty() ? status.what()
                                                                               : "not refused";
}

TEST(Cma, SaysThatTheUserDiffers) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user: run as root";
  RemoteOwner owner("cma");
  const std::string said = said_in_child([&] {
    become_nobody();
    return why_not("cma", owner.card());
  });
  EXPECT_NE(said.find("runs as uid 0, this process as uid 65534"), std::string::npos) << said;
}

TEST(Cma, SaysThatTheOwnerIsNotDumpable) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user: run as root";
  RemoteOwner owner("cma", [] {
    become_nobody();
    ::prctl(PR_SET_DUMPABLE, 0);
  });
  const std::string said = said_in_child([&] {
    become_nobody();
    return why_not("cma", owner.card());
  });
  const bool told = said.find("not dumpable") != std::string::npos || said.find("yama") != std::string::npos;
  EXPECT_TRUE(told) << said;
}

TEST(Cma, RefusesAnOwnerThatHasEndedOrClosed) {
  auto transport = make_transport("cma", {});
  RemoteOwner ended("cma"), closed("cma");
  ended.kill(SIGKILL);
  EXPECT_EQ(open_one(**transport, ended.card().address).status().code(), Code::kPeerUnreachable);
  const auto endpoint = std::move(*open_one(**transport, closed.card().address));
  const std::string reply = closed.accept(1, endpoint->hello());
  closed.close_transport();
  EXPECT_EQ(endpoint->establish(reply, kSecondNs).code(), Code::kPeerUnreachable);
}

/// An owner must not kill its readers: a store where a memfd has no memory ends a process by SIGBUS.
TEST(Cma, StoresNothingBeyondTheOwnersMemory) {
  Owner owner("cma");
  auto* const hole =
      static_cast<std::byte*>(::mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const auto short_one = *HostMemory::allocate(4096, false, {}, Access::kWriteWords);
  const UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(unsealed.get(), 1 << 20), 0);
  for (const int memfd : {short_one->range().memfd, unsealed.get()}) {
    const auto region = owner.transport->register_memory({hole, 1 << 20, memfd, 0}, Access::kWriteWords);
    Reader reader("cma", owner.card(),
                  [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
    EXPECT_EQ(reader.endpoint->import_region((*region)->remote_key()).status().code(), Code::kAccessDenied);
  }
  ::munmap(hole, 1 << 20);
}

/// A reader may have the right to open what its owner may only name, and to open a device may have effects.
TEST(Cma, OpensNoDeviceThatTheOwnerNames) {
  Owner owner("cma");
  const UniqueFd device(::open("/dev/null", O_PATH | O_CLOEXEC));
  MemoryRange words = owner.words->range();
  words.memfd = device.get();
  const auto region = owner.transport->register_memory(words, Access::kWriteWords);
  Reader reader("cma", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  const Status status = reader.endpoint->import_region((*region)->remote_key()).status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable) << status.what();
}

TEST(Cma, DeniesMemoryThatIsNotThere) {
  Owner owner("cma");
  void* const hole = ::mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto region =
      owner.transport->register_memory({static_cast<std::byte*>(hole), 1 << 20, -1, 0}, Access::kRead);
  Reader reader("cma", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  auto index = reader.endpoint->import_region((*region)->remote_key());
  ASSERT_TRUE(index.ok());
  EXPECT_EQ(reader.read_at(*index, 0, 4096).code(), Code::kAccessDenied);
  EXPECT_EQ(reader.read_at(*index, 0, 64).code(), Code::kAccessDenied);
  EXPECT_TRUE(reader.is_poisoned());
  EXPECT_TRUE(reader.read_at(kPool, 0, 4096).ok()) << "one denied read must not break the endpoint";
  ::munmap(hole, 1 << 20);
}

/// Two threads copy a large read in parts, and a hole is in the middle of it.
TEST(Cma, EndsALargeReadAtTheFirstMemoryThatIsNotThere) {
  constexpr size_t kBytes = 4 << 20, kHole = 1 << 20;
  Owner owner("cma");
  void* const memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* const bytes = static_cast<std::byte*>(memory);
  std::memset(memory, 7, kBytes);
  ASSERT_EQ(::mprotect(bytes + kBytes / 2, kHole, PROT_NONE), 0);
  auto region = owner.transport->register_memory({bytes, kBytes, -1, 0}, Access::kRead);
  Reader reader("cma", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  auto index = reader.endpoint->import_region((*region)->remote_key());
  ASSERT_TRUE(index.ok());
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(reader.read_at(*index, 0, kBytes).code(), Code::kAccessDenied);
    EXPECT_TRUE(std::all_of(reader.destination.begin(), reader.destination.begin() + kBytes / 2,
                            [](std::byte byte) { return byte == std::byte{7}; }))
        << "what is there has come";
    EXPECT_TRUE(reader.read_at(*index, kBytes / 2 + kHole, kBytes / 2 - kHole).ok());
  }
  ::munmap(memory, kBytes);
}

TEST(Loopback, RevokesDestroyedRegions) {
  LocalPair pair("loopback");
  ASSERT_TRUE(pair.reader.read_at(kPool, 0, 64).ok());
  pair.owner.pool_region.reset();
  pair.owner.pool.reset();
  EXPECT_EQ(pair.reader.read_at(kPool, 0, 64).code(), Code::kAccessDenied);
  EXPECT_TRUE(pair.reader.read_at(kTable, 0, 64).ok());
  EXPECT_FALSE(pair.reader.endpoint->import_region(LocalPair("loopback").owner.card().address).ok());
}

TEST(Loopback, RevokesUnderAReadInProgress) {
  for (int i = 0; i < 10; ++i) {
    LocalPair pair("loopback");
    std::thread revoking([&] {
      pair.owner.pool_region.reset();
      pair.owner.pool.reset();
    });
    Status status;
    while (status.ok()) status = pair.reader.read_at(kPool, 0, 4 << 20);
    revoking.join();
    ASSERT_EQ(status.code(), Code::kAccessDenied);
  }
}

TEST(Loopback, FencesOneConnection) {
  LocalPair pair("loopback");
  Reader other("loopback", pair.owner.card(),
               [&](const std::string& hello) { return *pair.owner.transport->accept(43, hello); });
  EXPECT_TRUE(pair.owner.transport->capabilities().can_fence);
  EXPECT_FALSE(pair.owner.transport->fence(41));
  EXPECT_TRUE(pair.owner.transport->fence(42));
  EXPECT_EQ(pair.reader.read_at(kPool, 0, 64).code(), Code::kPeerUnreachable);
  EXPECT_TRUE(other.read_at(kPool, 0, 64).ok());
}

TEST(Loopback, RefusesOtherProcesses) {
  RemoteOwner owner("loopback");
  auto transport = make_transport("loopback", {});
  const Status status = open_one(**transport, owner.card().address).status();
  EXPECT_EQ(status.code(), Code::kTransportUnavailable);
  EXPECT_FALSE(status.fix().empty());
}

constexpr uint32_t kParts = 32;
constexpr int64_t kLong = 1'000'000'000;  // worth sharing on any machine

/// Counts, without atomics, how often each part is copied: two threads that copy one part are a race.
struct Work {
  std::array<uint32_t, kParts> copied{};
  static void copy(void* self, uint32_t part) {
    uint32_t& count = static_cast<Work*>(self)->copied[part];
    for (int i = 0; i < 200; ++i) asm volatile("" : : "r"(&count) : "memory");
    ++count;
  }
};

TEST(SharingPolicy, SharesWhatTakesLongerThanWaking) {
  SharingPolicy policy;
  EXPECT_TRUE(policy.shares(50'000)) << "nothing is known yet";
  policy.learn(10'000, false);
  EXPECT_TRUE(policy.shares(50'000));
  policy.learn(10'000, false);
  EXPECT_FALSE(policy.shares(39'000));
}

TEST(SharingPolicy, FollowsAMachineThatBecomesSlowOrFast) {
  SharingPolicy policy;
  policy.learn(10'000, false);
  for (int i = 0; i < 20; ++i) policy.learn(40'000, false);
  EXPECT_FALSE(policy.shares(100'000));
  EXPECT_TRUE(policy.shares(200'000)) << "so that a second thread is of use there";
  uint32_t skipped = 0;
  while (!policy.shares(100'000)) ++skipped;
  EXPECT_EQ(skipped, 256u) << "then it looks again";
  for (int i = 0; i < 20; ++i) policy.learn(10'000, false);
  EXPECT_TRUE(policy.shares(100'000));
}

TEST(SharingPolicy, IsNotMisledByAThreadThatWaitedForItsCore) {
  SharingPolicy policy;
  policy.learn(kLong, false);
  EXPECT_TRUE(policy.shares(200'000));
  EXPECT_FALSE(policy.shares(199'000));
}

TEST(SharingPolicy, WakesALateThreadLessAndLessOften) {
  SharingPolicy policy;
  const auto skipped = [&policy] {
    uint32_t count = 0;
    while (!policy.shares(kLong)) ++count;
    return count;
  };
  for (const uint32_t wanted : {0u, 1u, 3u, 7u, 15u, 31u, 63u, 127u, 255u, 256u, 256u}) {
    EXPECT_EQ(skipped(), wanted);
    policy.learn(10'000, true);
  }
  EXPECT_EQ(skipped(), 256u);
  policy.learn(10'000, false);
  EXPECT_EQ(skipped(), 0u);
}

TEST(CopyHelper, CopiesEachPartOnceBeforeItReturns) {
  CopyHelper helper;
  for (uint32_t round = 0; round < 3000; ++round) {
    Work work;
    const uint32_t parts = round % (kParts + 1);
    helper.run(&Work::copy, &work, parts, kLong);
    for (uint32_t part = 0; part < kParts; ++part) ASSERT_EQ(work.copied[part], part < parts ? 1u : 0u);
  }
}

TEST(CopyHelper, WorksForOneCallerAndTheOthersWorkAlone) {
  CopyHelper helper;
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&helper] {
      for (int round = 0; round < 1000; ++round) {
        Work work;
        helper.run(&Work::copy, &work, kParts, kLong);
        for (const uint32_t copied : work.copied) EXPECT_EQ(copied, 1u);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(CopyHelper, LeavesItsWorkToTheCallerOnceStopped) {
  CopyHelper helper;
  for (int round = 0; round < 3; ++round) {
    Work work;
    helper.run(&Work::copy, &work, kParts, kLong);
    for (const uint32_t copied : work.copied) EXPECT_EQ(copied, 1u);
    helper.stop();
    helper.stop();
  }
}

TEST(CopyHelper, AForkedChildIsNotHeldUpByTheThreadThatItLacks) {
  auto helper = std::make_unique<CopyHelper>();
  Work work;
  helper->run(&Work::copy, &work, kParts, kLong);
  const pid_t child = ::fork();
  if (child == 0) {
    helper.reset();
    ::_exit(7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

}  // namespace
}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// What shm does of its own.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/un.h>

#include <fstream>

#include "cpp/transports/copy_peers.h"
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

}  // namespace
}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// What cma does of its own.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "cpp/transports/copy_peers.h"

namespace kvlink::testing {
namespace {

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

}  // namespace
}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// Cards, answers and keys by which a liar would have an honest reader read memory of a third process.
#include <fcntl.h>
#include <sys/mman.h>

#include <stop_token>

#include "cpp/transports/copy_peers.h"
#include "cpp/transports/cuda/pair.h"
#include "transports/cma_process.h"
#include "transports/cuda/export.h"
#include "transports/cuda/protocol.h"
#include "transports/same_host/fd_protocol.h"
#include "transports/same_host/shared_mapping.h"

namespace kvlink::testing {
namespace {

using cma::Challenge, cma::CmaAddress, cma::ConsentMemory, cma::kMappingName, cma::Region;

constexpr uint32_t kShm = 0x316d'6873;
const WorkerRun kVictim{"victim", 7}, kLiar{"liar", 7};

std::unique_ptr<Transport> cma_of(const WorkerRun& self) {
  TransportOptions options;
  options.self = self;
  return std::move(*make_transport("cma", options));
}

std::string at(const std::string& address, uint64_t consent) {
  CmaAddress changed = *CmaAddress::parse(address);
  changed.consent = consent;
  return changed.blob();
}

/// Memory of `flags` with a copy of a consent in it, as a peer could bring it there.
class CopiedConsent {
 public:
  explicit CopiedConsent(const std::string& address, int flags, int fd = -1)
      : memory_(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, flags, fd, 0)) {
    std::memcpy(memory_, reinterpret_cast<const void*>(CmaAddress::parse(address)->consent),
                sizeof(ConsentMemory));
  }
  ~CopiedConsent() { ::munmap(memory_, kBytes); }
  CopiedConsent(const CopiedConsent&) = delete;
  CopiedConsent& operator=(const CopiedConsent&) = delete;
  uint64_t address() const { return reinterpret_cast<uint64_t>(memory_); }

  static constexpr size_t kBytes = (sizeof(ConsentMemory) + 4095) / 4096 * 4096;

 private:
  void* const memory_;
};

class FalseCard : public ::testing::Test {
 protected:
  Status establish(const std::string& address, const WorkerRun& owner, Transport& accepts) {
    auto endpoint = std::move(*open_one(*reader_, address, owner));
    const std::string reply = *accepts.accept(1, endpoint->hello());
    Status status = endpoint->establish(reply, kSecondNs);
    const auto region = victim_->register_memory(pool_->range(), Access::kRead);
    EXPECT_EQ(endpoint->import_region((*region)->remote_key()).ok(), status.ok());
    return status;
  }

  const std::shared_ptr<HostMemory> pool_ = allocate(kPoolBytes);
  const std::unique_ptr<Transport> reader_ = cma_of({"reader", 1}), victim_ = cma_of(kVictim),
                                   liar_ = cma_of(kLiar);
};

TEST_F(FalseCard, OfTheLiarWithAnotherProcessIsRefused) {
  const std::string victim = victim_->address();
  EXPECT_EQ(establish(victim, kLiar, *liar_).code(), Code::kAccessDenied) << "the liar answers";
  EXPECT_EQ(establish(victim, kLiar, *victim_).code(), Code::kAccessDenied) << "the hello was passed on";
  EXPECT_EQ(establish(victim, kVictim, *liar_).code(), Code::kAccessDenied) << "under the name of the other";
  EXPECT_EQ(establish(victim, {"victim", 6}, *victim_).code(), Code::kAccessDenied) << "of another run";
  EXPECT_EQ(establish(victim, {"victi", 7}, *victim_).code(), Code::kAccessDenied) << "a shorter name";
}

/// Memory that peers can write proves nothing, such as a block that the victim pulled from a liar.
TEST_F(FalseCard, OfBytesThatLookLikeAConsentIsRefused) {
  const UniqueFd same_name(::memfd_create(kMappingName, MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(same_name.get(), CopiedConsent::kBytes), 0);
  const auto endpoint = std::move(*open_one(*reader_, victim_->address(), kVictim));
  const std::string reply = *victim_->accept(1, endpoint->hello());
  const CopiedConsent in_private(victim_->address(), MAP_PRIVATE | MAP_ANONYMOUS);
  const CopiedConsent in_shared(victim_->address(), MAP_SHARED, same_name.get());
  const uint64_t right = CmaAddress::parse(victim_->address())->consent;
  for (const uint64_t consent : {in_private.address(), in_shared.address(), right + 64, uint64_t{4096}}) {
    auto misled = cma::Process::of(*CmaAddress::parse(at(victim_->address(), consent)), kVictim);
    Challenge challenge;
    ASSERT_TRUE(BlobReader(endpoint->hello(), cma::kMagic).fields(challenge).done());
    EXPECT_EQ(misled->believe(challenge, 0).code(), Code::kPeerUnreachable) << consent - right;
  }
  EXPECT_TRUE(endpoint->establish(reply, kSecondNs).ok());
}

/// Before the process has consented, what it has in its memory must not decide anything that the liar can
/// see.
TEST_F(FalseCard, TellsNothingOfTheMemoryAtItsAddress) {
  uint64_t word = 1;
  for (const uint64_t consent : {reinterpret_cast<uint64_t>(&word), uint64_t{4096}, UINT64_MAX / 2}) {
    EXPECT_TRUE(open_one(*reader_, at(victim_->address(), consent), kVictim).ok());
  }
}

TEST_F(FalseCard, OfAChildOfTheOwnerIsRefused) {
  RemoteOwner owner("cma");
  const pid_t child = owner.fork_child();
  CmaAddress address = *CmaAddress::parse(owner.card().address);
  address.pid = static_cast<uint64_t>(child);
  auto endpoint = std::move(*open_one(*reader_, address.blob()));
  EXPECT_EQ(endpoint->establish(owner.accept(1, endpoint->hello()), kSecondNs).code(),
            Code::kPeerUnreachable);
  ::kill(child, SIGKILL);
}

TEST_F(FalseCard, RefusesAReplyOfAPlaceThatNoOwnerHas) {
  auto endpoint = std::move(*open_one(*reader_, victim_->address(), kVictim));
  for (const uint32_t place : {cma::kNumChallenges, UINT32_MAX}) {
    const std::string reply = BlobWriter().u32(cma::kMagic).u32(place).take();
    EXPECT_EQ(endpoint->establish(reply, kSecondNs).code(), Code::kAccessDenied);
  }
}

TEST_F(FalseCard, KeysOfRegionsThatTheOwnerDoesNotExportAreRefused) {
  const auto region = victim_->register_memory(pool_->range(), Access::kRead);
  const auto later = std::move(*open_one(*reader_, victim_->address(), kVictim));
  ASSERT_TRUE(later->establish(*victim_->accept(1, later->hello()), kSecondNs).ok());
  const Region right = *Region::parse((*region)->remote_key());
  EXPECT_TRUE(later->import_region(right.key()).ok());
  for (uint64_t Region::* field : {&Region::address, &Region::bytes, &Region::access, &Region::memfd,
                                   &Region::memfd_inode, &Region::memfd_offset}) {
    Region wrong = right;
    wrong.*field = field == &Region::access ? 2 : wrong.*field + 8;
    EXPECT_EQ(later->import_region(wrong.key()).status().code(), Code::kAccessDenied);
  }
}

TEST_F(FalseCard, AFloodOfReadersCostsNoOtherCallerItsConsent) {
  auto endpoint = std::move(*open_one(*reader_, victim_->address(), kVictim));
  const std::string reply = *victim_->accept({1, 7}, endpoint->hello());
  for (uint64_t count = 0; count < 10'000; ++count) {
    auto other = std::move(*open_one(*reader_, victim_->address(), kVictim));
    ASSERT_TRUE(victim_->accept({2, 8 + count % 5}, other->hello()).ok());
  }
  EXPECT_TRUE(endpoint->establish(reply, kSecondNs).ok());
}

/// The secret that a reader shows is of the liar's choice.
TEST(FalseCardOfASocket, NamesNoSocketButAnOwners) {
  Owner owner("shm");
  HostAddress address = *HostAddress::parse(kShm, owner.card().address);
  for (const std::string name : {"", "dbus", "kvlink-", "kvlink-0123456789abcdef0123456789abcdeg"}) {
    address.socket = name;
    EXPECT_EQ(open_one(*owner.transport, address.blob(kShm)).status().code(), Code::kTransportUnavailable)
        << name;
  }
}

TEST(FalseCardOfASocket, KeysOfRegionsThatTheOwnerDoesNotExportAreRefused) {
  LocalPair pair("shm");
  for (size_t byte = 4; byte < pair.owner.card().pool_key.size(); ++byte) {
    Reader reader("shm",
                  {.address = pair.owner.card().address, .pool_key = {}, .table_key = {}, .words_key = {}},
                  [&](const std::string& hello) { return pair.accept(hello); });
    std::string key = pair.owner.card().pool_key;
    key[byte] = static_cast<char>(key[byte] ^ 1);
    EXPECT_EQ(reader.endpoint->import_region(key).status().code(), Code::kAccessDenied) << byte;
  }
}

/// A mapping of what is not there, or goes away, ends the reader by SIGBUS.
TEST(FalseCardOfASocket, FilesThatDoNotHoldTheirRegionForGoodAreRefused) {
  const auto server = *FdServer::listen(kShm);
  const auto memfd = [](uint64_t bytes, int seals) {
    UniqueFd fd(::memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
    return fd;
  };
  std::vector<FdOffer> offers;
  std::array files{memfd(1 << 20, 0), memfd(4096, F_SEAL_SHRINK), memfd(1 << 20, F_SEAL_GROW),
                   UniqueFd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC))};
  for (UniqueFd& fd : files) {
    offers.push_back(server->add(std::move(fd), {0, 0, 1 << 20, Access::kRead}));
  }
  std::jthread serving([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) server->serve();
  });
  auto transport = make_transport("shm", {});
  auto endpoint = std::move(*open_one(**transport, server->address()));
  ASSERT_TRUE(endpoint->establish(*server->accept(1, endpoint->hello()), 20 * kSecondNs).ok());
  for (const FdOffer& offer : offers) {
    BlobWriter key;
    key.u32(kShm);
    offer.write(key);
    EXPECT_EQ(endpoint->import_region(key.take()).status().code(), Code::kAccessDenied) << offer.id;
  }
}

/// The handle of cudaMalloc's memory opens all of an allocation, of which the pool may be a part.
TEST_F(Cuda, KeysThatTheOwnersProcessDoesNotTellAreRefused) {
  for (const auto kind : {GpuPool::Kind::kKvlink, GpuPool::Kind::kMalloc, GpuPool::Kind::kFabric}) {
    const Variable fabric("FAKE_CUDA_FABRIC", kind == GpuPool::Kind::kFabric ? "1" : nullptr);
    GpuOwner owner(kind);
    Server server(*owner.transport);
    const std::string right = owner.pool_region->remote_key();
    const auto changed = [&](auto change) {
      CudaKey key = *CudaKey::parse(right);
      change(key);
      return key.blob();
    };
    for (const std::string& wrong :
         {changed([](CudaKey& key) { key.bytes -= 1; }), changed([](CudaKey& key) { key.address += 4096; }),
          changed([](CudaKey& key) { key.offset += 64, key.bytes -= 64; }),
          changed([](CudaKey& key) { key.ipc.bytes[0] ^= 1, key.gpu.bytes[0] ^= 1; }),
          changed([](CudaKey& key) { key.deed += 1; }), changed([](CudaKey& key) { key.deed = 0; })}) {
      GpuReader reader;
      Card card = owner.card();
      card.pool_key = wrong;
      const Status status =
          reader.connect(card, [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
      EXPECT_EQ(status.code(), Code::kAccessDenied) << status.what();
    }
  }
}

/// The process itself may lie, too. A GPU that reads behind an allocation is lost to its process.
TEST_F(Cuda, AKeyOfMoreMemoryThanItsHandleOpensIsRefused) {
  std::array<int, 2> ends;
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
  const auto hear = [](int end) {
    std::string message(4096, '\0');
    message.resize(static_cast<size_t>(std::max<ssize_t>(::recv(end, message.data(), message.size(), 0), 0)));
    return message;
  };
  const auto say = [](int end, const std::string& message) {
    EXPECT_EQ(::send(end, message.data(), message.size(), MSG_NOSIGNAL), message.size());
  };
  const pid_t liar = ::fork();
  if (liar == 0) {
    const GpuPool pool(GpuPool::Kind::kMalloc);
    const auto server = *FdServer::listen(kCudaMagic);
    CudaKey key = *export_cuda(**cuda::Device::at(0), *server, pool.range());
    key.bytes += 1;
    key.deed = 0;
    key.deed = server->add(std::move(*memfd_of("lie", key.deed_blob())), key.deed_offer()).id;
    say(ends[1], server->address());
    say(ends[1], key.blob());
    say(ends[1], *server->accept(1, hear(ends[1])));
    for (;;) server->serve();
  }
  Card card{.address = hear(ends[0]), .pool_key = hear(ends[0]), .table_key = {}, .words_key = {}};
  GpuReader reader;
  const Status status = reader.connect(card, [&](const std::string& hello) {
    say(ends[0], hello);
    return hear(ends[0]);
  });
  EXPECT_EQ(status.code(), Code::kAccessDenied) << status.what();
  EXPECT_NE(status.what().find("than its handle"), std::string::npos) << status.what();
  ::kill(liar, SIGKILL);
  ::waitpid(liar, nullptr, 0);
  for (const int end : ends) ::close(end);
}

}  // namespace
}  // namespace kvlink::testing

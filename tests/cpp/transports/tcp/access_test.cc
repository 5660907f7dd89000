// SPDX-License-Identifier: Apache-2.0
// Access to tcp's owners, and reads into and out of devices.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <numeric>

#include "base/blob.h"
#include "cpp/staging/bounce_peers.h"
#include "cpp/transports/copy_peers.h"
#include "cpp/transports/tcp/raw.h"
#include "transports/factories.h"
#include "transports/tcp/reader.h"

namespace kvlink::testing {
namespace {

std::string forged_key(const std::string& key, uint64_t flip, uint64_t bytes, Access access) {
  BlobReader reader(key);
  return BlobWriter().u64(reader.u64() ^ flip).u64(bytes).u32(static_cast<uint32_t>(access)).take();
}

uint64_t key_of(const std::string& key) { return BlobReader(key).u64(); }

TEST(Tcp, RefusesLocallyWhatNoOwnerGranted) {
  LocalPair pair("tcp");
  Endpoint& endpoint = *pair.reader.endpoint;
  EXPECT_EQ(pair.reader.read_at(kPool, kPoolBytes - 8, 16).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(kPool, UINT64_MAX - 4, 16).code(), Code::kAccessDenied);
  EXPECT_EQ(pair.reader.read_at(9, 0, 16).code(), Code::kAccessDenied);
  EXPECT_EQ(endpoint.post_write(1, kPool, 0, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(endpoint.post_write(1, kWords, 12, 1).code(), Code::kAccessDenied);
  EXPECT_EQ(endpoint.post_write(1, kWords, kTableBytes, 1).code(), Code::kAccessDenied);
  Scatter short_by_one;
  short_by_one.add(kPool, 0, {{pair.reader.destination.data(), 64, 0}});
  short_by_one.ops[0].bytes = 65;
  EXPECT_EQ(pair.reader.read(short_by_one).code(), Code::kConfig);
  Scatter too_many;
  for (uint32_t op = 0; op <= tcp::kMaxFrameOps; ++op) {
    too_many.add(kPool, op * 8, {{&pair.reader.destination[op * 8], 8, 0}});
  }
  EXPECT_EQ(pair.reader.read(too_many).code(), Code::kConfig);
  EXPECT_TRUE(pair.reader.is_poisoned());
  EXPECT_TRUE(pair.reader.read_at(kPool, kPoolBytes - 16, 16).ok());
}

/// Refusals between good reads: what had landed ahead of a refusal is put where it belongs.
TEST(Tcp, OwnerRefusesForgedKeysAndServesOn) {
  LocalPair pair("tcp");
  Reader& reader = pair.reader;
  const Card card = pair.owner.card();
  const auto wrong_key =
      reader.endpoint->import_region(forged_key(card.pool_key, 1, kPoolBytes, Access::kRead));
  const auto too_long =
      reader.endpoint->import_region(forged_key(card.pool_key, 0, 2 * kPoolBytes, Access::kRead));
  const std::vector<std::byte> pool = expected_pool();
  std::mt19937_64 random(5);
  for (int round = 0; round < 50; ++round) {
    std::vector<Scatter> scatters(12);
    std::vector<Code> expected;
    for (size_t index = 0; index < scatters.size(); ++index) {
      const uint32_t bytes = random() % 3 == 0 ? 16 : 1 + random() % 100'000;
      const uint64_t kind = random() % 4;
      const uint32_t region = kind == 0 ? *wrong_key : kind == 1 ? *too_long : kPool;
      const uint64_t offset = kind == 1 ? kPoolBytes - bytes + 1 : random() % (kPoolBytes - bytes);
      scatters[index].add(region, offset, {{&reader.destination[index * 100'000], bytes, 0}});
      ASSERT_TRUE(reader.endpoint->post_read(index, scatters[index].chunk()).ok());
      expected.push_back(kind < 2 ? Code::kAccessDenied : Code::kOk);
    }
    std::vector<Completion> ended;
    while (ended.size() < scatters.size()) ASSERT_TRUE(poll_once(*reader.endpoint, ended).status.ok());
    for (size_t index = 0; index < scatters.size(); ++index) {
      ASSERT_EQ(ended[index].token, index);
      ASSERT_EQ(ended[index].status.code(), expected[index]) << ended[index].status.what();
      if (expected[index] == Code::kOk) expect_landed(scatters[index], pool);
    }
  }
}

TEST(Tcp, OwnerCutsOffForgedWrites) {
  const struct {
    const char* what;
    std::string Card::* key;
    uint64_t flip, offset;
  } forgeries[] = {{"a pool", &Card::pool_key, 0, 0},
                   {"a lease slot", &Card::table_key, 0, 64},
                   {"no such key", &Card::words_key, 1, 0},
                   {"outside", &Card::words_key, 0, kTableBytes},
                   {"half outside", &Card::words_key, 0, kTableBytes - 4},
                   {"overflow", &Card::words_key, 0, UINT64_MAX - 7},
                   {"unaligned", &Card::words_key, 0, 4}};
  for (const auto& forgery : forgeries) {
    Owner owner("tcp");
    Server server(*owner.transport);
    const Card card = owner.card();
    RawSocket socket(card.address);
    const auto reply = owner.transport->accept(1, tcp::encode_hello(0));
    ASSERT_EQ(socket.greet(card.address, *reply), tcp::Verdict::kAdmitted);
    const uint64_t key = key_of(card.*forgery.key) ^ forgery.flip;
    socket.say(write_frame({key, forgery.offset}, 0xdead));
    EXPECT_TRUE(socket.is_closed()) << forgery.what;
    EXPECT_EQ(std::memcmp(owner.pool->range().base, expected_pool().data(), kPoolBytes), 0) << forgery.what;
    for (const auto& memory : {owner.table, owner.words}) {
      const auto* words = reinterpret_cast<const uint64_t*>(memory->range().base);
      EXPECT_EQ(std::accumulate(words, words + kTableBytes / 8, uint64_t{0}), 0u) << forgery.what;
    }
  }
}

TEST(Tcp, AdmitsEachSecretOnceAndNoOther) {
  Owner owner("tcp");
  Server server(*owner.transport);
  const std::string address = owner.card().address;
  const auto open = [&] { return std::move(*open_one(*owner.transport, address)); };
  const std::string reply = *owner.transport->accept(1, tcp::encode_hello(0));
  for (size_t byte = 0; byte < reply.size(); ++byte) {
    std::string wrong = reply;
    wrong[byte] = static_cast<char>(wrong[byte] ^ 1);
    EXPECT_FALSE(open()->establish(wrong, 20 * kSecondNs).ok()) << byte;
  }
  auto first = open(), second = open();
  EXPECT_TRUE(first->establish(reply, 20 * kSecondNs).ok());
  EXPECT_EQ(second->establish(reply, 20 * kSecondNs).code(), Code::kAccessDenied);
  EXPECT_FALSE(owner.transport->accept(1, "nonsense").ok());
}

TEST(Tcp, RefusesAnOwnerThatIsAnotherProcessNow) {
  Owner owner("tcp");
  Server server(*owner.transport);
  tcp::Address address = *tcp::Address::parse(owner.card().address);
  address.instance ^= 1;
  auto endpoint = std::move(*open_one(*owner.transport, address.encode()));
  const Status status = endpoint->establish(*owner.transport->accept(1, endpoint->hello()), 20 * kSecondNs);
  EXPECT_EQ(status.code(), Code::kPeerUnreachable);
  EXPECT_NE(status.what().find("another process"), std::string::npos) << status.what();
}

/// A card can name the port of any service, and its publisher chooses what a hello has in it.
TEST(Tcp, SaysNothingToAPortThatHasNotShownThatItIsTheOwner) {
  const tcp::Greeting right{tcp::kHelloMagic, tcp::kVersion, 0, 7},
      other{tcp::kHelloMagic, tcp::kVersion, 0, 8};
  std::string chosen = "\r\nFLUSHALL\r\n";
  chosen.resize(sizeof(tcp::Secret));
  const std::string reply = Invitation{0, chosen}.encode();
  for (const std::string& said : {std::string("220 mail.example ESMTP ready...."), raw(other), raw(right)}) {
    const UniqueFd listener = std::move(*tcp::listen_on("127.0.0.1", 0));
    tcp::Address address = *tcp::local_address(listener.get());
    address.instance = right.instance;
    const auto endpoint = tcp::make_reader(address, 0);
    std::thread reader([&] { static_cast<void>(endpoint->establish(reply, 20 * kSecondNs)); });
    pollfd waiting{listener.get(), POLLIN, 0};
    ::poll(&waiting, 1, -1);
    std::optional<RawSocket> service(UniqueFd(::accept(listener.get(), nullptr, nullptr)));
    service->say(said);
    EXPECT_EQ(service->hear(sizeof(tcp::Hello)).size(), said == raw(right) ? sizeof(tcp::Hello) : 0) << said;
    service.reset();
    reader.join();
  }
}

TEST(Tcp, SaysThatNobodyListens) {
  std::string address;
  {
    address = Owner("tcp").card().address;
  }
  Owner owner("tcp");
  auto endpoint = std::move(*open_one(*owner.transport, address));
  const Status status = endpoint->establish(*owner.transport->accept(1, endpoint->hello()), 20 * kSecondNs);
  EXPECT_EQ(status.code(), Code::kPeerUnreachable);
  EXPECT_NE(status.what().find("127.0.0.1:"), std::string::npos) << status.what();
  std::vector<Completion> ended;
  EXPECT_EQ(poll_once(*endpoint, ended).status.code(), Code::kPeerUnreachable);
}

TEST(Tcp, LetsReadersInPastSilentAndNoisySockets) {
  Owner owner("tcp");
  Server server(*owner.transport);
  const Card card = owner.card();
  std::vector<RawSocket> crowd;
  for (int index = 0; index < 200; ++index) {
    crowd.emplace_back(card.address);
    if (index % 3 == 1) crowd.back().say(raw(tcp::kHelloMagic));  // and then nothing
    if (index % 3 == 2) crowd.back().say("GET / HTTP/1.1\r\n\r\n");
  }
  Reader reader("tcp", card, [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  EXPECT_TRUE(reader.read_at(kPool, 0, kBlock).ok());
  EXPECT_TRUE(crowd[0].is_closed());  // silent, and the oldest
  EXPECT_TRUE(crowd[2].is_closed());
  for (int index = 190; index < 200; ++index)
    EXPECT_EQ(crowd[index].is_closed(), true) << index;  // within 5 s
}

TEST(Tcp, FencesOneConnectionWhileAnotherGoesOn) {
  Owner owner("tcp");
  Server server(*owner.transport);
  const auto admit = [&](uint64_t id) {
    return [&owner, id](const std::string& hello) { return *owner.transport->accept(id, hello); };
  };
  Reader first("tcp", owner.card(), admit(1)), lane("tcp", owner.card(), admit(1));
  Reader other("tcp", owner.card(), admit(2));
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> reads = 0;
  std::thread busy([&] {
    for (; !stop; ++reads) EXPECT_TRUE(other.read_at(kPool, 0, 1 << 20).ok());
  });
  const std::string unused = *owner.transport->accept(1, first.endpoint->hello());
  EXPECT_TRUE(owner.transport->capabilities().can_fence);
  EXPECT_TRUE(owner.transport->fence(1));
  EXPECT_FALSE(owner.transport->fence(1));
  EXPECT_FALSE(owner.transport->fence(3));
  EXPECT_EQ(first.wait_broken().code(), Code::kPeerUnreachable);
  EXPECT_EQ(lane.wait_broken().code(), Code::kPeerUnreachable);
  auto late = std::move(*open_one(*owner.transport, owner.card().address));
  EXPECT_EQ(late->establish(unused, 20 * kSecondNs).code(), Code::kAccessDenied);
  for (const uint64_t before = reads; reads < before + 3;) std::this_thread::yield();
  stop = true;
  busy.join();
}

TEST(Tcp, FencesThoughAForkedChildHoldsTheSocket) {
  Owner owner("tcp");
  auto server = std::make_unique<Server>(*owner.transport);
  Reader reader("tcp", owner.card(),
                [&](const std::string& hello) { return *owner.transport->accept(1, hello); });
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  EXPECT_TRUE(owner.transport->fence(1));
  EXPECT_EQ(reader.wait_broken().code(), Code::kPeerUnreachable);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(Tcp, RevokesMemoryThatIsBeingSent) {
  constexpr size_t kBytes = 64 << 20, kOps = 64;
  void* mapping = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  Owner owner("tcp");
  auto exported = owner.transport->register_memory({static_cast<std::byte*>(mapping), kBytes}, Access::kRead);
  auto server = std::make_unique<Server>(*owner.transport);
  const auto admit = [&](const std::string& hello) { return *owner.transport->accept(1, hello); };
  Reader reader("tcp", owner.card(), admit), other("tcp", owner.card(), admit);
  const uint32_t region = *reader.endpoint->import_region((*exported)->remote_key());
  std::vector<std::byte> destination(kBytes / kOps);
  Scatter scatter;
  for (size_t op = 0; op < kOps; ++op) {
    scatter.add(region, op * destination.size(),
                {{destination.data(), static_cast<uint32_t>(destination.size()), 0}});
  }
  ASSERT_TRUE(reader.endpoint->post_read(1, scatter.chunk()).ok());
  std::vector<Completion> ended;
  while (destination[0] == std::byte{} && !poll_once(*reader.endpoint, ended).progressed) {
  }
  EXPECT_TRUE(other.read_at(kPool, 0, kBlock).ok());
  (*exported).reset();
  const Status status = reader.wait(1);
  EXPECT_EQ(status.code(), Code::kPeerUnreachable) << status.what();
  EXPECT_TRUE(other.read_at(kPool, 0, kBlock).ok());
  server.reset();
  ASSERT_EQ(::munmap(mapping, kBytes), 0);
}

TEST(Tcp, RefusesRegionsThatWereRevoked) {
  LocalPair pair("tcp");
  pair.owner.pool_region.reset();
  EXPECT_EQ(pair.reader.read_at(kPool, 0, kBlock).code(), Code::kAccessDenied);
  EXPECT_TRUE(pair.reader.read_at(kTable, 0, 64).ok());
}

TEST(Tcp, RefusesHostsThatPeersCannotDial) {
  for (const char* host : {"0.0.0.0", "::", "no such host", ""}) {
    TransportOptions options;
    options.host = host;
    EXPECT_EQ(tcp_make(options).status().code(), Code::kConfig) << host;
  }
  auto first = tcp_make({});
  TransportOptions taken;
  taken.port = (*tcp::Address::parse((*first)->address())).port;
  EXPECT_EQ(tcp_make(taken).status().code(), Code::kConfig);
}

TEST(Tcp, ListensOnEveryAddressIfItAdvertisesOne) {
  TransportOptions options;
  options.host = "0.0.0.0";
  options.advertise = "127.0.0.1";
  auto made = tcp_make(options);
  ASSERT_TRUE(made.ok()) << made.status().what();
  const auto address = tcp::Address::parse((*made)->address());
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(address->host, "127.0.0.1");
  for (const char* host : {"0.0.0.0", "::", "a name"}) {
    options.advertise = host;
    EXPECT_EQ(tcp_make(options).status().code(), Code::kConfig) << host;
  }
}

/// An Owner whose pool is on a device.
struct DeviceOwner {
  DeviceOwner() : device(kPoolBytes), bounce(must_make(device)), table(allocate(kTableBytes)) {
    fill_random({.base = device.behind(device.at(0)), .bytes = kPoolBytes}, 1);
    transport = must_make("tcp");
    pool_region = std::move(*transport->register_memory(device.range(), Access::kRead, bounce));
    table_region = std::move(*transport->register_memory(table->range(), Access::kReadWords));
    server = std::make_unique<Server>(*transport);
  }
  ~DeviceOwner() { device.go_on(); }
  Card card() const {
    return {transport->address(), pool_region->remote_key(), table_region->remote_key(), {}};
  }
  Reader::Accept accept(uint64_t connection) {
    return [this, connection](const std::string& hello) { return *transport->accept(connection, hello); };
  }

  FakeDevice device;
  std::shared_ptr<Bounce> bounce;
  std::shared_ptr<HostMemory> table;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<MemoryRegion> pool_region, table_region;
  std::unique_ptr<Server> server;
};

void await_copies(FakeDevice& device, Reader& reader) {
  std::vector<Completion> ended;
  while (device.num_under_way() == 0) ASSERT_TRUE(poll_once(*reader.endpoint, ended).status.ok());
}

TEST(TcpDevice, SendsEveryByteInItsPlace) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1));
  std::mt19937_64 random(4);
  for (int round = 0; round < 5; ++round) {
    reader.poison();
    std::vector<Scatter> scatters(4);
    std::vector<std::byte> wanted(kPoolBytes, kPoison);
    const std::vector<std::byte> pool = owner.device.contents();
    for (uint64_t to = 0, turn = 0; to < kPoolBytes; ++turn) {
      const uint64_t most = random() % 32 == 0 ? 3 * SlotRing::kSlotBytes : 20'000;
      const auto size = static_cast<uint32_t>(std::min(1 + random() % most, kPoolBytes - to));
      const uint64_t from = random() % (kPoolBytes - size);
      if (scatters[turn % 4].ops.size() == 1000) break;
      scatters[turn % 4].add(kPool, from, {{&reader.destination[to], size, 0}});
      std::memcpy(&wanted[to], &pool[from], size);
      to += size + random() % 50;
    }
    for (size_t index = 0; index < scatters.size(); ++index) {
      ASSERT_TRUE(reader.endpoint->post_read(index, scatters[index].chunk()).ok());
    }
    const Status status = reader.wait(scatters.size() - 1);
    ASSERT_TRUE(status.ok()) << status.what();
    ASSERT_TRUE(reader.destination == wanted);
    ASSERT_EQ(owner.bounce->sending().num_free(), kSlots);
  }
}

TEST(TcpDevice, GoesFromDeviceToDevice) {
  DeviceOwner owner;
  FakeDevice device(kPoolBytes);
  DeviceReader reader(device, must_make(device), "tcp", owner.card(), owner.accept(1));
  ASSERT_TRUE(reader.read(whole(device, kPoolBytes)).ok());
  EXPECT_TRUE(device.contents() == owner.device.contents());
}

TEST(TcpDevice, AWordBehindDataIsLoadedOnceTheDataHasBeenSent) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1));
  auto& word = *reinterpret_cast<std::atomic<uint64_t>*>(owner.table->range().base + 64);
  word = 1;
  owner.device.stall();
  Scatter data, behind;
  uint64_t seen = 0;
  data.add(kPool, 0, {{reader.destination.data(), 1 << 20, 0}});
  behind.add(kTable, 64, {{reinterpret_cast<std::byte*>(&seen), sizeof seen, 0}});
  ASSERT_TRUE(reader.endpoint->post_read(1, data.chunk()).ok());
  ASSERT_TRUE(reader.endpoint->post_read(2, behind.chunk()).ok());
  await_copies(owner.device, reader);
  word = 2;
  owner.device.go_on();
  const Status status = reader.wait(2);
  ASSERT_TRUE(status.ok()) << status.what();
  EXPECT_EQ(seen, 2u);
}

TEST(TcpDevice, RefusesFramesThatMixAndRangesOutside) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1));
  for (const uint32_t first : {kPool, kTable}) {
    Scatter mixed;
    mixed.add(first, 0, {{reader.destination.data(), 4096, 0}});
    mixed.add(kPool + kTable - first, 0, {{&reader.destination[4096], 4096, 0}});
    const Status status = reader.read(mixed);
    EXPECT_EQ(status.code(), Code::kAccessDenied);
    EXPECT_NE(status.what().find("at once"), std::string::npos) << status.what();
  }
  EXPECT_TRUE(reader.is_poisoned());
  EXPECT_TRUE(reader.read_at(kPool, 0, 4096).ok()) << "the connection goes on";
  EXPECT_TRUE(reader.read_at(kTable, 0, 64).ok());
}

/// Ends the copies of an owner once `waits` waits for them under its lock.
void go_on_once(FakeDevice& device, const std::function<void()>& waits) {
  std::thread later([&] {
    device.await_drain();
    device.go_on();
  });
  waits();
  EXPECT_EQ(device.num_under_way(), 0u);
  later.join();
}

TEST(TcpDevice, FencesWhoIsBeingSentTo) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1)), other("tcp", owner.card(), owner.accept(2));
  owner.device.stall();
  const Scatter pool = whole_pool(reader);
  ASSERT_TRUE(reader.endpoint->post_read(1, pool.chunk()).ok());
  await_copies(owner.device, reader);
  go_on_once(owner.device, [&] { EXPECT_TRUE(owner.transport->fence(1)); });
  EXPECT_EQ(reader.wait(1).code(), Code::kPeerUnreachable);
  EXPECT_TRUE(reader.is_poisoned());
  EXPECT_TRUE(other.read_at(kPool, 0, 4096).ok());
}

TEST(TcpDevice, NothingIsCopiedFromMemoryThatWasTakenBack) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1));
  owner.device.stall();
  const Scatter pool = whole_pool(reader);
  ASSERT_TRUE(reader.endpoint->post_read(1, pool.chunk()).ok());
  await_copies(owner.device, reader);
  go_on_once(owner.device, [&] { owner.pool_region.reset(); });
  EXPECT_EQ(reader.wait(1).code(), Code::kPeerUnreachable);
}

TEST(TcpDevice, NorFromAClosedTransport) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1));
  owner.device.stall();
  const Scatter pool = whole_pool(reader);
  ASSERT_TRUE(reader.endpoint->post_read(1, pool.chunk()).ok());
  await_copies(owner.device, reader);
  owner.server.reset();
  go_on_once(owner.device, [&] { owner.transport->close(); });
  EXPECT_EQ(reader.wait(1).code(), Code::kPeerUnreachable);
  EXPECT_EQ(owner.bounce->sending().num_free(), kSlots);
}

TEST(TcpDevice, ReadersThatStallHoldSlotsUntilTheyAreFenced) {
  DeviceOwner owner;
  Reader other("tcp", owner.card(), owner.accept(1));
  // Each wants more than sockets take. A connection that stalls holds what is left of one response, a slot at
  // least, so that many stalled ones hold all slots, wherever in a response each of them stalls.
  std::vector<std::unique_ptr<Reader>> stalled;
  std::vector<Scatter> pools(kSlots);
  std::vector<Completion> ended;
  for (size_t index = 0; index < kSlots; ++index) {
    stalled.push_back(std::make_unique<Reader>("tcp", owner.card(), owner.accept(index + 2)));
    Reader& reader = *stalled.back();
    for (int i = 0; i < 16; ++i) pools[index].add(kPool, 0, {{reader.destination.data(), kPoolBytes, 0}});
    ASSERT_TRUE(reader.endpoint->post_read(1, pools[index].chunk()).ok());
    ASSERT_TRUE(poll_once(*reader.endpoint, ended).status.ok());
  }
  while (owner.bounce->sending().num_free() > 0) std::this_thread::yield();
  Scatter block;
  block.add(kPool, 0, {{other.destination.data(), 4096, 0}});
  ASSERT_TRUE(other.endpoint->post_read(1, block.chunk()).ok());
  for (size_t index = 0; index < kSlots; ++index) EXPECT_TRUE(owner.transport->fence(index + 2));
  EXPECT_TRUE(other.wait(1).ok());
  EXPECT_EQ(std::memcmp(other.destination.data(), owner.device.contents().data(), 4096), 0);
}

TEST(TcpDevice, ALostDeviceEndsTheConnectionsThatNeedIt) {
  DeviceOwner owner;
  Reader reader("tcp", owner.card(), owner.accept(1)), other("tcp", owner.card(), owner.accept(2));
  owner.device.break_down();
  EXPECT_EQ(reader.read_at(kPool, 0, 4096).code(), Code::kPeerUnreachable);
  EXPECT_TRUE(other.read_at(kTable, 0, 64).ok());
}

}  // namespace
}  // namespace kvlink::testing

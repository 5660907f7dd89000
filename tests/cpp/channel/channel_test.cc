// SPDX-License-Identifier: Apache-2.0
// Two workers in one process whose reader knows the owner's card and nothing else, and callers that lie.
#include "channel/channel.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <latch>
#include <thread>

#include "base/clock.h"
#include "channel/connect.h"
#include "plan/planner.h"
#include "transports/registry.h"

namespace kvlink::channel {
namespace {

constexpr uint32_t kBlockBytes = 4096, kNumBlocks = 16;
constexpr int64_t kSecond = 1'000'000'000;
constexpr uint64_t kEpoch = 7;

void eventually(const std::function<bool()>& holds, const char* what) {
  for (const int64_t until = now_ns() + 20 * kSecond; !holds(); std::this_thread::yield()) {
    if (now_ns() > until) {
      ADD_FAILURE() << what;
      return;
    }
  }
}

Layout layout() {
  return {kNumBlocks, 1, 0, 1, kBlockBytes, kBlockBytes, kBlockBytes, kBlockBytes, {{0, 0, 0}}};
}

struct Worker {
  std::shared_ptr<HostMemory> memory = *HostMemory::allocate(uint64_t{kNumBlocks} * kBlockBytes, false);
  std::unique_ptr<Engine> engine;
  std::shared_ptr<Channel> channel;
  ChannelAddress address;

  explicit Worker(const std::vector<std::string>& transports, const Limits& limits = {},
                  uint64_t epoch = kEpoch) {
    EngineOptions options;
    options.epoch = epoch;
    options.transports = transports;
    options.transport.self = {"owner", epoch};
    engine = std::move(*Engine::make(options));
    EXPECT_TRUE(engine->add_pool_region(memory->range()).ok());
    EXPECT_TRUE(engine->start().ok());
    channel = *Channel::make(limits);
  }
  ~Worker() { close(); }
  void listen(uint16_t port = 0) { serve(serving(*engine), port); }
  void serve(Serving serving, uint16_t port = 0) {
    auto listening = channel->listen(std::move(serving), "127.0.0.1", port);
    ASSERT_TRUE(listening.ok()) << listening.status().what();
    address = *listening;
    ASSERT_TRUE(channel->publish("a sealed card").ok());
  }
  void close() {
    channel->close();
    engine->close();
  }
  OwnerCard card() const { return {"owner", kEpoch, engine->access(), address}; }
};

std::shared_ptr<Client> dialled(Worker& reader, const Worker& owner) {
  auto client = reader.channel->dial(owner.address, 10 * kSecond);
  EXPECT_TRUE(client.ok()) << client.status().what();
  return client.ok() ? *client : nullptr;
}

struct ChannelTest : ::testing::TestWithParam<const char*> {
  void SetUp() override {
    const Status here = find_transport(GetParam())->probe();
    if (!here.ok()) GTEST_SKIP() << here.what() << ": " << here.fix();
  }
};

std::shared_ptr<Transfer> pull(Worker& owner, Worker& reader, const Path& path, const LeaseSeat& seat) {
  auto planner = Planner::make(layout(), layout(), {reader.memory->range()}, {owner.memory->range().bytes},
                               path.regions, {});
  EXPECT_TRUE(planner.ok()) << planner.status().what();
  static const std::vector<uint32_t> kFrom{3, 1, 2}, kInto{0, 1, 2};
  PullRequest request;
  request.planner = *planner;
  request.owner_blocks = kFrom;
  request.reader_blocks = kInto;
  request.tokens = {0, 3};
  request.seat = seat;
  request.deadline_ns = now_ns() + 20 * kSecond;
  return path.connection->pull(request);
}

TEST_P(ChannelTest, ConnectsAndPulls) {
  Worker owner({GetParam()}), reader({GetParam()}, {}, 8);
  owner.listen();
  for (uint64_t at = 0; at < owner.memory->range().bytes; ++at) {
    owner.memory->range().base[at] = static_cast<std::byte>(at / 64 * 37 + at);
  }
  auto path = connect(*reader.engine, dialled(reader, owner), owner.card(), 10 * kSecond);
  ASSERT_TRUE(path.ok()) << path.status().sentence();
  EXPECT_EQ(path->transport, GetParam());
  const auto transfer = pull(owner, reader, *path, (*owner.engine->grant(1, 1, 0, 60 * kSecond))[0]);
  ASSERT_TRUE(transfer->wait(10 * kSecond));
  ASSERT_TRUE(transfer->status().ok()) << transfer->status().what();
  const uint32_t from[] = {3, 1, 2};
  for (uint32_t into = 0; into < 3; ++into) {
    EXPECT_EQ(std::memcmp(owner.memory->range().base + from[into] * kBlockBytes,
                          reader.memory->range().base + into * kBlockBytes, kBlockBytes),
              0);
  }
}

TEST_P(ChannelTest, APathEndsWithItsOwner) {
  Worker owner({GetParam()}), reader({GetParam()}, {}, 8);
  owner.listen();
  auto path = connect(*reader.engine, dialled(reader, owner), owner.card(), 10 * kSecond);
  ASSERT_TRUE(path.ok()) << path.status().sentence();
  owner.channel->close();  // the data path still works
  eventually([&] { return path->connection->broken(); }, "the connection outlives its owner's channel");
  EXPECT_NE(path->connection->why_broken().find("process has ended"), std::string::npos)
      << path->connection->why_broken();
  EXPECT_EQ(path->client->ended().code(), Code::kPeerUnreachable);
  EXPECT_EQ(path->client->card(10 * kSecond).status().code(), Code::kPeerUnreachable);
  // One that was being made meanwhile ends as well.
  const TransportAccess access = owner.engine->access().front();
  const auto late =
      *reader.engine->open(GetParam(), access.address, std::make_shared<PathStats>(), {"owner", kEpoch});
  const Accepted accepted = *owner.engine->accept(access.name, late->hellos());
  ASSERT_TRUE(late->establish(accepted.connection_id, accepted.replies, access.pool_keys, access.lease_keys,
                              kEpoch, 10 * kSecond)
                  .ok());
  path->client->end_with_owner(late);
  EXPECT_TRUE(late->broken());
}

INSTANTIATE_TEST_SUITE_P(Transports, ChannelTest, ::testing::Values("loopback", "shm", "cma", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Channel, TriesTransportsInTheOrderOfTheReader) {
  Worker owner({"loopback", "tcp"}), reader({"tcp", "loopback"}, {}, 8);
  owner.listen();
  OwnerCard card = owner.card();
  auto first = connect(*reader.engine, dialled(reader, owner), card, 10 * kSecond);
  ASSERT_TRUE(first.ok()) << first.status().sentence();
  EXPECT_EQ(first->transport, "tcp");
  EXPECT_TRUE(first->refusals.empty());
  card.transports[1].address = "spoilt";
  auto second = connect(*reader.engine, dialled(reader, owner), card, 10 * kSecond);
  ASSERT_TRUE(second.ok()) << second.status().sentence();
  EXPECT_EQ(second->transport, "loopback");
  ASSERT_EQ(second->refusals.size(), 1u);
  EXPECT_EQ(second->refusals[0].transport, "tcp");
  card.transports[0].refused = "no memory to export";
  const Status none = connect(*reader.engine, dialled(reader, owner), card, 10 * kSecond).status();
  EXPECT_EQ(none.code(), Code::kTransportUnavailable);
  for (const char* said : {"no transport reaches owner", "tcp: the owner's tcp address is malformed",
                           "loopback: owner cannot export its pool: no memory to export"}) {
    EXPECT_NE(none.what().find(said), std::string::npos) << none.what();
  }
}

TEST(Channel, SettlesAndRenewsAsTheAgentDoes) {
  Worker owner({"tcp"}), reader({"tcp"}, {}, 8);
  owner.listen();
  const auto client = dialled(reader, owner);
  const LeaseSeat seat = (*owner.engine->grant(1, 1, 0, 60 * kSecond))[0];
  const SeatRef ours{seat.slot, seat.settle_nonce}, wrong{seat.slot, seat.settle_nonce ^ 1024};
  EXPECT_EQ(*client->renew(std::vector<SeatRef>{ours, {seat.slot + 1, 1 << 20}}, 10 * kSecond),
            std::vector<uint32_t>{seat.slot + 1});
  EXPECT_FALSE(*client->settle(wrong, 10 * kSecond));
  EXPECT_EQ(owner.engine->leases().counts(now_ns()).settled, 0u);
  EXPECT_TRUE(*client->settle(ours, 10 * kSecond));
  eventually([&] { return !owner.engine->take_ended().empty(); }, "the lease was not settled");
  EXPECT_EQ(*client->card(10 * kSecond), "a sealed card");
}

/// A port that the kernel gives to nobody meanwhile, and that refuses connections: bound, and not listening.
/// Who names it may listen there.
struct ReservedPort {
  UniqueFd socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  uint16_t number = 0;

  ReservedPort() {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const any = reinterpret_cast<sockaddr*>(&at);
    socklen_t bytes = sizeof(at);
    const int on = 1;
    EXPECT_EQ(::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)), 0);
    EXPECT_EQ(::bind(socket.get(), any, bytes), 0);
    EXPECT_EQ(::getsockname(socket.get(), any, &bytes), 0);
    number = ntohs(at.sin_port);
  }
};

TEST(Channel, ARestartedOwnerAtTheSameAddressIsRefused) {
  const ReservedPort port;
  Worker reader({"tcp"}, {}, 8);
  ChannelAddress before;
  {
    Worker owner({"tcp"});
    owner.listen(port.number);
    before = owner.address;
  }
  const Status gone = reader.channel->dial(before, kSecond).status();
  EXPECT_EQ(gone.code(), Code::kPeerUnreachable) << gone.what();
  Worker again({"tcp"});
  again.listen(port.number);
  ASSERT_EQ(again.address.addresses, before.addresses);
  const Status restarted = reader.channel->dial(before, 10 * kSecond).status();
  EXPECT_EQ(restarted.code(), Code::kStaleBlocks);
  EXPECT_EQ(restarted.stale(), StaleReason::kRestarted);
  EXPECT_NE(restarted.what().find(before.addresses[0]), std::string::npos);
}

TEST(Channel, ReadersAreRefusedByName) {
  Worker owner({"tcp"}), reader({"tcp"}, {}, 8);
  auto listening = owner.channel->listen(serving(*owner.engine), "127.0.0.1", 0);
  ASSERT_TRUE(listening.ok());
  owner.address = *listening;
  EXPECT_NE(dialled(reader, owner)->card(10 * kSecond).status().what().find("starting"), std::string::npos);
  ASSERT_TRUE(owner.channel->publish("a card").ok());
  const auto client = dialled(reader, owner);
  EXPECT_EQ(client->connect({"owner", kEpoch, "verbs", {"hello"}}, 10 * kSecond).status().code(),
            Code::kTransportUnavailable);
  EXPECT_EQ(client->connect({"owner", kEpoch, "tcp", {}}, 10 * kSecond).status().code(), Code::kConfig);
  EXPECT_EQ(client->connect({"owner", kEpoch, "tcp", {std::string(kMaxConnectBytes, 'x')}}, 10 * kSecond)
                .status()
                .code(),
            Code::kConfig);
  ChannelAddress wrong = owner.address;
  wrong.credentials.secret[0] ^= 1;
  EXPECT_EQ(reader.channel->dial(wrong, 10 * kSecond).status().code(), Code::kAccessDenied);
  ChannelAddress needs_tls = owner.address;
  needs_tls.flags = kNeedsTls;
  const Status refused = reader.channel->dial(needs_tls, 10 * kSecond).status();
  EXPECT_EQ(refused.code(), Code::kTransportUnavailable);
  EXPECT_NE(refused.sentence().find("asks for TLS"), std::string::npos);
  for (const char* text : {"localhost:1", "127.0.0.1", ":1", "0.0.0.0:1", "127.0.0.1:0", "127.0.0.1:65536",
                           "127.0.0.1:1x", ""}) {
    EXPECT_FALSE(parse_address(text).ok()) << text;
  }
  EXPECT_EQ((*parse_address("[::1]:70")).text(), "[::1]:70");
  // The next address is tried when nothing answers at one.
  ChannelAddress several = owner.address;
  several.addresses.insert(several.addresses.begin(), "127.0.0.1:1");
  EXPECT_TRUE(reader.channel->dial(several, 10 * kSecond).ok());
}

TEST(Channel, APortOfAnotherServiceHearsNothing) {
  Worker reader({"tcp"}, {}, 8);
  const UniqueFd listener = std::move(*tcp::listen_on("127.0.0.1", 0));
  auto heard = std::async(std::launch::async, [&listener] {
    pollfd polled{listener.get(), POLLIN, 0};
    ::poll(&polled, 1, 20'000);
    const UniqueFd socket(::accept(listener.get(), nullptr, nullptr));
    const std::string banner = "220 mail.example ESMTP ready";
    ::send(socket.get(), banner.data(), banner.size(), MSG_NOSIGNAL);
    char piece[256];
    return ::recv(socket.get(), piece, sizeof piece, 0);
  });
  const ChannelAddress to{{(*tcp::local_address(listener.get())).text()}, {}};
  const Status refused = reader.channel->dial(to, 20 * kSecond).status();
  EXPECT_EQ(refused.code(), Code::kPeerUnreachable);
  EXPECT_NE(refused.what().find("no frame of kvlink's native channel"), std::string::npos) << refused.what();
  EXPECT_EQ(heard.get(), 0);
}

/// Accepts nothing before `go` is counted down.
Serving held_up(Engine& engine, std::latch& go) {
  Serving made = serving(engine);
  made.accept = [&engine, &go](const ConnectRequest& request, uint64_t caller) {
    go.wait();
    return engine.accept(request.transport, request.hellos, request.takes_keys, caller);
  };
  return made;
}

TEST(Channel, ASlowAcceptHoldsUpNothingElse) {
  Worker owner({"tcp"}, {.connects = 3, .connects_of_one = 2}), reader({"tcp"}, {}, 8);
  std::latch go(1);
  owner.serve(held_up(*owner.engine, go));
  const auto connection = *reader.engine->open("tcp", owner.engine->access().front().address);
  const auto first = dialled(reader, owner), second = dialled(reader, owner);
  const auto ask = [&](const std::shared_ptr<Client>& client) {
    return std::async(std::launch::async, [&connection, client] {
      return client->connect({"owner", kEpoch, "tcp", connection->hellos()}, 20 * kSecond);
    });
  };
  auto one = ask(first), two = ask(first);
  eventually([&] { return owner.channel->counts().connects == 2; }, "two do not wait");
  const Status of_one = first->connect({"owner", kEpoch, "tcp", connection->hellos()}, 20 * kSecond).status();
  EXPECT_NE(of_one.what().find("already admitting 2 readers"), std::string::npos) << of_one.what();
  EXPECT_EQ(of_one.code(), Code::kPeerUnreachable);
  auto three = ask(second);
  eventually([&] { return owner.channel->counts().connects == 3; }, "another caller has no share");
  EXPECT_FALSE(second->connect({"owner", kEpoch, "tcp", connection->hellos()}, 20 * kSecond).ok());
  EXPECT_EQ(*first->card(20 * kSecond), "a sealed card");
  go.count_down();
  EXPECT_TRUE(one.get().ok() && two.get().ok() && three.get().ok());
  EXPECT_EQ(owner.channel->counts().connects, 0u);
}

TEST(Channel, ABrokenContractCostsOneRequest) {
  Worker owner({"tcp"}), reader({"tcp"}, {}, 8);
  const auto broken = [] { broken_contract("more care", "test"); };
  owner.serve({[&](const ConnectRequest&, uint64_t) {
                 broken();
                 return Result<Accepted>(Accepted{});
               },
               [&](const SeatRef&) {
                 broken();
                 return true;
               },
               [](const SeatRef&) { return true; }});
  const auto client = dialled(reader, owner);
  EXPECT_NE(client->connect({"owner", kEpoch, "tcp", {"x"}}, 20 * kSecond).status().what().find("more care"),
            std::string::npos);
  EXPECT_NE(client->settle({1, 1}, 20 * kSecond).status().what().find("more care"), std::string::npos);
  EXPECT_TRUE(client->renew(std::vector<SeatRef>{{1, 1}}, 20 * kSecond).ok());
}

TEST(Channel, ClosesWhileReadersWait) {
  Worker owner({"tcp"}), reader({"tcp"}, {}, 8);
  std::latch go(1);
  owner.serve(held_up(*owner.engine, go));
  const auto connection = *reader.engine->open("tcp", owner.engine->access().front().address);
  const auto client = dialled(reader, owner);
  EXPECT_EQ(client->connect({"owner", kEpoch, "tcp", connection->hellos()}, 0).status().code(),
            Code::kTimeout);
  auto waiting = std::async(std::launch::async, [&] {
    return client->connect({"owner", kEpoch, "tcp", connection->hellos()}, 60 * kSecond);
  });
  eventually([&] { return owner.channel->counts().connects == 2; }, "nobody waits");
  auto closing = std::async(std::launch::async, [&] { owner.channel->close(); });
  auto closing_too = std::async(std::launch::async, [&] { owner.channel->close(); });
  go.count_down();
  closing.get();
  closing_too.get();
  const Status answered = waiting.get().status();  // the call of accept() that ran was waited for
  EXPECT_TRUE(answered.ok() || answered.code() == Code::kPeerUnreachable) << answered.what();
  EXPECT_EQ(owner.channel->counts().links, 0u);
  EXPECT_FALSE(reader.channel->dial(owner.address, kSecond).ok());
  reader.channel->close();
  EXPECT_EQ(reader.channel->dial(owner.address, kSecond).status().code(), Code::kPeerUnreachable);
  EXPECT_FALSE(owner.channel->listen(serving(*owner.engine), "127.0.0.1", 0).ok());
}

TEST(Connector, ConnectsOnThreadsOfItsOwn) {
  Worker owner({"tcp"}), reader({"tcp"}, {}, 8);
  std::latch go(1);
  owner.serve(held_up(*owner.engine, go));
  auto connector = *Connector::make(reader.channel, *reader.engine);
  std::promise<Result<Path>> told;
  std::future<Result<Path>> outcome = told.get_future();
  connector->start(owner.card(), 20 * kSecond, [&](Result<Path> path) { told.set_value(std::move(path)); });
  EXPECT_EQ(outcome.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  go.count_down();
  EXPECT_TRUE(outcome.get().ok());
}

TEST(Connector, GivesUp) {
  Worker owner({"tcp"}), reader({"tcp"}, {}, 8);
  std::latch go(1);
  owner.serve(held_up(*owner.engine, go));
  auto connector = *Connector::make(reader.channel, *reader.engine);
  Status outcome;
  connector->start(owner.card(), 3600 * kSecond, [&](const Result<Path>& path) { outcome = path.status(); });
  eventually([&] { return owner.channel->counts().connects == 1; }, "it does not connect");
  connector->close();
  EXPECT_EQ(outcome.code(), Code::kCancelled);
  go.count_down();
}

/// A caller without kvlink.
class Caller {
 public:
  explicit Caller(const Worker& owner) {
    const auto at = *parse_address(owner.address.addresses[0]);
    socket_ = std::move(*tcp::start_connect(at));
    pollfd polled{socket_.get(), POLLOUT, 0};
    ::poll(&polled, 1, 20'000);
  }
  bool say(const std::string& bytes) {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  /// Returns what comes until the owner closes.
  std::string all() {
    std::string got;
    char piece[4096];
    for (pollfd polled{socket_.get(), POLLIN, 0}; ::poll(&polled, 1, 20'000) == 1;) {
      const ssize_t bytes = ::recv(socket_.get(), piece, sizeof piece, 0);
      if (bytes <= 0) return got;
      got.append(piece, static_cast<size_t>(bytes));
    }
    ADD_FAILURE() << "the owner does not close";
    return got;
  }
  int fd() const { return socket_.get(); }

 private:
  UniqueFd socket_;
};

std::string greeting_of(const Worker& owner) { return OwnerSession(owner.address.credentials, 0).greeting(); }

std::string hello_to(const Worker& owner) {
  std::string said;
  std::vector<ReaderSession::Answer> none;
  ReaderSession(owner.address.credentials, {}, "").on_bytes(greeting_of(owner), said, none);
  return said;
}

TEST(HostileCaller, IsToldWhyAndCut) {
  Worker owner({"tcp"});
  owner.listen();
  for (const std::string& said :
       {std::string("GET / HTTP/1.1\r\n\r\n"), hello_to(owner) + std::string(200'000, 'x'),
        hello_to(owner) + encode(Type::kSettle, 1, std::string(13, 'x'))}) {
    Caller caller(owner);
    caller.say(said);
    const std::string got = caller.all();
    EXPECT_NE(got.find("frame"), std::string::npos) << got;
  }
  eventually([&] { return owner.channel->counts().links == 0; }, "a link is left");
}

TEST(HostileCaller, WhoIsSlowIsCut) {
  Worker owner({"tcp"}, {.frame_ns = kSecond / 20});
  owner.listen();
  Caller silent(owner), half(owner), admitted(owner), idle(owner);
  half.say(hello_to(owner).substr(0, 40));
  admitted.say(hello_to(owner) + encode(Type::kSettle, 1, encode_seat({1, 1})).substr(0, 20));
  idle.say(hello_to(owner));
  EXPECT_EQ(silent.all(), greeting_of(owner));
  EXPECT_EQ(half.all(), greeting_of(owner));
  EXPECT_EQ(admitted.all(), greeting_of(owner) + encode(Type::kAdmitted, 0));
  eventually([&] { return owner.channel->counts().links == 1; }, "a slow one is left");
  EXPECT_TRUE(idle.say(encode(Type::kCard, 1) + encode(Type::kHello, 0)));
  EXPECT_NE(idle.all().find("a sealed card"), std::string::npos) << "one that only waits was cut";
}

TEST(HostileCaller, ManyConnectsHoldLittleAndLetOthersIn) {
  Worker owner({"tcp"}), reader({"tcp"}, {}, 8);
  owner.listen();
  std::vector<std::unique_ptr<Caller>> callers;
  const std::string half = hello_to(owner).substr(0, 63);
  size_t most = 0;
  for (size_t count = 0; count < 10'000; ++count) {
    auto caller = std::make_unique<Caller>(owner);
    caller->say(half);
    if (callers.size() < 200) {
      callers.push_back(std::move(caller));
    } else {
      callers[count % 200] = std::move(caller);
    }
    if (count % 100 == 0) most = std::max(most, owner.channel->counts().links);
  }
  EXPECT_LE(most, Limits{}.pending);
  EXPECT_LE(owner.channel->counts().held_bytes, Limits{}.pending * 4096);
  EXPECT_EQ(*dialled(reader, owner)->card(20 * kSecond), "a sealed card");
}

int64_t peak_bytes() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return int64_t{used.ru_maxrss} << 10;
}

TEST(HostileCaller, WhoTakesNoAnswersHoldsLittle) {
  const int64_t before = peak_bytes();
  Worker owner({"tcp"}, {.held_bytes = 8 << 20});
  owner.listen();
  ASSERT_TRUE(owner.channel->publish(std::string(1 << 20, 'c')).ok());
  Caller greedy(owner);
  greedy.say(hello_to(owner));
  std::string asked;
  for (uint32_t id = 1; id <= 4000; ++id) asked += encode(Type::kCard, id);
  greedy.say(asked);
  size_t most = 0;
  eventually(
      [&] {
        most = std::max(most, owner.channel->counts().held_bytes);
        return owner.channel->counts().links == 0;
      },
      "it is served for ever");
  EXPECT_LE(most, size_t{8} << 20);
  EXPECT_LE(peak_bytes() - before, int64_t{512} << 20);  // the answers have 4 GiB
}

TEST(HostileCaller, WhoNeverTakesItsAnswersIsCut) {
  Worker owner({"tcp"}, {.frame_ns = kSecond / 20});
  owner.listen();
  ASSERT_TRUE(owner.channel->publish(std::string(kMaxCardBytes - 64, 'c')).ok());
  Caller greedy(owner);
  const int little = 4096;
  ::setsockopt(greedy.fd(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
  size_t most = 0;
  for (uint32_t id = 1; id <= 5; ++id) {  // the kernel holds one or two of them
    greedy.say((id == 1 ? hello_to(owner) : std::string()) + encode(Type::kCard, id));
    most = std::max(most, owner.channel->counts().held_bytes);
  }
  eventually([&] { return owner.channel->counts().links == 0; }, "it is served for ever");
  EXPECT_LE(most, size_t{3} * kMaxCardBytes);
}

TEST(HostileCaller, HalfFramesOfManyHoldNoMoreThanTheLimit) {
  constexpr size_t kHeld = 256 << 10, kHalf = 60'000;
  Worker owner({"tcp"}, {.held_bytes = kHeld}), reader({"tcp"}, {}, 8);
  owner.listen();
  const ConnectRequest request{"owner", kEpoch, "tcp", {std::string(kHalf, 'x')}};
  const std::string half = encode(Type::kConnect, 1, write_connect_request(request)).substr(0, kHalf);
  std::vector<std::unique_ptr<Caller>> callers;
  for (int count = 0; count < 16; ++count) {
    callers.push_back(std::make_unique<Caller>(owner));
    callers.back()->say(hello_to(owner) + half);
  }
  // The owner has read by the end of a round trip all that had come before it.
  const auto honest = dialled(reader, owner);
  EXPECT_EQ(*honest->card(20 * kSecond), "a sealed card");
  EXPECT_LE(owner.channel->counts().links, 1 + kHeld / kHalf);
  EXPECT_LE(owner.channel->counts().held_bytes, kHeld);
}

TEST(Channel, AForkedChildLeavesItAlone) {
  Worker owner({"tcp"}), reader({"tcp"}, {}, 8);
  owner.listen();
  auto client = dialled(reader, owner);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused = reader.channel->dial(owner.address, kSecond).status().code() == Code::kConfig &&
                         client->card(kSecond).status().code() == Code::kConfig &&
                         !owner.channel->publish("another").ok();
    client.reset();
    owner.channel->close();  // has no threads to wait for
    ::_exit(refused ? 0 : 1);
  }
  int how = -1;
  ASSERT_EQ(::waitpid(child, &how, 0), child);
  EXPECT_EQ(how, 0);
  EXPECT_EQ(*client->card(20 * kSecond), "a sealed card");
}

}  // namespace
}  // namespace kvlink::channel

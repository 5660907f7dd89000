// SPDX-License-Identifier: Apache-2.0
// Hostile bytes at either end of a tcp connection: never a crash, never a byte outside the segments or the
// regions. Seeds are fixed.
#include <gtest/gtest.h>

#include <map>
#include <optional>

#include "base/blob.h"
#include "cpp/transports/copy_peers.h"
#include "cpp/transports/tcp/raw.h"
#include "transports/tcp/reader.h"
#include "transports/tcp/response_queue.h"

namespace kvlink::testing {
namespace {

using Random = std::mt19937_64;

void mutate(std::string& bytes, Random& random) {
  for (uint64_t flips = 1 + random() % 4; flips > 0 && !bytes.empty(); --flips) {
    bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
  }
  if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
  if (random() % 4 == 0) bytes.insert(random() % (bytes.size() + 1), raw(random()));
}

std::string random_response(uint32_t id, uint64_t bytes, Random& random) {
  const auto status = static_cast<tcp::ReadStatus>(random() % 8 == 0 ? random() % 5 : 0);
  const bool whole = status == tcp::ReadStatus::kOk;
  return raw(tcp::ResponseHeader{tcp::kFrameMagic, status, id, whole ? bytes : 0}) +
         std::string(whole ? bytes : 0, static_cast<char>(random()));
}

/// The owner's memory, with canaries that no frame may reach.
TEST(TcpFuzz, OwnerSurvivesMutatedFrames) {
  Owner owner("tcp");
  Server server(*owner.transport);
  const Card card = owner.card();
  std::vector<std::byte> fenced(3 * 4096, kPoison);
  auto exported = owner.transport->register_memory({fenced.data() + 4096, 4096}, Access::kWriteWords);
  const uint64_t keys[] = {BlobReader(card.pool_key).u64(), BlobReader((*exported)->remote_key()).u64()};
  Random random(21);
  for (int round = 0; round < 400; ++round) {
    RawSocket socket(card.address);
    const auto reply = owner.transport->accept(1, tcp::encode_hello(0));
    ASSERT_EQ(socket.greet(card.address, *reply), tcp::Verdict::kAdmitted);
    std::string frames;
    for (uint64_t count = 1 + random() % 8; count > 0; --count) {
      const uint64_t key = keys[random() % 2];
      if (random() % 3 == 0) {
        frames += write_frame({key, random() % 4200 & ~uint64_t{random() % 8}}, random());
        continue;
      }
      std::vector<tcp::ReadEntry> entries(1 + random() % 20);
      for (tcp::ReadEntry& entry : entries) entry = {key, random() % 5000, random() % 5000};
      const tcp::GuardEntry guard{keys[random() % 2], random() % 4200 & ~uint64_t{random() % 8},
                                  random() % 2};
      frames += random() % 2 == 0 ? read_frame(entries, random()) : guarded_frame(guard, entries, random());
    }
    if (round % 4 != 0) mutate(frames, random);
    for (size_t at = 0; at < frames.size();) {  // in pieces, so that frames arrive torn
      const size_t bytes = std::min<size_t>(frames.size() - at, 1 + random() % 500);
      if (!socket.say(std::string_view(frames).substr(at, bytes))) break;
      at += bytes;
    }
  }
  Reader reader("tcp", card, [&](const std::string& hello) { return *owner.transport->accept(2, hello); });
  EXPECT_TRUE(reader.read_at(kPool, 0, 1 << 20).ok());
  std::vector<std::byte> pool(kPoolBytes);
  fill_random({pool.data(), pool.size()}, 1);
  EXPECT_EQ(std::memcmp(owner.pool->range().base, pool.data(), pool.size()), 0);
  for (size_t at = 0; at < 4096; ++at) {
    ASSERT_EQ(fenced[at], kPoison);
    ASSERT_EQ(fenced[2 * 4096 + at], kPoison);
  }
}

TEST(TcpFuzz, OwnerSurvivesGarbageBeforeAndAfterTheGreeting) {
  Owner owner("tcp");
  Server server(*owner.transport);
  const Card card = owner.card();
  Random random(22);
  for (int round = 0; round < 200; ++round) {
    RawSocket socket(card.address);
    if (round % 2 == 0) {
      const auto reply = owner.transport->accept(1, tcp::encode_hello(0));
      ASSERT_EQ(socket.greet(card.address, *reply), tcp::Verdict::kAdmitted);
    }
    std::string garbage;
    for (uint64_t words = random() % 100; words > 0; --words) garbage += raw(random());
    socket.say(garbage);
  }
  Reader reader("tcp", card, [&](const std::string& hello) { return *owner.transport->accept(2, hello); });
  EXPECT_TRUE(reader.read_at(kPool, 0, 1 << 20).ok());
}

/// An owner that admits anybody and then says what the test wants.
struct FakeOwner {
  FakeOwner() : listener(std::move(*tcp::listen_on("127.0.0.1", 0))) {
    tcp::Address address = *tcp::local_address(listener.get());
    endpoint = tcp::make_reader(address, 0);
    std::thread admit([this] {
      pollfd waiting{listener.get(), POLLIN, 0};
      ::poll(&waiting, 1, 10'000);
      socket.emplace(UniqueFd(::accept(listener.get(), nullptr, nullptr)));
      socket->say(raw(tcp::Greeting{tcp::kHelloMagic, tcp::kVersion, 0, 0}));
      socket->hear(sizeof(tcp::Hello));
      socket->say(raw(tcp::HelloReply{tcp::kHelloMagic, tcp::kVersion, tcp::Verdict::kAdmitted}));
    });
    EXPECT_TRUE(endpoint->establish(uninvited(), 20 * kSecondNs).ok());
    admit.join();
    EXPECT_TRUE(endpoint->import_region(BlobWriter().u64(1).u64(1 << 20).u32(0).take()).ok());
  }
  UniqueFd listener;
  std::unique_ptr<Endpoint> endpoint;
  std::optional<RawSocket> socket;
};

TEST(TcpFuzz, ReaderSurvivesMutatedResponses) {
  Random random(23);
  int broken = 0, served = 0;
  for (int round = 0; round < 300; ++round) {
    FakeOwner owner;
    constexpr size_t kSlot = 1 << 16;
    std::vector<std::byte> memory(6 * kSlot, kPoison);
    std::vector<Scatter> scatters(5);
    std::string responses;
    std::vector<bool> inside(memory.size());
    for (uint32_t id = 0; id < scatters.size(); ++id) {
      uint64_t bytes = 0;
      std::vector<Segment> pieces;
      for (size_t at = id * kSlot + 64; pieces.size() < 4 && at + 9000 < (id + 1) * kSlot; at += 10'000) {
        const auto size = static_cast<uint32_t>(random() % 2 == 0 ? 8 : 1 + random() % 9000);
        pieces.push_back({&memory[at], size, 0});
        std::fill_n(inside.begin() + static_cast<ptrdiff_t>(at), size, true);
        bytes += size;
      }
      scatters[id].add(0, 0, pieces);
      ASSERT_TRUE(owner.endpoint->post_read(id, scatters[id].chunk()).ok());
      responses += random_response(id, bytes, random);
    }
    if (round % 4 != 0) mutate(responses, random);
    if (random() % 2 == 0) owner.endpoint->cancel(random() % scatters.size());
    std::vector<Completion> ended;
    Status status;
    for (size_t at = 0; at < responses.size() && status.ok();) {
      const size_t bytes = std::min<size_t>(responses.size() - at, 1 + random() % 20'000);
      owner.socket->say(std::string_view(responses).substr(at, bytes));
      at += bytes;
      status = poll_once(*owner.endpoint, ended).status;
    }
    owner.socket.reset();
    while (status.ok()) status = poll_once(*owner.endpoint, ended).status;
    EXPECT_EQ(status.code(), Code::kPeerUnreachable);
    broken += status.what().find("protocol error") != std::string::npos;
    served += !ended.empty();
    for (size_t at = 0; at < memory.size(); ++at) ASSERT_TRUE(inside[at] || memory[at] == kPoison) << at;
  }
  EXPECT_GT(broken, 10);
  EXPECT_GT(served, 10);
}

/// A read of the test below, and what its memory should have in the end.
struct Expected {
  Scatter scatter;
  std::vector<std::byte> memory;  // with a gap behind every piece
  std::string payload;
  bool refused = false, forgotten = false;
  std::vector<std::byte> when_forgotten;
};

void expect_landed(const std::map<uint64_t, Expected>& reads, const std::vector<Completion>& ended) {
  size_t next = 0;
  for (const auto& [token, read] : reads) {
    if (read.forgotten) {
      ASSERT_EQ(read.memory, read.when_forgotten);
      continue;
    }
    ASSERT_LT(next, ended.size());
    ASSERT_EQ(ended[next].token, token);
    ASSERT_EQ(ended[next++].status.code(), read.refused ? Code::kAccessDenied : Code::kOk);
    std::string landed;
    std::vector<std::byte> outside = read.memory;
    for (const Segment& piece : read.scatter.segments) {
      landed.append(reinterpret_cast<const char*>(piece.local), piece.bytes);
      std::fill_n(&outside[static_cast<size_t>(piece.local - read.memory.data())], piece.bytes, kPoison);
    }
    ASSERT_TRUE(read.refused || landed == read.payload);
    ASSERT_EQ(std::count(outside.begin(), outside.end(), kPoison), 20'000);
  }
  ASSERT_EQ(next, ended.size());
}

/// Random streams, torn anywhere, with refusals and forgotten reads, against what should have landed.
TEST(TcpFuzz, LandingPutsEveryByteInItsPlace) {
  Random random(24);
  for (int round = 0; round < 1000; ++round) {
    tcp::ResponseQueue landing("owner");
    std::map<uint64_t, Expected> reads;
    std::string stream;
    for (uint64_t token = 0; token < 12; ++token) {
      Expected& read = reads[token];
      read.memory.assign(20'000, kPoison);
      size_t at = 0;
      uint64_t bytes = 0;
      for (uint64_t ops = 1 + random() % 3; ops > 0; --ops) {
        std::vector<Segment> pieces;
        for (uint64_t count = 1 + random() % 3; count > 0; --count) {
          const auto size = static_cast<uint32_t>(1 + (random() % 2 == 0 ? random() % 20 : random() % 1500));
          pieces.push_back({&read.memory[at], size, 0});
          at += size + 1;
          bytes += size;
        }
        read.scatter.add(0, 0, pieces);
      }
      for (uint64_t byte = 0; byte < bytes; ++byte) read.payload += static_cast<char>(random() % 100);
      read.refused = random() % 4 == 0;
      const auto status = read.refused ? tcp::ReadStatus::kUnknownKey : tcp::ReadStatus::kOk;
      stream += raw(tcp::ResponseHeader{tcp::kFrameMagic, status, static_cast<uint32_t>(token),
                                        read.refused ? 0 : bytes});
      if (!read.refused) stream += read.payload;
      landing.expect(token, static_cast<uint32_t>(token), read.scatter.chunk(), bytes);
    }
    std::vector<Completion> ended;
    for (size_t at = 0; at < stream.size();) {
      if (random() % 8 == 0) {
        const uint64_t token = random() % reads.size();
        const bool over =
            std::any_of(ended.begin(), ended.end(), [=](const Completion& e) { return e.token == token; });
        if (!over && !std::exchange(reads[token].forgotten, true)) {
          landing.forget(token);
          reads[token].when_forgotten = reads[token].memory;
        }
      }
      size_t left = std::min<size_t>(stream.size() - at, 1 + random() % 4000), taken = 0;
      for (const iovec& place : landing.places(1 + random() % 5000)) {
        const size_t bytes = std::min(place.iov_len, left);
        std::memcpy(place.iov_base, stream.data() + at + taken, bytes);
        taken += bytes;
        left -= bytes;
      }
      at += taken;
      ASSERT_TRUE(landing.landed(taken, ended).ok());
    }
    ASSERT_TRUE(landing.empty());
    expect_landed(reads, ended);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

/// Different pulls may share a destination: what lands early must not run over what has to be taken back.
TEST(TcpLanding, TakesReadsOfOneDestinationApart) {
  std::string memory(8000, '-');
  Scatter scatter;
  scatter.add(0, 0, {{reinterpret_cast<std::byte*>(memory.data()), 8000, 0}});
  tcp::ResponseQueue landing("owner");
  std::string stream;
  for (uint32_t id = 0; id < 4; ++id) {
    const bool refused = id == 0;
    landing.expect(id, id, scatter.chunk(), memory.size());
    stream += raw(tcp::ResponseHeader{tcp::kFrameMagic,
                                      refused ? tcp::ReadStatus::kOutOfBounds : tcp::ReadStatus::kOk, id,
                                      refused ? 0 : memory.size()});
    if (!refused) stream += std::string(memory.size(), static_cast<char>('a' + id));
  }
  std::vector<Completion> ended;
  const Status status = land_stream(landing, stream, ended);
  EXPECT_TRUE(status.ok()) << status.what();
  EXPECT_EQ(ended.size(), 4u);
  EXPECT_EQ(memory, std::string(8000, 'd'));
}

TEST(TcpLanding, RefusesResponsesThatDoNotFitTheirRequest) {
  const tcp::ResponseHeader good{tcp::kFrameMagic, tcp::ReadStatus::kOk, 5, 8};
  std::vector<tcp::ResponseHeader> headers(6, good);
  headers[1].magic ^= 1;
  headers[2].id = 4;
  headers[3].bytes = 7;
  headers[4].status = static_cast<tcp::ReadStatus>(9);
  headers[5].status = tcp::ReadStatus::kUnknownKey;  // refused, and yet with payload
  for (size_t index = 0; index < headers.size(); ++index) {
    uint64_t word = 0;
    Scatter scatter;
    scatter.add(0, 0, {{reinterpret_cast<std::byte*>(&word), 8, 0}});
    tcp::ResponseQueue landing("owner");
    landing.expect(1, 5, scatter.chunk(), 8);
    std::vector<Completion> ended;
    const Status status = land_stream(landing, raw(headers[index]) + "12345678", ended);
    EXPECT_EQ(status.code(), index == 0 ? Code::kOk : Code::kPeerUnreachable) << index;
    EXPECT_EQ(word != 0, index == 0) << index;
    if (index > 0) continue;
    EXPECT_EQ(land_stream(landing, "x", ended).code(), Code::kPeerUnreachable);  // nobody asked for more
  }
}

TEST(TcpFuzz, BlobsAreRefusedOrHarmless) {
  Owner owner("tcp");
  const Card card = owner.card();
  auto endpoint = std::move(*open_one(*owner.transport, card.address));
  Random random(25);
  for (int round = 0; round < 2000; ++round) {
    std::string address = card.address, key = card.pool_key, hello = endpoint->hello();
    mutate(address, random);
    mutate(key, random);
    mutate(hello, random);
    (void)open_one(*owner.transport, address);
    (void)endpoint->import_region(key);
    if (!owner.transport->accept(1, hello).ok()) continue;
    owner.transport->fence(1);
  }
  EXPECT_FALSE(open_one(*owner.transport, "").ok());
  EXPECT_FALSE(open_one(*owner.transport, card.address + "x").ok());
  EXPECT_FALSE(endpoint->import_region(card.pool_key.substr(1)).ok());
  EXPECT_FALSE(endpoint->import_region(card.pool_key + "x").ok());
  EXPECT_FALSE(owner.transport->accept(1, "").ok());
}

}  // namespace
}  // namespace kvlink::testing

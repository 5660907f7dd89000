// SPDX-License-Identifier: Apache-2.0
// The two ends of a transport for tests: an owner in this process or in a forked one, and a reader connected
// to it.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "cpp/transports/contract.h"
#include "cpp/transports/toy_transport.h"
#include "memory/host_memory.h"
#include "transport_api/transport.h"
#include "transports/registry.h"

namespace kvlink::testing {

inline constexpr uint64_t kPoolBytes = 8 << 20;
inline constexpr uint64_t kTableBytes = 64 << 10;
inline constexpr uint32_t kBlock = 16 << 10;
inline constexpr uint32_t kPool = 0, kTable = 1, kWords = 2;  // as every Reader imports them
inline constexpr std::byte kPoison{0xa5};
inline constexpr int64_t kSecondNs = 1'000'000'000;

inline std::shared_ptr<HostMemory> allocate(uint64_t bytes) {
  auto memory = HostMemory::allocate(bytes, false);
  EXPECT_TRUE(memory.ok()) << memory.status().what();
  return *memory;
}

inline std::shared_ptr<HostMemory> allocate_words() {
  auto memory = HostMemory::allocate(kTableBytes, false, {}, Access::kWriteWords);
  EXPECT_TRUE(memory.ok()) << memory.status().what();
  return *memory;
}

inline void fill_random(const MemoryRange& range, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (uint64_t at = 0; at + 8 <= range.bytes; at += 8) {
    const uint64_t word = random();
    std::memcpy(range.base + at, &word, sizeof word);
  }
}

/// The part of an owner's card that the control plane carries.
struct Card {
  std::string address, pool_key, table_key, words_key;
};

/// A transport that exports a pool of random bytes (of a seed), and a zeroed table and words.
class Owner {
 public:
  explicit Owner(const std::string& name, uint64_t seed = 1)
      : pool(allocate(kPoolBytes)), table(allocate(kTableBytes)), words(allocate_words()) {
    fill_random(pool->range(), seed);
    auto made = make_transport(name, {}, transports_and_toy());
    EXPECT_TRUE(made.ok()) << made.status().what();
    transport = std::move(*made);
    auto exported_pool = transport->register_memory(pool->range(), Access::kRead);
    auto exported_table = transport->register_memory(table->range(), Access::kReadWords);
    auto exported_words = transport->register_memory(words->range(), Access::kWriteWords);
    EXPECT_TRUE(exported_pool.ok() && exported_table.ok() && exported_words.ok());
    pool_region = std::move(*exported_pool);
    table_region = std::move(*exported_table);
    words_region = std::move(*exported_words);
  }
  Card card() const {
    return {transport->address(), pool_region->remote_key(), table_region->remote_key(),
            words_region->remote_key()};
  }

  std::shared_ptr<HostMemory> pool, table, words;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<MemoryRegion> pool_region, table_region, words_region;
};

/// Runs the owner's serve() as the engine's thread would.
class Server {
 public:
  explicit Server(Transport& transport) : transport_(transport), thread_([this] { run(); }) {}
  ~Server() {
    stop_ = true;
    thread_.join();
  }

 private:
  void run() {
    while (!stop_) {
      pollfd work{transport_.capabilities().serve_fd, POLLIN, 0};
      if (::poll(&work, 1, 5) > 0) transport_.serve();
    }
  }
  Transport& transport_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// An Owner in a forked process, which answers accept() over a socket and serves.
class RemoteOwner {
 public:
  explicit RemoteOwner(const std::string& name, std::function<void()> at_start = {}) {
    std::array<int, 2> ends;
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      if (at_start) at_start();
      run(name, ends[1]);
      ::_exit(0);
    }
    ::close(ends[1]);
    control_ = ends[0];
    card_ = {hear(), hear(), hear(), hear()};
  }
  ~RemoteOwner() {
    ::close(control_);
    kill(SIGKILL);
  }

  const Card& card() const { return card_; }
  pid_t pid() const { return pid_; }
  std::string accept(uint64_t connection, const std::string& hello) {
    say(std::string("a") + static_cast<char>(connection) + hello);
    return hear();
  }
  /// Closes the owner's transport in an orderly way.
  void close_transport() {
    say("c");
    hear();
  }
  /// Has the owner fork a child that does nothing but keep what it inherits. The caller kills it.
  pid_t fork_child() {
    say("f");
    return static_cast<pid_t>(std::stol(hear()));
  }
  /// The word at `offset` of those that peers write, as the owner sees it.
  uint64_t peer_word(uint64_t offset) {
    std::string order = "w";
    say(order.append(reinterpret_cast<const char*>(&offset), sizeof offset));
    uint64_t word;
    std::memcpy(&word, hear().data(), sizeof word);
    return word;
  }
  void stop() { ::kill(pid_, SIGSTOP); }
  void go_on() { ::kill(pid_, SIGCONT); }
  void kill(int signal) {
    if (pid_ <= 0) return;
    ::kill(pid_, signal);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  static void run(const std::string& name, int control) {
    Owner owner(name);
    const Card card = owner.card();
    for (const auto* blob : {&card.address, &card.pool_key, &card.table_key, &card.words_key})
      send_to(control, *blob);
    for (bool serving = true;;) {
      std::array<pollfd, 2> work{
          {{control, POLLIN, 0}, {serving ? owner.transport->capabilities().serve_fd : -1, POLLIN, 0}}};
      ::poll(work.data(), work.size(), -1);
      if (work[1].revents != 0) owner.transport->serve();
      if (work[0].revents == 0) continue;
      const std::string order = receive_from(control);
      if (order.empty()) return;
      if (order[0] == 'a') {
        auto reply = owner.transport->accept(static_cast<unsigned char>(order[1]), order.substr(2));
        send_to(control, reply.ok() ? *reply : "refused");
      } else if (order[0] == 'w') {
        uint64_t offset;
        std::memcpy(&offset, order.data() + 1, sizeof offset);
        send_to(control, {reinterpret_cast<const char*>(owner.words->range().base) + offset, sizeof offset});
      } else if (order[0] == 'f') {
        const pid_t child = ::fork();
        if (child == 0) {
          ::close(control);
          ::alarm(60);  // should the test die
          for (;;) ::pause();
        }
        send_to(control, std::to_string(child));
      } else {
        owner.transport->close();
        serving = false;
        send_to(control, "closed");
      }
    }
  }
  static void send_to(int socket, const std::string& message) {
    [[maybe_unused]] const ssize_t sent = ::send(socket, message.data(), message.size(), MSG_NOSIGNAL);
  }
  static std::string receive_from(int socket) {
    std::string message(4096, '\0');
    const ssize_t size = ::recv(socket, message.data(), message.size(), 0);
    message.resize(size > 0 ? static_cast<size_t>(size) : 0);
    return message;
  }
  void say(const std::string& message) const { send_to(control_, message); }
  std::string hear() const { return receive_from(control_); }

  pid_t pid_ = -1;
  int control_ = -1;
  Card card_;
};

/// A read of one contiguous range into pieces of a local buffer.
struct Scatter {
  std::vector<ReadOp> ops;
  std::vector<Segment> segments;

  void add(uint32_t region, uint64_t offset, std::vector<Segment> pieces) {
    ReadOp op{offset, 0, region, static_cast<uint32_t>(segments.size()),
              static_cast<uint32_t>(pieces.size())};
    for (const Segment& piece : pieces) {
      op.bytes += piece.bytes;
      segments.push_back(piece);
    }
    ops.push_back(op);
  }
  Chunk chunk() const { return {ops, segments.data()}; }
};

/// Polls until `token` ended, or 20 s passed (then kTimeout). A broken endpoint's status ends it too.
inline Status wait_for(Endpoint& endpoint, uint64_t token) {
  std::vector<Completion> ended;
  for (const int64_t deadline = now_ns() + 20 * kSecondNs; now_ns() < deadline;) {
    const PollResult result = poll_once(endpoint, ended);
    for (const Completion& completion : ended) {
      if (completion.token == token) return completion.status;
    }
    if (!result.status.ok()) return result.status;
  }
  return Status::Timeout("the test waited in vain");
}

/// A connected endpoint with its destination memory, poisoned.
class Reader {
 public:
  using Accept = std::function<std::string(const std::string& hello)>;

  Reader(const std::string& name, const Card& card, const Accept& accept, const std::string& fault = {})
      : destination(kPoolBytes, kPoison) {
    TransportOptions options;
    options.fault = fault;
    auto made = make_transport(name, options, transports_and_toy());
    EXPECT_TRUE(made.ok()) << made.status().what();
    transport = std::move(*made);
    auto opened = open_one(*transport, card.address);
    EXPECT_TRUE(opened.ok()) << opened.status().what();
    endpoint = std::move(*opened);
    const Status status = endpoint->establish(accept(endpoint->hello()), 20 * kSecondNs);
    EXPECT_TRUE(status.ok()) << status.what();
    for (const auto& [key, index] : {std::pair{card.pool_key, kPool}, std::pair{card.table_key, kTable},
                                     std::pair{card.words_key, kWords}}) {
      if (key.empty()) continue;
      auto region = endpoint->import_region(key);
      EXPECT_TRUE(region.ok()) << region.status().what();
      EXPECT_EQ(*region, index);
    }
  }

  Status wait(uint64_t token) { return wait_for(*endpoint, token); }
  /// Polls for a while without a post; what it ends with.
  Status wait_broken() { return wait(UINT64_MAX); }

  Status read(const Scatter& scatter, uint64_t token = 7) {
    Status status = endpoint->post_read(token, scatter.chunk());
    return status.ok() ? wait(token) : status;
  }
  Status read_at(uint32_t region, uint64_t offset, uint32_t bytes) {
    Scatter scatter;
    scatter.add(region, offset, {{destination.data(), bytes, 0}});
    return read(scatter);
  }
  Status write_word(uint64_t offset, uint64_t value) {
    Status status = endpoint->post_write(9, kWords, offset, value);
    return status.ok() ? wait(9) : status;
  }
  void poison() { std::fill(destination.begin(), destination.end(), kPoison); }
  bool is_poisoned() const {
    return std::all_of(destination.begin(), destination.end(), [](std::byte b) { return b == kPoison; });
  }

  std::unique_ptr<Transport> transport;
  std::unique_ptr<Endpoint> endpoint;
  std::vector<std::byte> destination;
};

/// Owner, server thread and reader in this process.
struct LocalPair {
  explicit LocalPair(const std::string& name, const std::string& fault = {})
      : owner(name.substr(name.find('+') + 1)),
        server(*owner.transport),
        reader(name, owner.card(), [this](const std::string& hello) { return accept(hello); }, fault) {}
  std::string accept(const std::string& hello) {
    auto reply = owner.transport->accept(42, hello);
    EXPECT_TRUE(reply.ok()) << reply.status().what();
    return *reply;
  }
  Owner owner;
  Server server;
  Reader reader;
};

/// A reader here of an owner in another process.
struct RemotePair {
  explicit RemotePair(const std::string& name)
      : owner(name),
        reader(name, owner.card(), [this](const std::string& hello) { return owner.accept(42, hello); }) {}
  RemoteOwner owner;
  Reader reader;
};

/// The bytes of an Owner's pool.
inline std::vector<std::byte> expected_pool(uint64_t seed = 1) {
  std::vector<std::byte> bytes(kPoolBytes);
  fill_random({bytes.data(), bytes.size()}, seed);
  return bytes;
}

inline Scatter whole_pool(Reader& reader, uint32_t piece_bytes = kPoolBytes) {
  Scatter scatter;
  for (uint64_t at = 0; at < kPoolBytes; at += piece_bytes)
    scatter.add(kPool, at, {{reader.destination.data() + at, piece_bytes, 0}});
  return scatter;
}

/// A blob cut at each place, with a byte too many, and of another magic.
inline std::vector<std::string> spoilt(const std::string& blob) {
  std::vector<std::string> all{blob + "x", blob};
  all.back()[0] ^= 1;
  for (size_t i = 0; i < blob.size(); ++i) all.push_back(blob.substr(0, i));
  return all;
}

}  // namespace kvlink::testing

// SPDX-License-Identifier: Apache-2.0
// Connects to an owner by its card and its native channel, as kvlink/transfer/peers.py does by its agent.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/completion_queue.h"
#include "channel/channel.h"
#include "engine/engine.h"

namespace kvlink::channel {

/// The part of a card that says how its worker is reached.
struct OwnerCard {
  std::string worker_id;
  uint64_t epoch = 0;
  std::vector<TransportAccess> transports;  // in the order in which they are tried
  ChannelAddress channel;
};

/// A connection that works. It breaks when the client ends with its owner.
struct Path {
  std::string transport;  // as the owner calls it
  std::shared_ptr<Connection> connection;
  std::vector<uint32_t> regions;  // of each pool key, for Planner
  std::shared_ptr<Client> client;
};

/// Tries the transports of the card that this engine has, one after the other. Each may refuse the path; an
/// owner that has ended or restarted ends the loop. Waits, so it does not belong on a thread that runs an
/// engine's step.
Result<Path> connect(Engine& engine, std::shared_ptr<Client> client, const OwnerCard& card,
                     const Patience& patience);

/// One attempt of a Connector. Any thread.
class Attempt {
 public:
  /// Returns the outcome once, or nothing while the attempt runs and after it was taken.
  std::optional<Result<Path>> take();
  /// Ends the attempt soon. Its outcome is kCancelled, unless it was known before.
  void give_up() { given_up_.store(true, std::memory_order_release); }

 private:
  friend class Connector;
  void end(Result<Path> outcome);

  Atomic<bool> given_up_{false};
  std::mutex mutex_;
  std::optional<Result<Path>> outcome_;
};

/// Dials and connects on two threads of its own, so that no caller waits.
class Connector {
 public:
  /// The caller keeps the engine until close() has returned.
  static Result<std::unique_ptr<Connector>> make(std::shared_ptr<Channel> channel, Engine& engine);
  ~Connector() { close(); }

  /// Returns at once. `token` is pushed to `queue` when the attempt has its outcome, until close().
  std::shared_ptr<Attempt> start(OwnerCard card, int64_t timeout_ns, std::shared_ptr<CompletionQueue> queue,
                                 uint64_t token);
  /// Idempotent. Gives up all attempts, and waits for those that run.
  void close();

 private:
  Connector(std::shared_ptr<Channel> channel, Engine& engine)
      : channel_(std::move(channel)), engine_(engine) {}
  Result<Path> run(const OwnerCard& card, const Patience& patience);

  const std::shared_ptr<Channel> channel_;
  Engine& engine_;
  std::unique_ptr<Jobs> jobs_;
  std::mutex mutex_;  // guards running_
  std::vector<std::weak_ptr<Attempt>> running_;
};

}  // namespace kvlink::channel

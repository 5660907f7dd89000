// SPDX-License-Identifier: Apache-2.0
// Connects to an owner by its card and its native channel, as kvlink/transfer/peers.py does by its agent.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/patience.h"
#include "base/sync.h"
#include "channel/channel.h"
#include "engine/engine.h"

namespace kvlink::channel {

/// The part of a card that says how its worker is reached.
struct OwnerCard {
  std::string worker_id;
  uint64_t epoch = 0;
  std::vector<TransportAccess> transports;
  ChannelAddress channel;
};

/// Why a transport is not the path to an owner.
struct PathRefusal {
  std::string transport;
  Status why;
  bool tried;  // the owner was asked, or could not be
};

/// A connection that works. It breaks when the client ends with its owner.
struct Path {
  std::string transport;  // as the owner calls it
  std::shared_ptr<Connection> connection;
  std::vector<uint32_t> regions;  // of each pool key, for Planner
  std::vector<PathRefusal> refusals;
  std::shared_ptr<Client> client;
};

/// The loop over the transports that a reader and an owner have, in the reader's order, of which each may
/// refuse: the lanes of the next one are opened, whoever uses this asks their owner, and its answer connects
/// them. One thread at a time.
class PathSearch {
 public:
  /// The caller keeps the engine.
  PathSearch(Engine& engine, OwnerCard owner);
  PathSearch(const PathSearch&) = delete;
  PathSearch& operator=(const PathSearch&) = delete;

  /// Returns what the owner is to be asked, or nothing if no transport is left.
  std::optional<ConnectRequest> next();
  /// Returns how long the answer and take() may last.
  Patience share(const Patience& patience) const;
  /// Takes the owner's answer. kOk: path() works.
  Status take(const Result<Accepted>& answer, int64_t timeout_ns);
  /// Returns the lanes that were opened last, which another thread may close.
  const std::shared_ptr<Connection>& connection() const { return path_.connection; }
  const std::vector<PathRefusal>& refusals() const { return path_.refusals; }
  Path path() { return std::move(path_); }
  /// Returns why there is no path.
  Status outcome() const;

 private:
  struct Candidate {
    std::string own;  // the name at this end
    const TransportAccess* offered;
    bool again = false;  // packets of a payload were lost at the first try: this one sends smaller ones
  };

  void refuse(const std::string& transport, Status why, bool tried = false);
  Status establish(const TransportAccess& offered, const Accepted& accepted, int64_t timeout_ns);

  Engine& engine_;
  const OwnerCard owner_;
  std::deque<Candidate> candidates_;  // the first is the one that was opened
  Path path_;
};

/// Returns whether a failure concerns the owner or this reader, so that no other transport helps.
bool concerns_all(const Status& status);

/// Connects by the client. An owner that has ended or restarted ends the search. Waits, so it does not belong
/// on a thread that runs an engine's step.
Result<Path> connect(Engine& engine, std::shared_ptr<Client> client, const OwnerCard& card,
                     const Patience& patience);

/// One attempt of a Connector. Any thread.
class Attempt {
 public:
  /// Ends the attempt soon. Its outcome is kCancelled, unless it was known before.
  void give_up() { given_up_.store(true, std::memory_order_release); }

 private:
  friend class Connector;
  Atomic<bool> given_up_{false};
};

/// Dials and connects on two threads of its own, so that no caller waits.
class Connector {
 public:
  /// The caller keeps the engine until close() has returned.
  static Result<std::unique_ptr<Connector>> make(std::shared_ptr<Channel> channel, Engine& engine);
  ~Connector() { close(); }

  /// Returns at once. `done` gets the outcome on one of the threads, unless close() comes before the attempt
  /// has begun. It must not throw.
  std::shared_ptr<Attempt> start(OwnerCard card, int64_t timeout_ns, std::function<void(Result<Path>)> done);
  /// Gives up all attempts.
  void give_up();
  /// The same, and waits for those that run. Idempotent.
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

// SPDX-License-Identifier: Apache-2.0
// A reader's end of the channel to one owner, which has admitted it. Channel::dial makes it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/patience.h"
#include "base/process_mark.h"
#include "channel/messages.h"
#include "channel/session.h"
#include "engine/connection.h"

namespace kvlink::channel {

class Channel;

/// The calls of one client that wait for their answers. Shared with the channel's thread.
class Calls {
 public:
  /// Returns the id of a new call.
  uint32_t begin();
  /// Wakes who waits for this answer; drops it if nobody does.
  void answer(ReaderSession::Answer answer);
  /// No answer comes any more. Returns the connections that end with the channel.
  std::vector<std::weak_ptr<Connection>> end(const Status& why);
  /// Returns the answer, or why there is none. `late` is for an owner that is silent.
  Result<ReaderSession::Answer> wait(uint32_t id, const Patience& patience, const Status& late);
  Status ended() const;
  /// Sets what is called on the channel's thread, under its lock: `taken` for each kNotified, and `ended`
  /// once.
  void watch(std::function<void(uint64_t number)> taken, std::function<void()> ended);
  /// Returns false if the channel has ended.
  bool keep(std::weak_ptr<Connection> connection);

 private:
  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  uint32_t last_id_ = 0;
  std::map<uint32_t, std::optional<ReaderSession::Answer>> waiting_;  // by id
  std::vector<std::weak_ptr<Connection>> connections_;
  std::function<void(uint64_t)> on_taken_;
  std::function<void()> on_end_;
  Status ended_;
};

/// Any thread may call any method. Each call waits for the owner, and so does not belong on a thread that
/// runs an engine's step. It returns kTimeout if the owner is silent, kPeerUnreachable if its process or its
/// host is gone, and otherwise what the owner said.
class Client {
 public:
  Client(std::shared_ptr<Channel> channel, uint64_t serial, std::shared_ptr<Calls> calls, std::string where)
      : channel_(std::move(channel)), serial_(serial), calls_(std::move(calls)), where_(std::move(where)) {}
  ~Client() { close(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const ProcessMark& process() const { return process_; }
  Result<std::string> card(const Patience& patience);
  Result<Accepted> connect(const ConnectRequest& request, const Patience& patience);
  /// Returns whether there was such a seat.
  Result<bool> settle(const SeatRef& seat, const Patience& patience);
  /// Returns the slots whose leases have ended. REQUIRES at most kMaxSeats.
  Result<std::vector<uint32_t>> renew(std::span<const SeatRef> seats, const Patience& patience);
  /// Sends a notice, and does not wait. REQUIRES ascending numbers, and texts within their bounds.
  void notify(uint64_t number, std::string_view sender, std::string_view message);
  /// To be called before notify(). `taken` gets the number of each notice that the owner's user has taken;
  /// `ended` is called once the channel ends, at once if it has. Neither may call this client or block.
  void watch(std::function<void(uint64_t number)> taken, std::function<void()> ended) {
    calls_->watch(std::move(taken), std::move(ended));
  }
  /// The connection breaks when the owner's end of the channel closes, so its pulls end then.
  void end_with_owner(const std::shared_ptr<Connection>& connection);
  /// Returns why the channel has ended; kOk while it works.
  Status ended() const { return calls_->ended(); }
  /// Idempotent. Connections stay.
  void close();

 private:
  Result<std::string> ask(Type request, const std::string& body, Type answer, const Patience& patience);
  Status malformed() const;

  const ProcessMark process_;
  const std::shared_ptr<Channel> channel_;
  const uint64_t serial_;
  const std::shared_ptr<Calls> calls_;
  const std::string where_;
};

}  // namespace kvlink::channel

// SPDX-License-Identifier: Apache-2.0
// The native channel of one worker: it admits readers, and it dials owners. docs/design/channel.md has the
// rules.
//
// Threads: `kvlink-channel` does frames only. What may take seconds (an owner's accept(), closing the
// connections to an owner that is gone) runs on threads of its own.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

#include "base/process_mark.h"
#include "base/sync.h"
#include "base/unique_fd.h"
#include "channel/address.h"
#include "channel/client.h"
#include "channel/jobs.h"
#include "channel/session.h"
#include "engine/engine.h"

namespace kvlink::channel {

/// Calls by which an owner serves its readers.
struct Serving {
  /// Runs on two threads of the channel, and may take seconds.
  std::function<Result<Accepted>(const ConnectRequest&, uint64_t caller)> accept;
  /// Return whether there is such a seat. They run on the channel's thread, and must not block.
  std::function<bool(const SeatRef&)> settle, renew;
  /// Takes a notice; empty: none may come. Runs on the channel's thread, and must not block.
  std::function<NoticeVerdict(const Instance& caller, uint64_t link, Notice)> notify = {};
};
/// The caller keeps the engine until Channel::close() has returned.
Serving serving(Engine& engine);

/// Those of the agent (kvlink/control/limits.py), where it has them.
struct Limits {
  size_t links = 20'000;
  size_t pending = 64;     // that are not admitted yet: one more, and the oldest is closed
  size_t connects = 1024;  // that wait for accept() or are in it
  size_t connects_of_one = 512;
  size_t held_bytes = 64 << 20;  // of all links: parts of requests, and answers that were not taken yet
  int64_t frame_ns = kFrameNs;
};

struct Counts {
  size_t links = 0, pending = 0, connects = 0, held_bytes = 0;
};

class Channel : public std::enable_shared_from_this<Channel> {
 public:
  /// Starts the thread.
  static Result<std::shared_ptr<Channel>> make(const Limits& limits = {});
  ~Channel() { close(); }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const ProcessMark& process() const { return process_; }
  /// Listens, and returns what the card says of it. `advertise` is a numeric host that peers dial instead of
  /// `host`. Readers are refused until publish(). To be called once.
  Result<ChannelAddress> listen(Serving serving, const std::string& host, uint16_t port,
                                const std::string& advertise = {});
  /// Sets the sealed card that readers get, and admits them to the worker from then on. Again to change it.
  Status publish(std::string card);
  /// Connects to an owner and shows it the secret of its card. Waits, so it does not belong on a thread that
  /// runs an engine's step.
  Result<std::shared_ptr<Client>> dial(const ChannelAddress& to, const Patience& patience);

  /// Tells the caller at the other end of a link that it was taken, up to this number.
  void notified(uint64_t link, uint64_t number);

  Counts counts();
  /// Idempotent. Clients end, threads join; on return no call of Serving runs. Does nothing in a forked
  /// child.
  void close();

 private:
  friend class Client;

  struct Link {
    UniqueFd socket;
    uint64_t caller = 0;
    std::variant<OwnerSession, ReaderSession> session;
    std::shared_ptr<Calls> calls = nullptr;  // of a reader's link
    std::string where = {};                  // of a reader's link
    std::string unsent = {};
    size_t sent = 0;              // of `unsent`
    bool ending = false;          // closes when all is sent and the other end has closed
    int64_t late_ns = INT64_MAX;  // when what is unsent, or the other end's close, has taken too long
    uint32_t armed = 0;
    size_t held = 0;  // as counted in held_
  };
  using Links = std::map<uint64_t, Link>;  // by serial, oldest first

  explicit Channel(const Limits& limits) : limits_(limits) {}
  Status start();
  void run();
  // The channel's thread. They REQUIRE the lock, as all below them do.
  void dispatch(uint64_t serial, uint32_t events, int64_t now);
  void accept_ready(int64_t now);
  void pause_listening(int64_t now);
  void receive(Links::iterator link, int64_t now);
  void on_bytes(Links::iterator link, std::string_view bytes, int64_t now);
  void serve(Links::iterator link, OwnerSession::Actions actions, int64_t now);
  void drop_late(int64_t now);
  // Any thread.
  std::string answer(uint64_t serial, const Link& link, Request request);
  bool take_notice(uint64_t serial, const Link& link, Notice notice, std::string& send);
  std::string start_accept(uint64_t serial, uint64_t caller, uint32_t id, ConnectRequest request);
  void accept_for(uint64_t serial, uint64_t caller, uint32_t id, const ConnectRequest& request);
  void queue(Links::iterator link, std::string_view frames, int64_t now);
  bool flush(Links::iterator link, int64_t now);
  bool arm(Links::iterator link);
  void count_held(Links::iterator link);
  void erase(Links::iterator link, const Status& why);
  int64_t late_at(const Link& link) const;
  void look_at(const Link& link);

  // They take the lock.
  void send(uint64_t serial, std::string_view frame);
  void drop(uint64_t serial, const Status& why);

  Result<std::pair<UniqueFd, ReaderSession>> meet(const tcp::Address& at, const ChannelAddress& to,
                                                  const Patience& patience) const;
  Result<std::shared_ptr<Client>> adopt(UniqueFd socket, ReaderSession session, const std::string& where);

  const ProcessMark process_;
  const Limits limits_;
  const Credentials own_ = Credentials::draw();
  Serving serving_;  // constant from listen() on
  std::unique_ptr<Jobs> accepts_, farewells_;
  UniqueFd epoll_, wake_;
  std::thread thread_;
  std::vector<char> inbox_ = std::vector<char>(64 << 10);  // of the channel's thread
  Atomic<bool> closing_{false};

  std::mutex closing_mutex_;  // one closes at a time; taken before mutex_
  std::mutex mutex_;          // guards everything below
  UniqueFd listener_;
  int64_t listen_again_ns_ = INT64_MAX;
  bool ticks_ = false;  // the thread looks again soon, because something may become late
  uint64_t next_serial_ = 2;
  Links links_;
  std::set<uint64_t> pending_;  // serials of links of callers that are not admitted, or no longer
  size_t held_ = 0;
  size_t num_connects_ = 0;
  std::unordered_map<uint64_t, size_t> connects_;  // by caller; no entry is 0
  std::shared_ptr<const std::string> card_;
};

}  // namespace kvlink::channel

// SPDX-License-Identifier: Apache-2.0
// What a NIXL agent has of kvlink: its memory, its channel, its peers, and the requests that are alive.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "peer.h"
#include "request.h"

namespace kvlink::nixl {

/// Any thread may call any method. None waits for a peer, but close() and drop() for threads of this process.
class Agent {
 public:
  static Result<std::unique_ptr<Agent>> make(const Settings& settings);
  ~Agent() { close(); }
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  const std::string& name() const { return shared_.settings.agent; }
  /// Constant.
  const std::string& info() const { return info_; }

  Result<std::shared_ptr<OwnRegion>> add(std::byte* base, uint64_t bytes);
  /// On return nothing lands there any more, and peers are told that what they read of it is stale.
  void drop(const std::shared_ptr<OwnRegion>& region);

  /// A peer that is known under this name stays, unless its process has ended. Returns kConfig for another
  /// one, and kAccessDenied for info that is malformed.
  Status add_peer(const std::string& name, std::string_view info);
  /// Returns null if there is none. This agent is its own peer.
  std::shared_ptr<Peer> peer(const std::string& name) const;
  void forget_peer(const std::string& name);

  Result<std::shared_ptr<Request>> prepare(const std::vector<Wish>& wishes,
                                           const std::shared_ptr<Peer>& peer);
  void release(const std::shared_ptr<Request>& request);

  /// Appends (agent, notification).
  void take_notifications(std::vector<std::pair<std::string, std::string>>& into);
  void close();

 private:
  explicit Agent(const Settings& settings) : memory_(settings), shared_{settings, memory_, nullptr} {}
  Status listen();
  Status publish();

  RegisteredMemory memory_;
  Shared shared_;
  std::unique_ptr<channel::Jobs> jobs_;
  channel::Inbox inbox_;
  std::string info_;

  std::mutex publishing_;     // keeps the order of cards
  mutable std::mutex mutex_;  // guards everything below
  std::unordered_map<std::string, std::shared_ptr<Peer>> peers_;
  std::unordered_map<const Request*, std::shared_ptr<Request>> requests_;  // that are not released
  bool closed_ = false;
};

}  // namespace kvlink::nixl

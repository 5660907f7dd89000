// SPDX-License-Identifier: Apache-2.0
// Another agent, or this one for transfers within it: its channel, its card, and connections to its memory.
// Nothing here waits but connecting, which has threads of its own.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "channel/jobs.h"
#include "channel/notices.h"
#include "memory.h"

namespace kvlink::nixl {

/// The regions that a request reads from and into.
struct Need {
  uint32_t own_pool = 0, peer_pool = 0;
  uint32_t own_regions = 0;       // numbers below this one are read into
  std::vector<uint32_t> regions;  // of the peer
};

/// A connection between two pools, with the regions that both had when it was made. Constant.
struct Link {
  std::shared_ptr<Connection> connection;
  uint32_t own_regions = 0;  // numbers below this one are known to it
  uint32_t first_segment = 0;
  std::map<uint32_t, uint32_t> regions;  // by number of the peer's: its index in reads

  bool serves(const Need& need) const;
};

struct Reach {
  std::shared_ptr<const Link> link;
  LeaseSeat seat;
};

/// All peers share this. The agent keeps it until all jobs have ended.
struct Shared {
  const Settings settings;
  RegisteredMemory& memory;
  std::shared_ptr<channel::Channel> channel;
  channel::Jobs* jobs = nullptr;
};

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  /// Gets the end of one attempt, on a thread that connects.
  using Done = std::function<void(const Status&)>;

  Peer(Shared& shared, std::string name, channel::ChannelAddress address)
      : shared_(shared), name_(std::move(name)), address_(std::move(address)) {}

  const std::string& name() const { return name_; }
  const channel::Instance& instance() const { return address_.credentials.instance; }
  /// Returns nothing if the peer must be connected to first.
  std::optional<Reach> reach(const Need& need) const;
  /// Connects in the background. `stale`: the seat under which reads do not validate any more.
  void connect(Need need, const LeaseSeat& stale, Done done);
  /// Only opens the channel.
  void greet();
  /// Queues a notification. It is sent in order, once there is a channel.
  Status notify(const std::string& message);
  /// Opens the channel again if notifications wait for it.
  void look();
  /// Returns whether its process is known to have ended, or to have been replaced.
  bool is_dead() const;
  /// Ends its connections: what is being read fails.
  void close();

 private:
  struct Attempt {
    bool greets;
    Need need;
    LeaseSeat stale;
    Done done;
  };

  void add(Attempt attempt);
  void run();
  Status attempt(const Attempt& attempt);
  Result<std::shared_ptr<channel::Client>> open_channel(const Patience& patience);
  Status try_once(const Attempt& attempt, bool first, const Patience& patience);
  Result<PoolCard> card_for(channel::Client& client, const Attempt& attempt, bool again,
                            const Patience& patience);
  const PoolCard* known(uint32_t pool) const;
  Status open_link(const std::shared_ptr<channel::Client>& client, const Need& need, const PoolCard& pool,
                   const Patience& patience);

  Shared& shared_;
  const std::string name_;
  const channel::ChannelAddress address_;
  channel::Outbox outbox_;

  mutable std::mutex mutex_;  // guards everything below
  std::shared_ptr<channel::Client> client_;
  AgentCard card_;
  std::map<std::pair<uint32_t, uint32_t>, std::shared_ptr<const Link>> links_;  // by both pools
  std::deque<Attempt> attempts_;
  bool runs_ = false;  // a job works on them
  int64_t greeted_ns_ = 0;
  bool dead_ = false, closed_ = false;
};

/// A region of a peer, as NIXL's metadata names it. Requests keep it when NIXL drops it.
struct PeerRegion {
  std::shared_ptr<Peer> peer;
  RegionName name;
  uint64_t base = 0, bytes = 0;  // in the peer's address space
};

}  // namespace kvlink::nixl

// SPDX-License-Identifier: Apache-2.0
#include "peer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace kvlink::nixl {
namespace {

constexpr int64_t kAttemptNs = 10'000'000'000;  // so that a stopped peer does not keep a thread for long
constexpr int64_t kGreetAgainNs = 200'000'000;

/// Returns whether the failure of an attempt proves that the process is gone which was there before.
bool proves_death(const Status& why) {
  if (why.code() == Code::kStaleBlocks) return why.stale() == StaleReason::kRestarted;
  // Its listener lives as long as the agent does.
  return why.code() == Code::kPeerUnreachable && why.what().ends_with(std::strerror(ECONNREFUSED));
}

bool same(const LeaseSeat& one, const LeaseSeat& other) {
  return one.slot == other.slot && one.nonce == other.nonce;
}

}  // namespace

bool Link::serves(const Need& need) const {
  return !connection->broken() && need.own_regions <= own_regions &&
         std::all_of(need.regions.begin(), need.regions.end(),
                     [this](uint32_t number) { return regions.contains(number); });
}

/// REQUIRES mutex_.
const PoolCard* Peer::known(uint32_t pool) const {
  const auto found =
      std::find_if(card_.begin(), card_.end(), [pool](const PoolCard& each) { return each.pool == pool; });
  return found == card_.end() ? nullptr : &*found;
}

std::optional<Reach> Peer::reach(const Need& need) const {
  const std::lock_guard lock(mutex_);
  const auto found = links_.find({need.own_pool, need.peer_pool});
  const PoolCard* const pool = known(need.peer_pool);
  if (found == links_.end() || !pool || !found->second->serves(need)) return {};
  return Reach{found->second, pool->seat};
}

void Peer::connect(Need need, const LeaseSeat& stale, Done done) {
  add({false, std::move(need), stale, std::move(done)});
}

void Peer::greet() {
  add({true, {}, {}, [](const Status&) {}});
}

void Peer::add(Attempt attempt) {
  {
    const std::lock_guard lock(mutex_);
    attempts_.push_back(std::move(attempt));
    if (std::exchange(runs_, true)) return;
  }
  shared_.jobs->add([self = shared_from_this()] { self->run(); });
}

/// One attempt after the other, because the first often serves the next.
void Peer::run() {
  while (true) {
    Attempt next;
    {
      const std::lock_guard lock(mutex_);
      runs_ = !attempts_.empty();
      if (!runs_) return;
      next = std::move(attempts_.front());
      attempts_.pop_front();
    }
    Status ended;
    try {
      ended = attempt(next);
    } catch (const std::exception& broken) {  // a broken contract costs this attempt only
      ended = Status{Code::kPeerUnreachable, broken.what()};
    }
    next.done(ended);
  }
}

Status Peer::attempt(const Attempt& attempt) {
  {
    const std::lock_guard lock(mutex_);
    greeted_ns_ = now_ns();
    if (closed_) return Status::Cancelled("agent " + name_ + " was disconnected");
  }
  const Patience patience(std::min(kAttemptNs, shared_.settings.timeout_ns));
  Status ended = try_once(attempt, true, patience);
  // Memory of the card may have gone meanwhile, or the peer with its channel.
  return ended.ok() ? ended : try_once(attempt, false, patience);
}

/// The first try connects to all memory of the peer, so that later requests find it. The second one asks for
/// the card again, and connects to what is needed.
Status Peer::try_once(const Attempt& attempt, bool first, const Patience& patience) {
  const Result<std::shared_ptr<channel::Client>> client = open_channel(patience);
  if (!client.ok()) return client.status();
  if (attempt.greets) return {};
  Result<PoolCard> pool = card_for(**client, attempt, !first, patience);
  if (!pool.ok()) return pool.status();
  if (reach(attempt.need)) return {};
  if (!first) pool->keep_only(attempt.need.regions);
  return open_link(*client, attempt.need, *pool, patience);
}

Result<std::shared_ptr<channel::Client>> Peer::open_channel(const Patience& patience) {
  bool was_there = false;
  {
    const std::lock_guard lock(mutex_);
    if (client_ && client_->ended().ok()) return client_;
    was_there = client_ != nullptr;
  }
  outbox_.detach();
  Result<std::shared_ptr<channel::Client>> client = shared_.channel->dial(address_, patience);
  if (!client.ok()) {
    const Status why = client.status();
    const std::lock_guard lock(mutex_);
    dead_ |= proves_death(why) && (was_there || why.code() == Code::kStaleBlocks);
    return Status{why.code(), "agent " + name_ + ": " + why.what(), why.fix()};
  }
  const auto taken = [known = weak_from_this()](uint64_t number) {
    if (const auto peer = known.lock()) peer->outbox_.taken(number);
  };
  const auto ended = [known = weak_from_this(), jobs = shared_.jobs] {
    jobs->add([known] {
      if (const auto peer = known.lock()) peer->look();
    });
  };
  (*client)->watch(taken, ended);
  {
    const std::lock_guard lock(mutex_);
    client_ = *client;
    card_.clear();
  }
  outbox_.attach([client = *client, own = shared_.settings.agent](uint64_t number, std::string_view message) {
    client->notify(number, own, message);
  });
  return client;
}

/// Returns the card of the pool, which is asked for again if it lacks a region or its seat has ended.
Result<PoolCard> Peer::card_for(channel::Client& client, const Attempt& attempt, bool again,
                                const Patience& patience) {
  const Need& need = attempt.need;
  const auto has_all = [&need](const PoolCard* pool) {
    return pool && std::all_of(need.regions.begin(), need.regions.end(),
                               [pool](uint32_t number) { return pool->find(number); });
  };
  if (!again) {
    const std::lock_guard lock(mutex_);
    const PoolCard* const pool = known(need.peer_pool);
    if (has_all(pool) && !same(pool->seat, attempt.stale)) return *pool;
  }
  const Result<std::string> body = client.card(patience);
  if (!body.ok()) return body.status();
  std::optional<AgentCard> card = read_card(*body);
  if (!card)
    return Status::AccessDenied("agent " + name_ + " sent a malformed card; run the same kvlink there");
  const std::lock_guard lock(mutex_);
  card_ = std::move(*card);
  const PoolCard* const pool = known(need.peer_pool);
  if (!has_all(pool)) {
    return Status::AccessDenied("agent " + name_ + " has deregistered memory that its metadata names");
  }
  return *pool;
}

Status Peer::open_link(const std::shared_ptr<channel::Client>& client, const Need& need, const PoolCard& pool,
                       const Patience& patience) {
  Engine* const engine = shared_.memory.engine(need.own_pool);
  if (!engine) return Status::Config("this agent has no " + pool_name(need.own_pool));
  const uint32_t own_regions = engine->num_late_regions();
  channel::OwnerCard owner = pool.owner();
  Result<channel::Path> path = channel::connect(*engine, client, owner, patience);
  if (!path.ok()) {
    const Status why = path.status();
    return Status{why.code(), "agent " + name_ + ": " + why.what(), why.fix()};
  }
  auto link = std::make_shared<Link>();
  link->connection = path->connection;
  link->own_regions = own_regions;
  link->first_segment = engine->segment_region(path->transport, 0);
  for (size_t index = 0; index < pool.regions.size(); ++index)
    link->regions[pool.regions[index].number] = path->regions[index];
  std::shared_ptr<const Link> before;  // released without the lock; requests may still use it
  const std::lock_guard lock(mutex_);
  before = std::exchange(links_[{need.own_pool, need.peer_pool}], std::move(link));
  if (closed_) links_.clear();
  return {};
}

Status Peer::notify(const std::string& message) {
  if (message.size() > channel::kMaxNoticeBytes) return Status::Config("a notification has 16 MiB at most");
  if (Status status = outbox_.add(message); !status.ok()) return status;
  look();
  return {};
}

void Peer::look() {
  if (outbox_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    if (runs_ || dead_ || closed_ || now_ns() < greeted_ns_ + kGreetAgainNs) return;
    if (client_ && client_->ended().ok()) return;
  }
  greet();
}

bool Peer::is_dead() const {
  const std::lock_guard lock(mutex_);
  return dead_;
}

void Peer::close() {
  std::map<std::pair<uint32_t, uint32_t>, std::shared_ptr<const Link>> links;
  std::shared_ptr<channel::Client> client;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    links = std::exchange(links_, {});
    client = std::exchange(client_, nullptr);
  }
  for (const auto& [pools, link] : links) link->connection->close("the agent was disconnected");
  outbox_.detach();
  if (client) client->close();
}

}  // namespace kvlink::nixl

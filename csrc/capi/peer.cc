// SPDX-License-Identifier: Apache-2.0
#include "capi/peer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <exception>

#include "capi/layouts.h"
#include "codec/connect.h"

namespace kvlink::capi {
namespace {

template <size_t size>
void copy_bytes(std::string_view from, std::array<char, size>& into) {
  std::memcpy(into.data(), from.data(), std::min(from.size(), size));
}

channel::OwnerCard owner_of(const WorkerCard& card) {
  channel::OwnerCard owner{card.worker_id, card.epoch, {}, {}};
  for (const CardTransport& each : card.transports) {
    owner.transports.push_back(
        {each.name, each.address, each.pool_keys, each.lease_keys, each.refused, {}, each.bounces});
  }
  if (card.channel) {
    owner.channel.addresses = card.channel->addresses;
    owner.channel.flags = card.channel->flags;
    copy_bytes(card.channel->instance, owner.channel.credentials.instance);
    copy_bytes(card.channel->secret, owner.channel.credentials.secret);
  }
  return owner;
}

Result<Accepted> read_answer(std::string_view answer) {
  if (answer.empty()) return Status::Unreachable("the owner did not answer");
  Result<ConnectReply> reply = read_connect_reply(answer);
  if (!reply.ok()) return reply.status();
  return channel::accepted_of(std::move(*reply));
}

}  // namespace

Result<std::shared_ptr<Peer>> Peer::open(std::shared_ptr<Worker> worker, std::string_view sealed_card,
                                         int64_t timeout_ns) {
  if (!worker->started()) return Status::Config("this worker has not started");
  Result<WorkerCard> card = unseal_card(sealed_card);
  if (!card.ok()) return card.status();
  if (Status status = check_groups(*card, worker->groups()); !status.ok()) return status;
  return std::make_shared<Peer>(std::move(worker), std::move(*card), timeout_ns);
}

Outcome Peer::step(std::string_view answer, const Space& space) {
  const std::lock_guard stepping(stepping_);
  {
    const std::lock_guard lock(mutex_);
    if (way_ == Way::kChannel) return refuse("the peer connects by the native channel: see kvl_peer_wait");
    way_ = Way::kSteps;
  }
  if (message_.empty() && !ready() && failed().ok()) advance(answer);
  if (Status why = failed(); !why.ok()) return why;
  Outcome given = space.give(message_);
  if (given.ok()) message_.clear();
  return given;
}

/// REQUIRES stepping_.
void Peer::advance(std::string_view answer) {
  if (search_) {
    const Status status = search_->take(read_answer(answer), timeout_ns_);
    if (status.ok()) return take(search_->path());
    if (channel::concerns_all(status)) return take(status);
  } else {
    search_.emplace(worker()->engine(), owner_of(card_));
  }
  const std::optional<ConnectRequest> request = search_->next();
  {
    const std::lock_guard lock(mutex_);
    path_.refusals = search_->refusals();
    path_.connection = search_->connection();
  }
  if (!request) return take(search_->outcome());
  if (!failed().ok()) return search_->connection()->close();  // by close(), which did not know it
  message_ = write_connect_request(*request);
}

Outcome Peer::connect(const std::shared_ptr<Peer>& peer, kvl_handle handle, uint64_t user) {
  if (!peer->card_.channel) {
    return refuse("the card of " + peer->card_.worker_id +
                  " has no native channel: open its worker with KVL_WORKER_CHANNEL (KVLINK_CHANNEL in "
                  "Python), or connect by kvl_peer_step");
  }
  const Result<channel::Connector*> connector = peer->worker()->connector();
  if (!connector.ok()) return connector.status();
  const std::lock_guard lock(peer->mutex_);
  if (peer->closed_) return Status::Cancelled("the peer was closed");
  if (peer->way_ != Way::kNone) return refuse("the peer has begun to connect: close it, and open another");
  peer->way_ = Way::kChannel;
  peer->user_ = user;
  peer->attempt_ = (*connector)
                       ->start(owner_of(peer->card_), peer->timeout_ns_,
                               [known = std::weak_ptr(peer), handle](Result<channel::Path> outcome) {
                                 const std::shared_ptr<Peer> peer = known.lock();
                                 if (!peer) return;
                                 peer->take(std::move(outcome));
                                 peer->worker()->queue()->push(handle);
                               });
  return {};
}

/// Takes how connecting ended.
void Peer::take(Result<channel::Path> outcome) {
  Status why = outcome.status();
  try {
    if (why.ok()) why = make_planners(outcome->regions);
  } catch (const std::exception& broken) {
    why = Status{Code::kPeerUnreachable, broken.what()};
  }
  std::shared_ptr<Connection> useless;
  {
    const std::lock_guard lock(mutex_);
    if (outcome.ok()) path_ = std::move(*outcome);
    if (failed_.ok()) failed_ = std::move(why);  // else close() came first
    ready_.store(failed_.ok(), std::memory_order_release);
    if (!failed_.ok()) useless = path_.connection;
  }
  changed_.notify_all();
  if (useless) useless->close();
}

Outcome Peer::wait(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  if (way_ != Way::kChannel) return refuse("this peer does not connect by kvl_peer_connect");
  const auto ended = [this] { return ready() || !failed_.ok(); };
  if (timeout_ns < 0) {
    changed_.wait(lock, ended);
  } else if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), ended)) {
    return {KVL_PENDING, "the peer is connecting"};
  }
  return failed_;
}

Status Peer::make_planners(const std::vector<uint32_t>& regions) {
  for (size_t group = 0; group < card_.layouts.size(); ++group) {
    const Layout &own = worker()->groups()[group].memory, &theirs = card_.layouts[group].memory;
    auto planner = Planner::make(own, theirs, worker()->ranges(), card_.region_bytes, regions,
                                 {own.first_head, own.first_head + own.num_heads});
    if (!planner.ok()) return planner.status();
    planners_.push_back(std::move(*planner));
  }
  return {};
}

Status Peer::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

uint64_t Peer::user() const {
  const std::lock_guard lock(mutex_);
  return user_;
}

Outcome Peer::close() {
  std::shared_ptr<Connection> connection;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    if (!ready() && failed_.ok()) failed_ = Status::Cancelled("the peer was closed");
    if (attempt_) attempt_->give_up();
    connection = path_.connection;
  }
  changed_.notify_all();
  if (connection) connection->close();
  return {};
}

std::string Peer::explain() const {
  const std::lock_guard lock(mutex_);
  std::string text = card_.worker_id + " epoch " + std::to_string(card_.epoch) + ": ";
  if (!ready()) {
    text += "not connected";
  } else {
    text +=
        path_.transport + (path_.connection->broken() ? ", broken: " + path_.connection->why_broken() : "");
    for (const std::string& path : path_.connection->paths()) text += path.empty() ? "" : "\npath " + path;
  }
  for (const channel::PathRefusal& each : path_.refusals)
    text += "\nnot " + each.transport + ": " + each.why.sentence();
  return text;
}

}  // namespace kvlink::capi

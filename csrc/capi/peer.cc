// SPDX-License-Identifier: Apache-2.0
#include "capi/peer.h"

#include <algorithm>

#include "capi/layouts.h"
#include "codec/connect.h"
#include "engine/prior_cost.h"

namespace kvlink::capi {
namespace {

/// Returns whether a failure is that of the owner or of this worker, so that no other transport helps.
bool is_final(const Status& status) {
  return status.code() == Code::kStaleBlocks || status.code() == Code::kCancelled;
}

}  // namespace

Peer::Peer(std::shared_ptr<Worker> worker, WorkerCard card, int64_t timeout_ns)
    : Object(kKind, std::move(worker)), card_(std::move(card)), timeout_ns_(timeout_ns) {
  find_candidates();
}

Result<std::shared_ptr<Peer>> Peer::open(std::shared_ptr<Worker> worker, std::string_view sealed_card,
                                         int64_t timeout_ns) {
  if (!worker->started()) return Status::Config("this worker has not started");
  Result<WorkerCard> card = unseal_card(sealed_card);
  if (!card.ok()) return card.status();
  if (Status status = check_groups(*card, worker->groups()); !status.ok()) return status;
  return std::make_shared<Peer>(std::move(worker), std::move(*card), timeout_ns);
}

/// In the order of this worker, as in Python.
void Peer::find_candidates() {
  for (const TransportAccess& own : worker()->engine().access()) {
    const auto theirs = std::find_if(card_.transports.begin(), card_.transports.end(),
                                     [&own](const CardTransport& each) { return each.name == own.name; });
    if (theirs == card_.transports.end()) {
      refusals_.push_back({own.name, Status::Unavailable(card_.worker_id + " does not offer it", {})});
    } else if (!theirs->refused.empty()) {
      refusals_.push_back(
          {own.name,
           Status::Unavailable(card_.worker_id + " cannot export its pool: " + theirs->refused, {})});
    } else {
      candidates_.push_back(&*theirs);
    }
  }
}

Outcome Peer::step(std::string_view answer, const Space& space) {
  const std::lock_guard stepping(stepping_);
  if (message_.empty() && failed_.ok() && !ready()) {
    if (!transport_.empty()) {
      const std::string transport = std::exchange(transport_, {});
      Status status = take_answer(answer);
      if (is_final(status)) failed_ = status;
      const std::lock_guard lock(mutex_);
      if (!status.ok()) refusals_.push_back({transport, std::move(status)});
    }
    if (failed_.ok() && !ready() && !ask_next()) failed_ = why_none();
  }
  if (!failed_.ok()) return failed_;
  Outcome given = space.give(message_);
  if (given.ok()) message_.clear();
  return given;
}

/// Opens lanes over the next transport that has some, and writes the message to the owner. Returns false if
/// there is none.
bool Peer::ask_next() {
  while (next_ < candidates_.size()) {
    const CardTransport& offered = *candidates_[next_++];
    Result<std::shared_ptr<Connection>> opened = worker()->engine().open(
        offered.name, offered.address, std::make_shared<PathStats>(prior_cost(offered.name)),
        {card_.worker_id, card_.epoch});
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    if (!opened.ok()) {
      refusals_.push_back({offered.name, opened.status()});
      continue;
    }
    connection_ = std::move(*opened);
    transport_ = offered.name;
    message_ = write_connect_request({card_.worker_id, card_.epoch, offered.name, connection_->hellos()});
    return true;
  }
  return false;
}

Status Peer::take_answer(std::string_view answer) {
  if (answer.empty()) return Status::Unreachable("the owner did not answer");
  Result<ConnectReply> reply = read_connect_reply(answer);
  if (!reply.ok()) return reply.status();
  return reply->refusal.ok() ? establish(*reply) : reply->refusal;
}

Status Peer::establish(const ConnectReply& reply) {
  const CardTransport& offered = *candidates_[next_ - 1];
  // Nobody else changes it: only step() does.
  Result<std::vector<uint32_t>> regions = connection_->establish(
      static_cast<uint32_t>(reply.connection_id), reply.replies,
      reply.pool_keys.empty() ? offered.pool_keys : reply.pool_keys,
      reply.lease_keys.empty() ? offered.lease_keys : reply.lease_keys, card_.epoch, timeout_ns_);
  if (!regions.ok()) return regions.status();
  if (Status status = make_planners(*regions); !status.ok()) return status;
  ready_.store(true, std::memory_order_release);
  return {};
}

Status Peer::make_planners(const std::vector<uint32_t>& regions) {
  planners_.clear();
  for (size_t group = 0; group < card_.layouts.size(); ++group) {
    const Layout &own = worker()->groups()[group].memory, &theirs = card_.layouts[group].memory;
    auto planner = Planner::make(own, theirs, worker()->ranges(), card_.region_bytes, regions,
                                 {own.first_head, own.first_head + own.num_heads});
    if (!planner.ok()) return planner.status();
    planners_.push_back(std::move(*planner));
  }
  return {};
}

/// Returns the error of a peer without a path. It can be tried again if one of the transports can.
Status Peer::why_none() const {
  const std::lock_guard lock(mutex_);
  if (closed_) return Status::Cancelled("the peer was closed");
  if (refusals_.size() == 1) return refusals_.front().why;
  std::string text = "no transport reaches " + card_.worker_id + " (";
  Code code = Code::kTransportUnavailable;
  for (const auto& [transport, why] : refusals_) {
    if (why.code() == Code::kPeerUnreachable || why.code() == Code::kTimeout) code = Code::kPeerUnreachable;
    text += (&why == &refusals_.front().why ? "" : "; ") + transport + ": " + why.sentence();
  }
  return {code, text + (refusals_.empty() ? "none in common)" : ")")};
}

Outcome Peer::close() {
  std::shared_ptr<Connection> connection;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    connection = connection_;
  }
  if (connection) connection->close();
  return {};
}

std::string Peer::explain() const {
  const std::lock_guard lock(mutex_);
  std::string text = card_.worker_id + " epoch " + std::to_string(card_.epoch) + ": ";
  if (!ready()) {
    text += "not connected";
  } else {
    text += candidates_[next_ - 1]->name +
            (connection_->broken() ? ", broken: " + connection_->why_broken() : "");
    for (const std::string& path : connection_->paths()) text += path.empty() ? "" : "\npath " + path;
  }
  for (const auto& [transport, why] : refusals_) text += "\nnot " + transport + ": " + why.sentence();
  return text;
}

}  // namespace kvlink::capi

// SPDX-License-Identifier: Apache-2.0
#include "channel/connect.h"

#include <algorithm>
#include <deque>
#include <utility>

namespace kvlink::channel {
namespace {

std::string plain(const std::string& transport) {
  constexpr std::string_view kFault = "fault+";
  return transport.starts_with(kFault) ? transport.substr(kFault.size()) : transport;
}

/// Returns whether the whole attempt ends, and not only one transport.
bool concerns_owner(const Status& status) {
  return status.code() == Code::kStaleBlocks || status.code() == Code::kCancelled;
}

class Attempts {
 public:
  explicit Attempts(const std::string& worker_id) : worker_id_(worker_id) {}

  void refuse(const std::string& transport, const Status& why) {
    reasons_ += (reasons_.empty() ? "" : "; ") + transport + ": " + why.sentence();
    tried_.push_back(why);
  }
  void leave_out(const std::string& transport, const std::string& why) {
    reasons_ += (reasons_.empty() ? "" : "; ") + transport + ": " + why;
    ++num_left_out_;
  }
  Status outcome() const {
    if (tried_.size() == 1 && num_left_out_ == 0) return tried_.front();
    const std::string what =
        "no transport reaches " + worker_id_ + " (" + (reasons_.empty() ? "none in common" : reasons_) + ")";
    const auto may_work_later = [](const Status& status) {
      return status.code() == Code::kPeerUnreachable || status.code() == Code::kTimeout;
    };
    if (std::any_of(tried_.begin(), tried_.end(), may_work_later)) return Status::Unreachable(what);
    return Status::Unavailable(what, "Run `kvlink doctor` on both hosts");
  }

 private:
  const std::string worker_id_;
  std::string reasons_;
  std::vector<Status> tried_;
  size_t num_left_out_ = 0;
};

struct Candidate {
  std::string own;  // the name at this end
  const TransportAccess* offered;
  bool again = false;  // packets of a payload were lost at the first try: this one sends smaller ones
};

std::deque<Candidate> candidates_of(const Engine& engine, const OwnerCard& card, Attempts& attempts) {
  std::deque<Candidate> candidates;
  const std::vector<TransportAccess> own = engine.access();
  for (const TransportAccess& offered : card.transports) {
    const auto here = std::find_if(own.begin(), own.end(), [&](const TransportAccess& each) {
      return plain(each.name) == plain(offered.name);
    });
    if (here == own.end()) {
      attempts.leave_out(offered.name, "this worker does not use it");
    } else if (!offered.refused.empty()) {
      attempts.leave_out(offered.name, card.worker_id + " cannot export its pool: " + offered.refused);
    } else {
      candidates.push_back({here->name, &offered});
    }
  }
  return candidates;
}

Result<Path> try_one(const Candidate& candidate, const std::shared_ptr<Connection>& connection,
                     const std::shared_ptr<Client>& client, uint64_t epoch, const Patience& patience) {
  const TransportAccess& offered = *candidate.offered;
  const Result<Accepted> accepted = client->connect({offered.name, true, connection->hellos()}, patience);
  if (!accepted.ok()) return accepted.status();
  const auto& pool_keys = accepted->pool_keys.empty() ? offered.pool_keys : accepted->pool_keys;
  const auto& lease_keys = accepted->lease_keys.empty() ? offered.lease_keys : accepted->lease_keys;
  Result<std::vector<uint32_t>> regions = connection->establish(
      accepted->connection_id, accepted->replies, pool_keys, lease_keys, epoch, patience.left_ns());
  if (!regions.ok()) return regions.status();
  client->end_with_owner(connection);
  return Path{offered.name, connection, std::move(*regions), client};
}

}  // namespace

Result<Path> connect(Engine& engine, std::shared_ptr<Client> client, const OwnerCard& card,
                     const Patience& patience) {
  Attempts attempts(card.worker_id);
  std::deque<Candidate> candidates = candidates_of(engine, card, attempts);
  for (; !candidates.empty() && !patience.over(); candidates.pop_front()) {
    const Candidate& candidate = candidates.front();
    const TransportAccess& offered = *candidate.offered;
    const auto connection = engine.open(candidate.own, offered.address, std::make_shared<PathStats>(),
                                        {card.worker_id, card.epoch});
    if (!connection.ok()) {
      attempts.refuse(offered.name, connection.status());
      continue;
    }
    // A network that drops all packets must leave time for another transport.
    const bool halve = plain(offered.name) == "verbs" && candidates.size() > 1;
    Result<Path> path =
        try_one(candidate, *connection, client, card.epoch, halve ? patience.part(2) : patience);
    if (path.ok()) return path;
    const bool again = (*connection)->lost_large() && !candidate.again;
    (*connection)->close();
    if (concerns_owner(path.status())) return path.status();
    if (Status gone = client->ended(); !gone.ok()) return gone;
    attempts.refuse(offered.name, path.status());
    if (again) candidates.insert(candidates.begin() + 1, {candidate.own, candidate.offered, true});
  }
  if (patience.given_up()) return patience.why_over({});
  for (const Candidate& left : candidates)
    attempts.leave_out(left.offered->name, "no time was left to try it");
  return attempts.outcome();
}

std::optional<Result<Path>> Attempt::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(outcome_, std::nullopt);
}

void Attempt::end(Result<Path> outcome) {
  const std::lock_guard lock(mutex_);
  outcome_.emplace(std::move(outcome));
}

Result<std::unique_ptr<Connector>> Connector::make(std::shared_ptr<Channel> channel, Engine& engine) {
  Result<std::unique_ptr<Jobs>> jobs = Jobs::make("kvlink-connect", 2);
  if (!jobs.ok()) return jobs.status();
  std::unique_ptr<Connector> connector(new Connector(std::move(channel), engine));
  connector->jobs_ = std::move(*jobs);
  return connector;
}

Result<Path> Connector::run(const OwnerCard& card, const Patience& patience) {
  try {
    Result<std::shared_ptr<Client>> client = channel_->dial(card.channel, patience);
    if (!client.ok()) return client.status();
    return connect(engine_, std::move(*client), card, patience);
  } catch (const std::exception& broken) {  // a broken contract costs this attempt only
    return Status{Code::kPeerUnreachable, broken.what()};
  }
}

std::shared_ptr<Attempt> Connector::start(OwnerCard card, int64_t timeout_ns,
                                          std::shared_ptr<CompletionQueue> queue, uint64_t token) {
  auto attempt = std::make_shared<Attempt>();
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(running_, [](const auto& known) { return known.expired(); });
    running_.push_back(attempt);
  }
  jobs_->add([this, attempt, card = std::make_shared<const OwnerCard>(std::move(card)),
              patience = Patience(timeout_ns, attempt->given_up_), queue = std::move(queue), token] {
    attempt->end(run(*card, patience));
    queue->push(token);
  });
  return attempt;
}

void Connector::close() {
  {
    const std::lock_guard lock(mutex_);
    for (const auto& each : running_) {
      if (const auto attempt = each.lock()) attempt->give_up();
    }
  }
  jobs_->close();
}

}  // namespace kvlink::channel

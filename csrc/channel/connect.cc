// SPDX-License-Identifier: Apache-2.0
#include "channel/connect.h"

#include <algorithm>
#include <utility>

#include "engine/prior_cost.h"

namespace kvlink::channel {
namespace {

std::string plain(const std::string& transport) {
  constexpr std::string_view kFault = "fault+";
  return transport.starts_with(kFault) ? transport.substr(kFault.size()) : transport;
}

}  // namespace

bool concerns_all(const Status& status) {
  return status.code() == Code::kStaleBlocks || status.code() == Code::kCancelled;
}

PathSearch::PathSearch(Engine& engine, OwnerCard owner) : engine_(engine), owner_(std::move(owner)) {
  for (const TransportAccess& own : engine_.access()) {
    const auto offered =
        std::find_if(owner_.transports.begin(), owner_.transports.end(),
                     [&own](const TransportAccess& each) { return plain(each.name) == plain(own.name); });
    if (offered == owner_.transports.end()) {
      refuse(own.name, Status::Unavailable(owner_.worker_id + " does not offer it", {}));
    } else if (!offered->refused.empty()) {
      refuse(own.name,
             Status::Unavailable(owner_.worker_id + " cannot export its pool: " + offered->refused, {}));
    } else {
      candidates_.push_back({own.name, &*offered});
    }
  }
}

void PathSearch::refuse(const std::string& transport, Status why, bool tried) {
  path_.refusals.push_back({transport, std::move(why), tried});
}

std::optional<ConnectRequest> PathSearch::next() {
  for (; !candidates_.empty(); candidates_.pop_front()) {
    const Candidate& candidate = candidates_.front();
    Result<std::shared_ptr<Connection>> opened = engine_.open(
        candidate.own, candidate.offered->address, std::make_shared<PathStats>(prior_cost(candidate.own)),
        {owner_.worker_id, owner_.epoch});
    if (opened.ok()) {
      path_.connection = std::move(*opened);
      return ConnectRequest{owner_.worker_id, owner_.epoch, candidate.offered->name,
                            path_.connection->hellos()};
    }
    refuse(candidate.own, opened.status(), true);
  }
  return {};
}

/// A network that drops all packets must leave time for another transport.
Patience PathSearch::share(const Patience& patience) const {
  const bool halve = candidates_.size() > 1 && plain(candidates_.front().own) == "verbs";
  return halve ? patience.part(2) : patience;
}

Status PathSearch::take(const Result<Accepted>& answer, int64_t timeout_ns) {
  const Candidate candidate = std::move(candidates_.front());
  candidates_.pop_front();
  Status status = answer.ok() ? establish(*candidate.offered, *answer, timeout_ns) : answer.status();
  if (status.ok()) return status;
  if (path_.connection->lost_large() && !candidate.again)
    candidates_.push_front({candidate.own, candidate.offered, true});
  path_.connection->close();
  refuse(candidate.own, status, true);
  return status;
}

Status PathSearch::establish(const TransportAccess& offered, const Accepted& accepted, int64_t timeout_ns) {
  Result<std::vector<uint32_t>> regions = path_.connection->establish(
      accepted.connection_id, accepted.replies,
      accepted.pool_keys.empty() ? offered.pool_keys : accepted.pool_keys,
      accepted.lease_keys.empty() ? offered.lease_keys : accepted.lease_keys, owner_.epoch, timeout_ns);
  if (!regions.ok()) return regions.status();
  path_.transport = offered.name;
  path_.regions = std::move(*regions);
  return {};
}

Status PathSearch::outcome() const {
  const auto& refusals = path_.refusals;
  if (refusals.size() == 1 && refusals.front().tried && candidates_.empty()) return refusals.front().why;
  std::string reasons;
  bool may_work_later = false;
  const auto add = [&reasons](const std::string& transport, const std::string& why) {
    reasons += (reasons.empty() ? "" : "; ") + transport + ": " + why;
  };
  for (const PathRefusal& each : refusals) {
    add(each.transport, each.why.sentence());
    may_work_later |= each.why.code() == Code::kPeerUnreachable || each.why.code() == Code::kTimeout;
  }
  for (const Candidate& left : candidates_) add(left.own, "no time was left to try it");
  const std::string what = "no transport reaches " + owner_.worker_id + " (" +
                           (reasons.empty() ? "none in common" : reasons) + ")";
  if (may_work_later) return Status::Unreachable(what);
  return Status::Unavailable(what, "Run `kvlink doctor` on both hosts");
}

Result<Path> connect(Engine& engine, std::shared_ptr<Client> client, const OwnerCard& card,
                     const Patience& patience) {
  PathSearch search(engine, card);
  while (!patience.over()) {
    const std::optional<ConnectRequest> request = search.next();
    if (!request) break;
    const Patience share = search.share(patience);
    const Result<Accepted> answer = client->connect(*request, share);
    const Status status = search.take(answer, share.left_ns());
    if (status.ok()) {
      Path path = search.path();
      path.client = std::move(client);
      path.client->end_with_owner(path.connection);
      return path;
    }
    if (concerns_all(status)) return status;
    if (Status gone = client->ended(); !gone.ok()) return gone;
  }
  return patience.given_up() ? patience.why_over({}) : search.outcome();
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
                                          std::function<void(Result<Path>)> done) {
  auto attempt = std::make_shared<Attempt>();
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(running_, [](const auto& known) { return known.expired(); });
    running_.push_back(attempt);
  }
  jobs_->add([this, attempt, card = std::make_shared<const OwnerCard>(std::move(card)),
              patience = Patience(timeout_ns, attempt->given_up_),
              done = std::move(done)] { done(run(*card, patience)); });
  return attempt;
}

void Connector::give_up() {
  const std::lock_guard lock(mutex_);
  for (const auto& each : running_) {
    if (const auto attempt = each.lock()) attempt->give_up();
  }
}

void Connector::close() {
  give_up();
  jobs_->close();
}

}  // namespace kvlink::channel

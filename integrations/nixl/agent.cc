// SPDX-License-Identifier: Apache-2.0
#include "agent.h"

#include <utility>

namespace kvlink::nixl {
namespace {

constexpr uint32_t kConnectThreads = 4;
constexpr size_t kHeldBytes = size_t{256} << 20;  // notifications for several peers that take none

}  // namespace

Result<std::unique_ptr<Agent>> Agent::make(const Settings& settings) {
  if (settings.agent.size() > channel::kMaxSenderBytes) {
    return Status::Config("an agent's name has " + std::to_string(channel::kMaxSenderBytes) +
                          " bytes at most");
  }
  std::unique_ptr<Agent> agent(new Agent(settings));
  if (Status status = agent->listen(); !status.ok()) return status;
  return agent;
}

Status Agent::listen() {
  Result<std::unique_ptr<channel::Jobs>> jobs = channel::Jobs::make("kvlink-nixl", kConnectThreads);
  if (!jobs.ok()) return jobs.status();
  jobs_ = std::move(*jobs);
  shared_.jobs = jobs_.get();
  channel::Limits limits;
  limits.held_bytes = kHeldBytes;
  Result<std::shared_ptr<channel::Channel>> channel = channel::Channel::make(limits);
  if (!channel.ok()) return channel.status();
  shared_.channel = std::move(*channel);
  channel::Serving serving;
  serving.accept = [this](const ConnectRequest& request, uint64_t caller) {
    return memory_.accept(request, caller);
  };
  serving.settle = serving.renew = [](const channel::SeatRef&) { return false; };  // seats are shared
  serving.notify = [this](const channel::Instance& caller, uint64_t link, channel::Notice notice) {
    return inbox_.add(caller, link, std::move(notice));
  };
  const Settings& settings = shared_.settings;
  const Result<channel::ChannelAddress> at =
      shared_.channel->listen(std::move(serving), settings.host, settings.port, settings.advertise);
  if (!at.ok()) return at.status();
  info_ = write_info(*at);
  peers_[settings.agent] = std::make_shared<Peer>(shared_, settings.agent, *at);
  return publish();
}

Status Agent::publish() {
  const std::lock_guard lock(publishing_);
  return shared_.channel->publish(write_card(memory_.card()));
}

Result<std::shared_ptr<OwnRegion>> Agent::add(std::byte* base, uint64_t bytes) {
  Result<std::shared_ptr<OwnRegion>> region = memory_.add(base, bytes);
  if (!region.ok()) return region;
  if (Status status = publish(); !status.ok()) {
    memory_.drop(**region);
    return status;
  }
  return region;
}

void Agent::drop(const std::shared_ptr<OwnRegion>& region) {
  region->dropped = true;  // a request that starts now sees it, or is in the list
  std::vector<std::shared_ptr<Request>> requests;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, request] : requests_) requests.push_back(request);
  }
  for (const auto& request : requests) request->abort_into(*region);
  memory_.drop(*region);
  static_cast<void>(publish());  // it is smaller than the one before
}

Status Agent::add_peer(const std::string& name, std::string_view info) {
  const std::optional<channel::ChannelAddress> address = read_info(info);
  if (!address) {
    return Status::AccessDenied("the connection info of agent " + name +
                                " is not of this release of kvlink, or forged");
  }
  std::shared_ptr<Peer> replaced;
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Peer>& known = peers_[name];
  if (known && known->instance() == address->credentials.instance) return {};
  if (known && !known->is_dead()) return Status::Config("another agent is known as " + name);
  replaced = std::exchange(known, std::make_shared<Peer>(shared_, name, *address));
  return {};
}

std::shared_ptr<Peer> Agent::peer(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(name);
  return found == peers_.end() ? nullptr : found->second;
}

/// Requests that are under way keep it, and end as they would.
void Agent::forget_peer(const std::string& name) {
  std::shared_ptr<Peer> forgotten;
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(name);
  if (found == peers_.end() || name == this->name()) return;
  forgotten = std::move(found->second);
  peers_.erase(found);
}

Result<std::shared_ptr<Request>> Agent::prepare(const std::vector<Wish>& wishes,
                                                const std::shared_ptr<Peer>& peer) {
  Result<std::shared_ptr<Request>> request = Request::prepare(wishes, peer, shared_.settings.timeout_ns);
  if (!request.ok()) return request;
  const std::lock_guard lock(mutex_);
  requests_.emplace(request->get(), *request);
  return request;
}

void Agent::release(const std::shared_ptr<Request>& request) {
  request->release();
  const std::lock_guard lock(mutex_);
  requests_.erase(request.get());
}

void Agent::take_notifications(std::vector<std::pair<std::string, std::string>>& into) {
  inbox_.take(into, [this](uint64_t link, uint64_t number) { shared_.channel->notified(link, number); });
}

void Agent::close() {
  std::vector<std::shared_ptr<Peer>> peers;
  std::vector<std::shared_ptr<Request>> requests;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    for (const auto& [name, peer] : std::exchange(peers_, {})) peers.push_back(peer);
    for (const auto& [key, request] : std::exchange(requests_, {})) requests.push_back(request);
  }
  for (const auto& request : requests) request->release();
  for (const auto& peer : peers) peer->close();
  memory_.close();  // its connections break, also those that are being made
  if (jobs_) jobs_->close();
  if (shared_.channel) shared_.channel->close();
}

}  // namespace kvlink::nixl

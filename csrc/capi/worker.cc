// SPDX-License-Identifier: Apache-2.0
#include "capi/worker.h"

#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "base/host_identity.h"
#include "capi/layouts.h"
#include "capi/pull.h"
#include "plan/layout_check.h"

namespace kvlink::capi {
namespace {

constexpr size_t kMostAnswers = 64;      // kept for callers that had too little space
constexpr size_t kMostEvents = 1 << 16;  // for a program that never takes them; the oldest are dropped
constexpr uint32_t kCollectEvery = 64;   // offers between two looks for ended ones, for the same reason
constexpr char kNoAgent[] = "none:0";    // in the card of a worker whose program carries messages

int32_t code_of(LeaseEnd how) {
  if (how == LeaseEnd::kSettled) return KVL_OK;
  return how == LeaseEnd::kExpired ? KVL_TIMEOUT : KVL_CANCELLED;
}

}  // namespace

Outcome Region::close() {
  const std::lock_guard lock(mutex_);
  if (num_users_ > 0) return refuse("a worker that is not closed has this region");
  closed_ = true;
  return {};
}

bool Region::begin_use() {
  const std::lock_guard lock(mutex_);
  num_users_ += !closed_;
  return !closed_;
}

void Region::end_use() {
  const std::lock_guard lock(mutex_);
  --num_users_;
}

Worker::Worker(WorkerSetup setup, std::unique_ptr<Engine> engine, std::shared_ptr<CompletionQueue> queue)
    : Object(kKind),
      setup_(std::move(setup)),
      incarnation_(random_bytes(kIncarnationBytes)),
      engine_(std::move(engine)),
      queue_(std::move(queue)) {}

Result<std::shared_ptr<Worker>> Worker::open(WorkerSetup setup) {
  Result<std::unique_ptr<Engine>> engine = Engine::make(setup.engine);
  if (!engine.ok()) return engine.status();
  Result<std::shared_ptr<CompletionQueue>> queue = CompletionQueue::make();
  if (!queue.ok()) return queue.status();
  return std::shared_ptr<Worker>(new Worker(std::move(setup), std::move(*engine), std::move(*queue)));
}

Outcome Worker::add_region(const std::shared_ptr<Region>& region, uint32_t& index) {
  const std::lock_guard lock(mutex_);
  if (started() || closed_) return refuse("regions are added before the worker starts");
  if (ranges_.size() >= kMaxRegions)
    return refuse("a worker has at most " + std::to_string(kMaxRegions) + " regions");
  if (std::find(regions_.begin(), regions_.end(), region) != regions_.end())
    return refuse("the worker has this region");
  // Before the engine knows the memory, which the program may free once the region is closed.
  if (!region->begin_use()) return {KVL_HANDLE, "the region is closed"};
  Result<uint32_t> added = engine_->add_pool_region(region->range());
  if (!added.ok()) {
    region->end_use();
    return added.status();
  }
  regions_.push_back(region);
  ranges_.push_back(region->range());
  index = *added;
  return {};
}

Outcome Worker::add_group(CardLayout layout) {
  const std::lock_guard lock(mutex_);
  if (started() || closed_) return refuse("groups are added before the worker starts");
  if (groups_.size() >= kMaxGroups)
    return refuse("a worker has at most " + std::to_string(kMaxGroups) + " groups");
  if (!groups_.empty() && (groups_[0].tp_rank != layout.tp_rank || groups_[0].tp_size != layout.tp_size)) {
    return refuse("the groups of a worker are of one tensor-parallel rank");
  }
  groups_.push_back(std::move(layout));
  return {};
}

Outcome Worker::start() {
  const std::lock_guard lock(mutex_);
  if (started() || closed_) return refuse("the worker has been started, or closed");
  if (groups_.empty()) return refuse("a worker has at least one group (kvl_worker_add_group)");
  std::vector<uint64_t> region_bytes;
  for (const MemoryRange& range : ranges_) region_bytes.push_back(range.bytes);
  for (const CardLayout& group : groups_) {
    if (Status status = check_layout(group.memory, "layout", region_bytes); !status.ok()) return status;
    if (Status status = check_planes_apart(group.memory, "layout"); !status.ok()) return status;
  }
  if (Status status = engine_->start(); !status.ok()) return status;
  if (Status status = setup_.listens ? listen() : Status{}; !status.ok()) return status;
  engine_->watch_ended(queue_);
  model_ = model_number(groups_.front().model);
  started_.store(true, std::memory_order_release);
  return {};
}

Result<std::string> Worker::card() const {
  WorkerCard card;
  card.worker_id = id();
  card.epoch = epoch();
  card.incarnation = incarnation_;
  card.agent = setup_.agent.empty() && !listens_at_ ? kNoAgent : setup_.agent;
  card.channel = listens_at_;
  card.host = {boot_id(), namespace_inode("pid"), namespace_inode("net"), static_cast<uint32_t>(::getpid()),
               static_cast<uint32_t>(::getuid())};
  card.layouts = groups_;
  for (const MemoryRange& range : ranges_) card.region_bytes.push_back(range.bytes);
  for (TransportAccess& access : engine_->access()) {
    card.transports.push_back({std::move(access.name), std::move(access.address), std::move(access.pool_keys),
                               std::move(access.lease_keys), std::move(access.refused), access.bounces});
  }
  card.protocol_version = kProtocolVersion;
  return seal_card(card);
}

Result<Accepted> Worker::accept(const ConnectRequest& request, uint64_t caller) {
  if (request.worker_id == id() && request.epoch == epoch())
    return engine_->accept(request.transport, request.hellos, request.takes_keys, caller);
  return Status::Stale(StaleReason::kRestarted, "the call is for worker " + request.worker_id + " epoch " +
                                                    std::to_string(request.epoch) + ", and " + id() +
                                                    " epoch " + std::to_string(epoch()) + " answers");
}

Outcome Worker::answer_into(uint64_t caller, std::string_view message, const Space& space) {
  std::string reply;
  {
    const std::lock_guard lock(answers_mutex_);
    const auto found = std::find_if(answers_.begin(), answers_.end(), [&](const Answer& kept) {
      return kept.caller == caller && kept.message == message;
    });
    if (found != answers_.end()) {
      reply = std::move(found->reply);
      answers_.erase(found);
    }
  }
  Status why;
  if (reply.empty()) {
    const Result<ConnectRequest> request = read_connect_request(message);
    const ConnectReply made =
        channel::reply_of(request.ok() ? accept(*request, caller) : Result<Accepted>(request.status()));
    why = made.refusal;
    reply = write_connect_reply(made);
  } else if (const Result<ConnectReply> kept = read_connect_reply(reply); kept.ok()) {
    why = kept->refusal;
  }
  Outcome given = space.give(reply);
  if (!given.ok()) {
    const std::lock_guard lock(answers_mutex_);
    answers_.push_back({caller, std::string(message), std::move(reply)});
    if (answers_.size() > kMostAnswers) answers_.pop_front();
    return given;
  }
  return why;
}

/// REQUIRES mutex_.
Status Worker::open_channel() {
  if (channel_) return {};
  Result<std::shared_ptr<channel::Channel>> made = channel::Channel::make();
  if (!made.ok()) return made.status();
  channel_ = std::move(*made);
  return {};
}

/// REQUIRES mutex_.
Status Worker::listen() {
  if (Status status = open_channel(); !status.ok()) return status;
  channel::Serving serving = channel::serving(*engine_);
  serving.accept = [this](const ConnectRequest& request, uint64_t caller) { return accept(request, caller); };
  const TransportOptions& options = setup_.engine.transport;
  const Result<channel::ChannelAddress> at =
      channel_->listen(std::move(serving), options.host, setup_.channel_port, options.advertise);
  if (!at.ok()) return at.status();
  const auto& [instance, secret] = at->credentials;
  listens_at_ = {at->addresses, std::string(instance.begin(), instance.end()),
                 std::string(secret.begin(), secret.end()), at->flags};
  const Result<std::string> sealed = card();
  return sealed.ok() ? channel_->publish(*sealed) : sealed.status();
}

Result<channel::Connector*> Worker::connector() {
  const std::lock_guard lock(mutex_);
  if (closed_) return Status::Cancelled("the worker was closed");
  if (!connector_) {
    if (Status status = open_channel(); !status.ok()) return status;
    Result<std::unique_ptr<channel::Connector>> made = channel::Connector::make(channel_, *engine_);
    if (!made.ok()) return made.status();
    connector_ = std::move(*made);
  }
  return connector_.get();
}

Outcome Worker::count(kvl_worker_stats& stats) {
  const LeaseCounts counts = engine_->leases().counts(now_ns());
  stats.active_leases = counts.active;
  stats.granted = counts.granted;
  stats.settled = counts.settled;
  stats.expired = counts.expired;
  stats.aborted = counts.aborted;
  return {};
}

Outcome Worker::close() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_.exchange(true)) return {};
  }
  // Their pulls may wait; what they have under way ends with the engine's connections.
  std::vector<std::shared_ptr<Object>> children = Table::get().take_children(*this);
  if (connector_) connector_->give_up();  // constant from here on, as the channel is
  engine_->close();
  if (connector_) connector_->close();
  if (channel_) channel_->close();
  for (const std::shared_ptr<Object>& child : children) static_cast<void>(child->close());
  for (const std::shared_ptr<Region>& region : regions_) region->end_use();
  queue_->close();
  return {};
}

std::string Worker::explain() const {
  std::string text = id() + " epoch " + std::to_string(epoch());
  for (const TransportAccess& access : engine_->access()) {
    text += "\n" + access.name + ": " + (access.refused.empty() ? "serves readers" : access.refused);
  }
  return text;
}

// Events.

void Worker::follow_offer(kvl_handle offer, uint64_t user) {
  const std::lock_guard lock(events_mutex_);
  offers_.emplace(offer, user);
  if (++num_offered_ % kCollectEvery == 0) collect_ended();
}

void Worker::forget_offer(kvl_handle offer) {
  const std::lock_guard lock(events_mutex_);
  offers_.erase(offer);
}

void Worker::add_event(uint32_t kind, kvl_handle handle, uint64_t user, int32_t code) {
  if (events_.size() >= kMostEvents) events_.pop_front();
  events_.push_back({sizeof(kvl_event), kind, handle, user, code, 0});
}

/// REQUIRES events_mutex_.
void Worker::collect_ended() {
  for (const EndedLease& ended : engine_->take_ended()) {
    const auto found = offers_.find(ended.lease);
    if (found == offers_.end()) continue;
    add_event(KVL_EVENT_OFFER_ENDED, ended.lease, found->second, code_of(ended.how));
    offers_.erase(found);
  }
}

std::vector<kvl_event> Worker::take_events(size_t most) {
  const std::lock_guard lock(events_mutex_);
  bool leases_ended = false;
  for (const uint64_t token : queue_->drain()) {
    if (const auto pull = Table::get().find<PullObject>(token)) {
      add_event(KVL_EVENT_PULL_ENDED, token, pull->user(), pull->outcome().code());
    } else if (const auto peer = Table::get().find<Peer>(token)) {
      add_event(KVL_EVENT_PEER_CONNECTED, token, peer->user(), Outcome(peer->failed()).code());
    } else {
      leases_ended = true;
    }
  }
  if (leases_ended) collect_ended();
  std::vector<kvl_event> taken;
  while (!events_.empty() && taken.size() < most) {
    taken.push_back(events_.front());
    events_.pop_front();
  }
  if (!events_.empty()) queue_->push(0);  // so that the descriptor stays readable
  return taken;
}

}  // namespace kvlink::capi

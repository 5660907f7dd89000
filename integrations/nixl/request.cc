// SPDX-License-Identifier: Apache-2.0
#include "request.h"

#include <algorithm>

#include "base/clock.h"

namespace kvlink::nixl {
namespace {

// An agent that drops regions all the time ends its lease each time.
constexpr uint32_t kMostRestarts = 8;
constexpr int64_t kCancelNs = 10'000'000;  // then the connection ends with its reads

bool within(uint64_t address, uint64_t bytes, uint64_t base, uint64_t size) {
  return address >= base && bytes <= size && address - base <= size - bytes;
}

template <typename T>
void add_once(std::vector<T>& all, const T& one) {
  if ((all.empty() || all.back() != one) && std::find(all.begin(), all.end(), one) == all.end())
    all.push_back(one);
}

/// A read that failed so may work over a new connection, or under the owner's next seat.
bool may_work_again(Code code) {
  return code == Code::kStaleBlocks || code == Code::kAccessDenied || code == Code::kPeerUnreachable;
}

}  // namespace

Result<std::shared_ptr<Request>> Request::prepare(const std::vector<Wish>& wishes, std::shared_ptr<Peer> peer,
                                                  int64_t timeout_ns) {
  std::shared_ptr<Request> request(new Request(std::move(peer), timeout_ns));
  request->pieces_.reserve(wishes.size());
  for (const Wish& wish : wishes) {
    if (Status status = request->add(wish); !status.ok()) return status;
  }
  return request;
}

Status Request::add(const Wish& wish) {
  const OwnRegion& into = *wish.into;
  const PeerRegion& from = *wish.from;
  if (from.peer != peer_) return Status::Config("a transfer reads from one agent");
  if (pieces_.empty()) {
    need_.own_pool = into.pool;
    need_.peer_pool = from.name.pool;
  }
  if (into.pool != need_.own_pool || from.name.pool != need_.peer_pool) {
    return Status::Config("a transfer has one kind of memory at each end: host memory, or that of one GPU");
  }
  if (!within(wish.local, wish.bytes, reinterpret_cast<uint64_t>(into.base), into.bytes) ||
      !within(wish.remote, wish.bytes, from.base, from.bytes)) {
    return Status::Config("a descriptor leaves its registered memory");
  }
  add_once(into_, wish.into);
  add_once(from_, wish.from);
  add_once(need_.regions, from.name.number);
  need_.own_regions = std::max(need_.own_regions, into.number + 1);
  pieces_.push_back({wish.remote - from.base, reinterpret_cast<std::byte*>(wish.local), wish.bytes,
                     from.name.number, into.number});
  return {};
}

Status Request::post(std::optional<std::string> notification) {
  const std::lock_guard lock(mutex_);
  if (runs() || phase_ == Phase::kReleased) return Status::Config("the transfer is under way");
  ++posts_;
  deadline_ns_ = now_ns() + timeout_ns_;
  restarts_ = 0;
  notification_ = std::move(notification);
  why_ = {};
  seat_ = {};
  transfer_.reset();
  phase_ = Phase::kConnecting;
  start();
  return {};
}

void Request::start() {
  for (const auto& region : into_) {
    if (region->dropped) return fail(Status::Cancelled("memory that it reads into was deregistered"));
  }
  if (pieces_.empty()) return finish();
  const std::optional<Reach> reach = peer_->reach(need_);
  const bool is_stale = reach && reach->seat.slot == seat_.slot && reach->seat.nonce == seat_.nonce;
  if (!reach || is_stale) return ask_to_connect();
  PullRequest pull;
  pull.prepared = plan_for(reach->link);
  pull.seat = seat_ = reach->seat;
  pull.deadline_ns = deadline_ns_;
  transfer_ = reach->link->connection->pull(pull);
  if (!transfer_) return ask_to_connect();  // it broke just now
  phase_ = Phase::kReading;
  if (transfer_->done()) take_end();
}

void Request::ask_to_connect() {
  phase_ = Phase::kConnecting;
  peer_->connect(need_, seat_, [known = weak_from_this(), post = posts_](const Status& status) {
    if (const auto request = known.lock()) request->connected(post, status);
  });
}

/// Runs on a thread that connects.
void Request::connected(uint64_t post, const Status& status) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kConnecting || post != posts_) return;
  if (!status.ok()) return fail(status);
  if (now_ns() >= deadline_ns_) return look();
  seat_ = {};  // the card was asked for
  start();
}

std::shared_ptr<const Plan> Request::plan_for(const std::shared_ptr<const Link>& link) {
  if (link_ == link) return plan_;
  std::vector<ReadPiece> pieces = pieces_;
  for (ReadPiece& piece : pieces) {
    piece.remote_region = link->regions.at(piece.remote_region);
    piece.local_region += link->first_segment;
  }
  plan_ = plan_pieces(pieces);
  link_ = link;
  return plan_;
}

/// REQUIRES a transfer that has ended.
void Request::take_end() {
  const Status ended = transfer_->status();
  if (ended.ok()) return finish();
  const bool may_start = restarts_ < kMostRestarts && may_work_again(ended.code()) && now_ns() < deadline_ns_;
  if (!may_start) return fail(ended);
  ++restarts_;
  if (ended.code() == Code::kPeerUnreachable) seat_ = {};  // it may still be the owner's
  start();
}

void Request::look() {
  if (phase_ == Phase::kReading && transfer_->done()) take_end();
  if (phase_ == Phase::kConnecting && now_ns() >= deadline_ns_) {
    fail(Status::Timeout("agent " + peer_->name() + " was not connected within the deadline"));
  }
}

/// All has landed and validated.
void Request::finish() {
  const Status told = notification_ ? peer_->notify(*notification_) : Status{};
  if (!told.ok()) return fail(told);
  phase_ = Phase::kDone;
}

void Request::fail(Status why) {
  why_ = std::move(why);
  phase_ = Phase::kFailed;
}

Request::Phase Request::check() {
  const std::lock_guard lock(mutex_);
  look();
  return phase_;
}

Status Request::failure() const {
  const std::lock_guard lock(mutex_);
  return why_;
}

/// On return the transfer has ended.
void Request::stop() {
  if (phase_ != Phase::kReading) return;
  transfer_->cancel();
  if (transfer_->wait(kCancelNs)) return;
  link_->connection->close("a cancelled transfer did not end");
  transfer_->wait(-1);
}

void Request::release() {
  const std::lock_guard lock(mutex_);
  stop();
  phase_ = Phase::kReleased;
}

void Request::abort_into(const OwnRegion& region) {
  const std::lock_guard lock(mutex_);
  const auto reads = [&region](const auto& into) { return into.get() == &region; };
  if (!runs() || std::none_of(into_.begin(), into_.end(), reads)) return;
  stop();
  fail(Status::Cancelled("memory that it reads into was deregistered"));
}

}  // namespace kvlink::nixl

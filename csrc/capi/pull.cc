// SPDX-License-Identifier: Apache-2.0
#include "capi/pull.h"

#include <algorithm>
#include <numeric>

#include "base/clock.h"
#include "capi/times.h"

namespace kvlink::capi {
namespace {

constexpr uint64_t kTimeoutUs = 30'000'000;

/// Returns the half-open range, where 0 to 0 means all of `count`. kConfig beyond it.
Outcome range_within(uint32_t first, uint32_t end, uint32_t count, const char* what, Range& into) {
  into = first == 0 && end == 0 ? Range{0, count} : Range{first, end};
  if (into.begin <= into.end && into.end <= count) return {};
  return refuse(std::string(what) + " " + std::to_string(first) + " to " + std::to_string(end) +
                " is no range within 0 to " + std::to_string(count));
}

uint32_t num_layers(const Layout& layout) {
  uint32_t highest = 0;
  for (const Plane& plane : layout.planes) highest = std::max(highest, plane.layer);
  return highest + 1;
}

}  // namespace

PullTerms::PullTerms()
    : ticket_([]() -> Ticket& {
        thread_local Ticket ticket;
        return ticket;
      }()) {}

Outcome PullTerms::take(const kvl_pull_options* options) {
  if (Outcome outcome = take_struct(options, options_, "kvl_pull_options"); !outcome.ok()) return outcome;
  if (options_.flags & ~uint32_t{KVL_PULL_NOTIFY | KVL_PULL_NO_SETTLE}) {
    return refuse("kvl_pull_options.flags has bits that are not known");
  }
  if (options_.plan != 0) {
    plan_ = Table::get().find<PlanObject>(options_.plan);
    if (!plan_) return {KVL_HANDLE, "there is no plan with this handle"};
    peer_ = plan_->peer();
  } else {
    peer_ = Table::get().find<Peer>(options_.peer);
    if (!peer_) return {KVL_HANDLE, "there is no peer with this handle"};
  }
  if (!peer_->ready()) return refuse("the peer is not connected: see kvl_peer_connect and kvl_peer_step");
  std::string_view bytes;
  if (Outcome outcome = take_bytes(options_.ticket, options_.ticket_bytes, bytes, "ticket"); !outcome.ok())
    return outcome;
  if (Status status = read_ticket_into(bytes, ticket_); !status.ok()) return status;
  if (Outcome outcome = check_ticket(); !outcome.ok()) return outcome;
  return take_seat();
}

Outcome PullTerms::check_ticket() const {
  const Worker& worker = *peer_->worker();
  const WorkerCard& owner = peer_->card();
  if (ticket_.worker_id != owner.worker_id) {
    return refuse("request " + ticket_.request_id + ": the ticket is of worker " + ticket_.worker_id +
                  ", and the peer is " + owner.worker_id);
  }
  if (ticket_.epoch != owner.epoch) {
    return Status::Stale(StaleReason::kRestarted, "request " + ticket_.request_id + ": " + owner.worker_id +
                                                      " restarted: the ticket has epoch " +
                                                      std::to_string(ticket_.epoch) + ", and the peer " +
                                                      std::to_string(owner.epoch));
  }
  if (std::max<size_t>(ticket_.groups.size(), 1) != owner.layouts.size()) {
    return refuse("request " + ticket_.request_id + ": the ticket has " +
                  std::to_string(std::max<size_t>(ticket_.groups.size(), 1)) + " cache groups, its worker " +
                  std::to_string(owner.layouts.size()));
  }
  if (worker.model() != 0 && worker.model() != ticket_.model) {
    return Status::LayoutMismatch(owner.worker_id +
                                  " has the cache of another model. Compute the prompt here, and start "
                                  "both servers with the same model");
  }
  const auto& keys = worker.setup().ticket_keys;
  return keys.empty() ? Status{} : check_signature(ticket_, keys);
}

Outcome PullTerms::take_seat() {
  LeaseSeat& seat = request_.seat;
  if (ticket_.is_soft()) {
    seat = ticket_.seats.front();
    return {};
  }
  const size_t num_seats = ticket_.seats.size();
  const size_t num_readers = options_.num_readers == 0 ? num_seats : options_.num_readers;
  if (options_.seat >= num_seats || num_readers > num_seats || options_.seat >= num_readers) {
    return refuse("request " + ticket_.request_id + ": seat " + std::to_string(options_.seat) + " of " +
                  std::to_string(num_readers) + " readers, and the ticket is for " +
                  std::to_string(num_seats));
  }
  seat = ticket_.seats[options_.seat];
  if (num_readers != num_seats) seat.settle_nonce ^= num_readers;
  if (options_.flags & KVL_PULL_NO_SETTLE) seat.settle_nonce = 0;
  return {};
}

StreamUnit PullTerms::stream_unit() const {
  const uint64_t units = ticket_.ready_unit == ReadyUnit::kBlocks ? ticket_.block_ids.size()
                         : ticket_.ready_unit == ReadyUnit::kTokens
                             ? ticket_.num_tokens
                             : num_layers(peer_->card().layouts[0].memory);
  if (ticket_.ready >= units) return StreamUnit::kNone;
  return static_cast<StreamUnit>(static_cast<int>(ticket_.ready_unit) + 1);
}

Outcome PullTerms::take_reads() {
  const size_t num_groups = peer_->card().layouts.size();
  if (std::max(options_.num_groups, 1u) != num_groups || (num_groups > 1 && !options_.group_blocks) ||
      (options_.num_blocks > 0 && !options_.blocks)) {
    return refuse("the peer has " + std::to_string(num_groups) +
                  " cache groups: blocks, group_blocks and num_groups must name the blocks of each");
  }
  request_.num_tokens = ticket_.num_tokens;
  request_.stream = stream_unit();
  const std::span<const uint32_t> theirs = ticket_.block_ids, ours(options_.blocks, options_.num_blocks);
  if (num_groups == 1) return take_group(0, theirs, ours);
  uint64_t their_first = 0, our_first = 0;
  for (size_t group = 0; group < num_groups; ++group) {
    const uint64_t count = options_.group_blocks[group];
    if (our_first + count > ours.size()) return refuse("group_blocks add up to more than num_blocks");
    const uint32_t their_count = ticket_.groups[group].num_blocks;
    Outcome outcome =
        take_group(group, theirs.subspan(their_first, their_count), ours.subspan(our_first, count));
    if (!outcome.ok()) return outcome;
    their_first += their_count, our_first += count;
  }
  if (our_first != ours.size()) return refuse("group_blocks add up to less than num_blocks");
  static_cast<GroupRead&>(request_) = more_.front();
  request_.more = std::span(more_).subspan(1);
  return {};
}

/// The tokens of the options limit groups that keep all tokens; others are read whole.
Outcome PullTerms::take_group(size_t index, std::span<const uint32_t> theirs,
                              std::span<const uint32_t> ours) {
  const bool is_state = peer_->card().layouts[index].is_state;
  const uint32_t kept = ticket_.groups.empty() ? ticket_.num_tokens : ticket_.groups[index].num_tokens;
  GroupRead read{peer_->planners()[index], theirs, ours, {}, {}};
  read.at_end = is_state || kept < ticket_.num_tokens;
  Outcome outcome =
      range_within(options_.first_token, options_.end_token, ticket_.num_tokens, "the tokens", read.tokens);
  if (!outcome.ok()) return outcome;
  if (read.at_end) read.tokens = {0, is_state ? static_cast<uint32_t>(theirs.size()) : kept};
  if (is_state && theirs.size() != ours.size()) {
    return refuse("cache group " + std::to_string(index) + " has " + std::to_string(theirs.size()) +
                  " states there, and " + std::to_string(ours.size()) + " here");
  }
  const uint32_t layers = read.planner->num_layers();
  if (peer_->card().layouts.size() == 1) {
    outcome = range_within(options_.first_layer, options_.end_layer, layers, "the layers", read.layers);
    if (!outcome.ok()) return outcome;
    static_cast<GroupRead&>(request_) = std::move(read);
    return {};
  }
  if (options_.first_layer != 0 || options_.end_layer != 0)
    return refuse("the layers select from one cache group");
  more_.push_back(std::move(read));
  return {};
}

Outcome PullTerms::start(std::shared_ptr<Pull>& pull) {
  if (plan_) {
    if (ticket_.block_ids != plan_->owner_blocks())
      return refuse("the plan is of other blocks than the ticket");
    if (stream_unit() != StreamUnit::kNone) return refuse("a pull with a plan does not stream");
    request_.prepared = plan_->plan();
  } else if (Outcome outcome = take_reads(); !outcome.ok()) {
    return outcome;
  }
  int64_t timeout_ns = 0;
  if (Outcome outcome = take_time(options_.timeout_us, kTimeoutUs, timeout_ns); !outcome.ok()) return outcome;
  request_.deadline_ns = now_ns() + std::max(timeout_ns, Connection::kLeastNs);
  std::shared_ptr<Transfer> transfer = peer_->connection()->pull(request_);
  if (!transfer) {
    return Status::Unreachable("request " + ticket_.request_id + ": " + peer_->connection()->why_broken());
  }
  pull = Pull::started(std::move(transfer), nullptr);
  return {};
}

Outcome PullTerms::prepare(std::shared_ptr<PlanObject>& plan) {
  if (plan_) return refuse("a plan is made for a peer, not of another plan");
  if (stream_unit() != StreamUnit::kNone) return refuse("a pull that streams cannot be planned before");
  if (Outcome outcome = take_reads(); !outcome.ok()) return outcome;
  Result<std::shared_ptr<const Plan>> made = peer_->connection()->prepare(request_);
  if (!made.ok()) return made.status();
  plan = std::make_shared<PlanObject>(peer_, std::move(*made), std::move(ticket_.block_ids));
  return {};
}

Outcome PullTerms::release() {
  const LeaseSeat& seat = request_.seat;
  if (!seat.settles()) return refuse("this seat is not settled by its readers");
  if (peer_->connection()->settle(seat.slot, seat.settle_nonce)) return {};
  return Status::Unreachable(peer_->connection()->why_broken());
}

Outcome PullObject::outcome_of(const Pull& pull) {
  if (!pull.done()) return {KVL_PENDING, "the pull has not ended"};
  if (pull.state() != PullState::kFailed) return {};
  Status status = pull.failure();
  if (!status.ok()) return status;
  const std::shared_ptr<Transfer> transfer = pull.transfer(0);
  return transfer ? transfer->status() : Status::Unreachable("the connection was broken");
}

Outcome PullObject::count(kvl_pull_stats& stats) const {
  const std::shared_ptr<Transfer> transfer = pull_->transfer(0);
  if (!transfer) return {};
  const TransferStats counted = transfer->stats();
  stats.settled = pull_->state() == PullState::kSettled;
  stats.bytes = counted.bytes;
  stats.num_reads = counted.num_ops;
  stats.proven_units = transfer->proven_units();
  const auto ns = [](int64_t from) { return static_cast<uint64_t>(from); };
  stats.total_ns = ns(counted.total_ns), stats.plan_ns = ns(counted.plan_ns),
  stats.read_ns = ns(counted.read_ns);
  stats.validate_ns = ns(counted.validate_ns), stats.settle_ns = ns(counted.settle_ns);
  return {};
}

std::string PullObject::explain() const {
  kvl_pull_stats stats{};
  static_cast<void>(count(stats));
  const Outcome ended = outcome();
  std::string text = ended.ok() ? "valid" : ended.status().sentence();
  if (stats.settled) text += ", settled";
  text += "; " + std::to_string(stats.bytes) + " bytes in " + std::to_string(stats.num_reads) + " reads, " +
          std::to_string(stats.total_ns) + " ns (plan " + std::to_string(stats.plan_ns) + ", read " +
          std::to_string(stats.read_ns) + ", validate " + std::to_string(stats.validate_ns) + ", settle " +
          std::to_string(stats.settle_ns) + ")\n";
  return text + peer_->explain();
}

}  // namespace kvlink::capi

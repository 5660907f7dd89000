// SPDX-License-Identifier: Apache-2.0
#include "engine/connection.h"

#include <algorithm>

#include "base/clock.h"
#include "lease/lease_table.h"

namespace kvlink {
namespace {

// How long lanes of other paths that do not answer are waited for once one works, and as many times what
// those took.
constexpr int64_t kLaggardNs = 200'000'000, kLaggardTimes = 4;
// A caller that waits for a NIC keeps a core busy, which a progress thread does not. So only pulls of about a
// round trip wait on the calling thread.
constexpr int64_t kInlineNicNs = 120'000;

}  // namespace

Connection::Connection(std::vector<LaneEnd> lanes, std::shared_ptr<StagingPolicy> policy, int64_t inline_ns,
                       std::shared_ptr<ScratchPool> scratch,
                       std::vector<std::shared_ptr<ProgressThread>> threads,
                       std::shared_ptr<PathStats> path_stats, std::shared_ptr<CompletionQueue> control)
    : inline_ns_(inline_ns),
      policy_(std::move(policy)),
      scratch_(std::move(scratch)),
      path_stats_(std::move(path_stats)),
      control_(std::move(control)),
      threads_(std::move(threads)) {
  for (LaneEnd& lane : lanes) {
    const auto index = static_cast<uint32_t>(lanes_.size());
    if (lane.endpoint) lanes_.push_back(std::make_shared<Lane>(std::move(lane), index));
  }
  missing_ = lanes.size() - lanes_.size();
}

std::vector<std::string> Connection::hellos() const {
  std::vector<std::string> hellos;
  for (const auto& lane : lanes_) hellos.push_back(lane->endpoint().hello());
  return hellos;
}

/// Reads the header of the owner's lease table, which proves that a lane works and where it leads.
struct Connection::Probe {
  std::shared_ptr<Lane> lane;
  std::vector<uint32_t> regions = {};
  LeaseRegions leases = {};
  std::shared_ptr<uint64_t[]> words = nullptr;
  ReadOp op = {};
  Segment segment = {};
  bool pending = false;
  bool large = false;  // what it waits for
  Status status = {};

  void poll(uint64_t epoch, const ScratchPool& scratch);
  void read_large(const ScratchPool& scratch);
  Status check_header(uint64_t epoch) const;
};

void Connection::Probe::poll(uint64_t epoch, const ScratchPool& scratch) {
  std::vector<Completion> ended;
  const PollResult result = lane->endpoint().poll(now_ns(), false, ended);
  if (ended.empty() && result.status.ok()) return;
  pending = false;
  status = !result.status.ok() ? result.status : ended.front().status;
  if (large) return;
  if (status.ok()) status = check_header(epoch);
  if (status.ok() && lane->endpoint().traits().nic_driven && scratch.sink()) read_large(scratch);
}

/// A network that drops the packets of a payload may carry those of a header.
void Connection::Probe::read_large(const ScratchPool& scratch) {
  // The header counts the entries of the table, itself included.
  constexpr uint64_t kMost = ScratchPool::kSinkBytes / sizeof(LeaseSlot);
  op.bytes = static_cast<uint32_t>(std::clamp<uint64_t>(words[2], 1, kMost) * sizeof(LeaseSlot));
  segment = {scratch.sink(), op.bytes, scratch.region()};
  status = lane->endpoint().post_read(1, {std::span(&op, 1), &segment});
  large = pending = status.ok();
}

Status Connection::Probe::check_header(uint64_t epoch) const {
  if (words[0] != LeaseTableHeader::kMagic) {
    return Status::Unreachable("another process answers at the owner's address");
  }
  if (words[1] == epoch) return {};
  return Status::Stale(StaleReason::kRestarted, "the worker restarted: epoch " + std::to_string(epoch) +
                                                    " asked, " + std::to_string(words[1]) + " running");
}

/// Returns the lane of the same path that did not connect. The next would take as long to fail: the kernel
/// looks for an address for a second.
const Connection::Probe* Connection::refused_before(const std::vector<Probe>& probes, Lane& lane) {
  const Traits& traits = lane.endpoint().traits();
  const auto found = std::find_if(probes.begin(), probes.end(), [&traits](const Probe& probe) {
    return traits.nic_driven && probe.status.code() == Code::kPeerUnreachable &&
           probe.lane->endpoint().traits().path == traits.path;
  });
  return found == probes.end() ? nullptr : &*found;
}

Result<std::vector<uint32_t>> Connection::establish(uint32_t connection_id,
                                                    const std::vector<std::string>& replies,
                                                    const std::vector<std::string>& pool_keys,
                                                    const std::vector<std::string>& lease_keys,
                                                    uint64_t epoch, int64_t timeout_ns) {
  const Patience patience(timeout_ns, closed_);
  std::lock_guard lock(connecting_);
  if (closed_) return Status::Cancelled("the connection was closed before it was established");
  if (replies.size() != lanes_.size()) {
    return Status::Unreachable("protocol error: the owner answered " + std::to_string(replies.size()) +
                               " of " + std::to_string(lanes_.size()) + " lanes");
  }
  if (lease_keys.size() != 2) {
    return Status::Unreachable("protocol error: the owner has " + std::to_string(lease_keys.size()) +
                               " lease regions instead of 2");
  }
  std::vector<Probe> probes;
  for (size_t index = 0; index < lanes_.size(); ++index) {
    const Probe* const refused = refused_before(probes, *lanes_[index]);
    Probe& probe = probes.emplace_back(Probe{.lane = lanes_[index]});
    probe.status =
        refused ? refused->status : connect(probe, replies[index], pool_keys, lease_keys, patience);
    probe.pending = probe.status.ok();
  }
  // The probes no longer move, so endpoints may refer to their operations.
  for (Probe& probe : probes) {
    if (!probe.pending) continue;
    probe.status = probe.lane->endpoint().post_read(0, {std::span(&probe.op, 1), &probe.segment});
    probe.pending = probe.status.ok();
  }
  await(probes, epoch, patience);

  Status why;
  std::vector<std::shared_ptr<Lane>> alive;
  std::vector<uint32_t> regions;
  const auto readers = connection_id == 0 ? nullptr : std::make_shared<AnnouncedReaders>(connection_id);
  for (const Probe& probe : probes) {
    if (!probe.status.ok()) {
      why = why_missing(probe);
      probe.lane->close(why.what());
      ++missing_;
      continue;
    }
    if (!alive.empty() && probe.regions != regions) {
      return Status::Config("lanes of one connection number the owner's regions differently");
    }
    regions = probe.regions;
    alive.push_back(probe.lane);
    if (control_) probe.lane->on_lost([control = control_, token = token()] { control->push(token); });
    probe.lane->ready(probe.leases, readers, threads_[(alive.size() - 1) % threads_.size()]);
  }
  if (alive.empty()) return why;
  lanes_ = std::move(alive);
  const Traits& traits = lanes_.front()->traits();
  copies_ = traits.cpu_copies;
  nic_driven_ = traits.nic_driven;
  launches_ = traits.device_driven;
  stripe_bytes_ = traits.window.stripe_bytes;
  for (size_t index = 0; index < lanes_.size(); ++index) thread_of(index).add(lanes_[index]);
  driver_ = make_driver();
  find_rails();
  established_ = true;
  return regions;
}

/// Returns why a lane does not work, and remembers if packets of a payload get lost.
Status Connection::why_missing(const Probe& probe) {
  const Status& status = probe.status;
  if (!probe.large || status.code() == Code::kCancelled) return status;
  lost_large_ = true;
  return Status{Code::kPeerUnreachable,
                "the network carries small packets and not those of a payload: " + status.what(),
                "set one MTU, at least that of the NICs' interfaces, on every switch between them"};
}

/// Transfers may outlive the connection, and they must not keep its lanes alive.
std::shared_ptr<const TransferDriver> Connection::make_driver() const {
  const auto wake = [threads = threads_] {
    for (const auto& thread : threads) thread->wake();
  };
  const auto drive_for = [first = std::weak_ptr(lanes_.front())](const Transfer& transfer, int64_t until_ns) {
    if (const std::shared_ptr<Lane> lane = first.lock()) lane->drive_for(transfer, until_ns);
  };
  return std::make_shared<const TransferDriver>(wake, drive_for, policy_,
                                                lanes_.front()->traits().supports_repeats);
}

Status Connection::connect(Probe& probe, const std::string& reply, const std::vector<std::string>& pool_keys,
                           const std::vector<std::string>& lease_keys, const Patience& patience) {
  if (reply.empty()) return Status::Unreachable("the owner refused this lane; is its port down?");
  if (patience.over()) return patience.why_over(Status::Timeout("no time was left for this lane"));
  Endpoint& endpoint = probe.lane->endpoint();
  if (Status status = endpoint.establish(reply, patience); !status.ok()) return status;
  for (const std::string& key : pool_keys) {
    Result<uint32_t> region = endpoint.import_region(key);
    if (!region.ok()) return region.status();
    probe.regions.push_back(*region);
  }
  Result<uint32_t> slots = endpoint.import_region(lease_keys[0]);
  if (!slots.ok()) return slots.status();
  Result<uint32_t> words = endpoint.import_region(lease_keys[1]);
  if (!words.ok()) return words.status();
  probe.leases = {*slots, *words};
  probe.words = scratch_->take();
  if (!probe.words) return Status::Config("too many pulls at once");
  probe.op = {0, sizeof(LeaseTableHeader), probe.leases.slots, 0, 1};
  probe.segment = {reinterpret_cast<std::byte*>(probe.words.get()), sizeof(LeaseTableHeader),
                   scratch_->region()};
  return {};
}

/// Lanes of a path that works are waited for: their NIC ends them if nothing answers. Others that do not
/// answer are left out, some time after the first lane works.
void Connection::await(std::vector<Probe>& probes, uint64_t epoch, const Patience& patience) const {
  const auto pending = [](const Probe& probe) { return probe.pending; };
  const auto works = [](const Probe& probe) { return !probe.pending && probe.status.ok(); };
  const auto will_work = [&](const Probe& probe) {
    const Traits& traits = probe.lane->endpoint().traits();
    return probe.pending && traits.nic_driven && std::ranges::any_of(probes, [&](const Probe& other) {
             return works(other) && other.lane->endpoint().traits().path == traits.path;
           });
  };
  const int64_t began = now_ns();
  int64_t laggards_until = INT64_MAX;
  while (std::any_of(probes.begin(), probes.end(), pending) && !patience.over()) {
    const int64_t now = now_ns();
    if (now >= laggards_until && std::ranges::none_of(probes, will_work)) break;
    for (Probe& probe : probes) {
      if (probe.pending) probe.poll(epoch, *scratch_);
    }
    if (laggards_until == INT64_MAX && std::any_of(probes.begin(), probes.end(), works)) {
      laggards_until = now + std::max(kLaggardNs, kLaggardTimes * (now - began));
    }
    yield_thread();
  }
  for (Probe& probe : probes) {
    if (!probe.pending) continue;
    probe.status = patience.why_over(Status::Timeout("the owner's lease table could not be read in time"));
  }
}

std::shared_ptr<Transfer> Connection::pull(const PullRequest& request) {
  if (lanes_.front()->idle() && !copies_) lanes_.front()->check_idle(true);
  if (broken()) return nullptr;
  auto transfer = std::make_shared<Transfer>(request, now_ns(), driver_, path_stats_);
  if (transfer->done()) return transfer;
  if (const Status status = check_pull_ ? check_pull_() : Status{}; !status.ok()) {
    transfer->refuse(status, now_ns());
    return transfer;
  }
  std::shared_ptr<uint64_t[]> words = scratch_->take();
  if (!words) {
    transfer->refuse(Status::Config("too many pulls at once; wait for some to end"), now_ns());
    return transfer;
  }
  transfer->set_scratch(std::move(words), scratch_->region());
  const bool streaming = request.stream != StreamUnit::kNone;
  const bool small = !streaming && ends_soon(*transfer);
  const bool here = small || (!streaming && launches_);
  const bool striped = streaming || transfer->planned_bytes() >= stripe_bytes_;
  const uint64_t lanes = choose_lanes(*transfer, striped && !streaming && !small);
  Lane& first = lane_at(lanes);
  if (idle()) transfer->mark_alone();
  transfer->attach();  // until those have it that take over from the first if it breaks
  const bool ran = here && first.run_inline(transfer, small ? inline_ns_ : 0);
  const uint64_t others = lanes & (lanes - 1);
  if (!ran) {
    submit(transfer, striped ? lanes : lanes ^ others);
  } else if (!transfer->done() && (striped || first.broken())) {
    submit(transfer, others);
  }
  if (!transfer->done()) {
    const Status why = first.broken() ? first.why_broken() : Status::Unreachable("the connection broke");
    transfer->detach(why, now_ns());
  }
  return transfer;
}

bool Connection::ends_soon(const Transfer& transfer) const {
  const int64_t most_ns = nic_driven_ ? std::min(inline_ns_, kInlineNicNs) : inline_ns_;
  return most_ns > 0 && transfer.predicted_us() * 1e3 <= static_cast<double>(most_ns);
}

void Connection::find_rails() {
  std::vector<Rail> rails;
  for (const auto& lane : lanes_) add_lane(rails, lane->index(), lane->traits());
  if (rails.size() > 1) rails_ = std::make_shared<const std::vector<Rail>>(std::move(rails));
}

/// Returns the lanes for a transfer, a bit for each by its place.
uint64_t Connection::choose_lanes(Transfer& transfer, bool may_measure) const {
  uint64_t lanes = ~0ull >> (64 - lanes_.size());
  if (!rails_) return lanes;
  uint64_t enough = 0;
  for (const Rail& rail : *rails_) enough += rail.enough_bytes();
  const bool measures = may_measure && transfer.planned_bytes() >= enough;
  const RailChoice choice = path_stats_->rails().choose(*rails_, measures, now_ns());
  uint64_t aside = 0;
  for (size_t rail = 0; rail < rails_->size(); ++rail) {
    if ((choice.aside >> rail & 1) != 0) aside |= (*rails_)[rail].lanes;
  }
  for (size_t place = 0; aside != 0 && place < lanes_.size(); ++place) {
    if ((aside >> lanes_[place]->index() & 1) != 0) lanes ^= 1ull << place;
  }
  if (measures) transfer.measure(rails_, choice);
  return lanes;
}

void Connection::submit(const std::shared_ptr<Transfer>& transfer, uint64_t lanes) const {
  for (; lanes != 0; lanes &= lanes - 1) lane_at(lanes).submit(transfer);
}

Result<int64_t> Connection::time_read(const ReadOp& op, const Segment& segment) {
  return lanes_.front()->time_read({std::span(&op, 1), &segment});
}

bool Connection::settle(uint32_t slot, uint64_t value) {
  if (slot == 0 || value < kSmallestNonce) return false;  // no lease's: slot 0 is the header
  return lanes_.front()->settle({slot, value});
}

std::vector<LaneWord> Connection::take_lost() { return lanes_.front()->take_lost(); }

bool Connection::broken() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->broken(); });
}

bool Connection::idle() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->idle(); });
}

void Connection::look_after() {
  std::unique_lock lock(connecting_, std::try_to_lock);
  if (!lock || closed_ || !established_) return;
  for (size_t index = 0; index < lanes_.size(); ++index) {
    lanes_[index]->check_idle(false);
    thread_of(index).wake();
  }
}

uint32_t Connection::pending() const {
  uint32_t pending = 0;
  for (const auto& lane : lanes_) pending += lane->pending();
  return pending;
}

std::string Connection::why_broken() const {
  for (const auto& lane : lanes_) {
    if (lane->broken()) return lane->why_broken().what();
  }
  return {};
}

std::vector<std::string> Connection::paths() const {
  std::vector<std::string> paths;
  for (const auto& lane : lanes_) {
    paths.push_back(lane->endpoint().traits().path);
    if (rails_ && path_stats_->rails().is_aside(paths.back()))
      paths.back() += ", set aside: its last pulls were ten times slower than those over its equals";
  }
  return paths;
}

void Connection::close(const std::string& why) {
  if (process_.inherited()) return;
  closed_ = true;
  std::lock_guard lock(connecting_);
  for (size_t index = 0; index < lanes_.size(); ++index) {
    lanes_[index]->close(why);
    thread_of(index).remove(lanes_[index]);
  }
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/host_identity.h"
#include "base/sys.h"
#include "device/cuda_copier.h"
#include "transports/registry.h"

namespace kvlink {
namespace {

constexpr uint64_t kScratchBytes = 1 << 20;  // 16,384 pulls in flight
constexpr char kStarting[] = "cannot start this worker";

/// Returns whether readers announce in the lease slot which connection reads, so that it can be cut off.
bool announces(const Transport& transport) {
  return transport.capabilities().can_fence && !transport.capabilities().guards;
}

Status cannot_stage(const std::string& transport, const Status& why) {
  return Status::Unavailable(transport +
                                 " reaches host memory, and the pool is GPU memory; it cannot be staged (" +
                                 why.sentence() + ")",
                             "use verbs (KVLINK_TRANSPORTS) or a pool in host memory");
}

// How long to look for readers that announce themselves late, after the last lease has ended.
constexpr int64_t kWatchEndedNs = 1'000'000'000;

}  // namespace

Result<std::unique_ptr<Engine>> Engine::make(const EngineOptions& options) {
  if (options.num_progress_threads == 0 || options.num_progress_threads > 64) {
    return Status::Config("progress threads must be 1 to 64");
  }
  if (options.num_lease_slots == 0 || options.num_lease_slots > 1 << 20) {
    return Status::Config("lease slots must be 1 to 1048576");
  }
  uint64_t drawn;
  if (Status status = fill_random(&drawn, sizeof drawn); !status.ok()) return status;
  std::unique_ptr<Engine> engine(new Engine(options));
  for (const std::string& name : options.transports) {
    TransportState state{name, nullptr, {}, {name, {}, {}, {}, {}}};
    Result<std::unique_ptr<Transport>> made = make_transport(name, options.transport);
    if (made.ok()) {
      state.transport = std::move(*made);
      state.access.address = state.transport->address();
    } else if (made.status().code() == Code::kTransportUnavailable) {
      state.access.refused = made.status().sentence();
    } else {
      return made.status();
    }
    engine->transports_.push_back(std::move(state));
  }
  return engine;
}

void Engine::disable(const std::string& transport, const std::string& why) {
  TransportState* const state = find(transport);
  if (!state) return;
  state->access.refused = why;
  close_transport(*state);
}

void Engine::close_transport(TransportState& state) {
  if (state.transport) state.transport->close();
  state.transport.reset();
}

Result<uint32_t> Engine::add_pool_region(const MemoryRange& range) {
  if (leases_) return Status::Config("memory is registered before the worker starts");
  if (Status status = check_range(range); !status.ok()) return status;
  pool_.push_back(range);
  return static_cast<uint32_t>(pool_.size() - 1);
}

Status Engine::check_range(const MemoryRange& range) const {
  if (range.base == nullptr || range.bytes == 0) return Status::Config("a pool region must not be empty");
  if (sample().base == nullptr || sample().device == range.device) return {};
  return Status::Config("the regions of a pool are all in GPU memory or all in host memory");
}

Status Engine::register_range(TransportState& state, const MemoryRange& range, Access access,
                              std::string& key) {
  Result<std::unique_ptr<MemoryRegion>> region = state.transport->register_memory(range, access);
  if (!region.ok()) return region.status();
  key = (*region)->remote_key();
  state.regions.push_back(std::move(*region));
  return {};
}

Status Engine::register_pool(TransportState& state) {
  state.access.pool_keys.resize(pool_.size());
  Status all;
  for (size_t index = 0; index < pool_.size();
       ++index) {  // a transport that cannot register one still counts it
    Status registered = register_range(state, pool_[index], Access::kRead, state.access.pool_keys[index]);
    if (all.ok()) all = std::move(registered);
  }
  return all;
}

Status Engine::register_leases(TransportState& state) {
  state.access.lease_keys.resize(2);
  Status status =
      register_range(state, lease_slots_->range(), Access::kReadWords, state.access.lease_keys[0]);
  return status.ok()
             ? register_range(state, peer_words_->range(), Access::kWriteWords, state.access.lease_keys[1])
             : status;
}

Status Engine::register_transport(TransportState& state) {
  const Status registered = register_pool(state);
  if (!registered.ok() && !reads_without_export(state)) return registered;
  const auto scratch = state.transport->register_memory(scratch_->memory().range(), Access::kLocal);
  if (!scratch.ok()) return scratch.status();
  if (state.staging) {
    const auto staged = state.transport->register_memory(staging_.memory, Access::kLocal);
    if (!staged.ok()) {
      staging_refused_ = state.name + ": " + staged.status().sentence();
      state.staging.reset();
    }
  }
  state.first_late = static_cast<uint32_t>(pool_.size()) + (state.staging ? 2 : 1);
  if (!registered.ok()) return registered;
  state.first_late += 2;
  return register_leases(state);
}

/// Returns whether reads of a transport that cannot export the pool may still land in it.
bool Engine::reads_without_export(const TransportState& state) const {
  return state.access.bounces || !state.transport->capabilities().needs_registered_target;
}

Status Engine::start() {
  KVLINK_CHECK(sample().base != nullptr && !started());
  Status status = register_all();
  if (status.ok()) status = open_descriptors();
  if (status.ok()) status = start_threads();
  if (!status.ok()) close();
  return status;
}

Status Engine::allocate_own() {
  const uint32_t num_slots = options_.num_lease_slots;
  auto slots = HostMemory::allocate(LeaseTable::slots_bytes(num_slots), false);
  if (!slots.ok()) return slots.status();
  auto words = HostMemory::allocate(LeaseTable::words_bytes(num_slots), false, {}, Access::kWriteWords);
  if (!words.ok()) return words.status();
  auto scratch = HostMemory::allocate(kScratchBytes + ScratchPool::kSinkBytes, false);
  if (!scratch.ok()) return scratch.status();
  lease_slots_ = *slots;
  peer_words_ = *words;
  leases_ = std::make_unique<LeaseTable>(
      std::span(lease_slots_->range().base, LeaseTable::slots_bytes(num_slots)),
      std::span(peer_words_->range().base, LeaseTable::words_bytes(num_slots)), options_.epoch);
  // Local regions are the pool's, then the scratch lines. Every transport numbers them in this order.
  scratch_ = std::make_shared<ScratchPool>(*scratch, static_cast<uint32_t>(pool_.size()), true);
  return {};
}

Status Engine::register_all() {
  if (Status status = allocate_own(); !status.ok()) return status;
  if (on_device()) wrap_for_device_pool();
  for (TransportState& state : transports_) {
    if (!state.transport) continue;
    const Status registered = register_transport(state);
    if (registered.ok()) continue;
    if (registered.code() != Code::kTransportUnavailable) return registered;
    state.access.refused = registered.sentence();
    state.access.pool_keys.clear();
    state.access.lease_keys.clear();
    state.regions.clear();
    if (!reads_without_export(state)) close_transport(state);
  }
  for (TransportState& state : transports_) {
    if (!state.transport) continue;
    refresh(state);
    announces_ |= announces(*state.transport);
    // A bounce buffer copies from the address, whatever is there.
    const bool keeps = on_device() && !pool_.empty() && !state.access.bounces;
    if (keeps && !placement_) placement_ = cuda::Placement::of(pool_);
  }
  return {};
}

/// Registration may have left ports out.
void Engine::refresh(TransportState& state) const {
  state.ports = state.transport->ports();
  const auto used = std::stable_partition(state.ports.begin(), state.ports.end(),
                                          [](const PortState& port) { return !port.left_out; });
  state.access.left_out.assign(used, state.ports.end());
  state.ports.erase(used, state.ports.end());
  state.access.address = state.transport->address();
  if (state.regions.size() != pool_.size() + 2) return;  // it exports nothing
  for (size_t region = 0; region < state.regions.size(); ++region) {
    auto& keys = region < pool_.size() ? state.access.pool_keys : state.access.lease_keys;
    keys[region < pool_.size() ? region : region - pool_.size()] = state.regions[region]->remote_key();
  }
}

Status Engine::open_descriptors() {
  Result<UniqueFd> epoll = sys::epoll(kStarting), wake = sys::event_fd(kStarting);
  if (!epoll.ok()) return epoll.status();
  if (!wake.ok()) return wake.status();
  epoll_fd_ = std::move(*epoll);
  wake_fd_ = std::move(*wake);
  bool watched = sys::watch(epoll_fd_.get(), wake_fd_.get(), EPOLLIN, UINT64_MAX);
  for (size_t index = 0; watched && index < transports_.size(); ++index) {
    const int fd = transports_[index].transport ? transports_[index].transport->capabilities().serve_fd : -1;
    if (fd >= 0) watched = sys::watch(epoll_fd_.get(), fd, EPOLLIN, index);
  }
  return watched ? Status{} : sys::failed(Code::kConfig, kStarting, "epoll_ctl", errno);
}

Status Engine::start_threads() {
  for (uint32_t index = 0; index < options_.num_progress_threads; ++index) {
    Result<std::shared_ptr<ProgressThread>> thread = ProgressThread::make();
    if (!thread.ok()) return thread.status();
    progress_.push_back(std::move(*thread));
  }
  Result<std::thread> owner = sys::start_thread(kStarting, "kvlink-owner", [this] { serve(); });
  if (!owner.ok()) return owner.status();
  owner_ = std::move(*owner);
  return {};
}

std::vector<TransportAccess> Engine::access() const {
  std::vector<TransportAccess> all;
  for (const TransportState& state : transports_) all.push_back(state.access);
  return all;
}

Result<uint32_t> Engine::add_region(const MemoryRange& range) {
  if (Status status = check_range(range); !status.ok()) return status;
  const std::lock_guard registering(late_mutex_);
  if (Status status = check_serving(); !status.ok()) return status;
  Late late{num_late_, range.bytes, {}, {}};
  Status why = Status::Unavailable("this worker has no transport", {});
  for (TransportState& state : transports_) {
    Result<std::unique_ptr<MemoryRegion>> made = state.transport
                                                     ? state.transport->register_memory(range, Access::kRead)
                                                     : Status::Unavailable(state.access.refused, {});
    if (!made.ok() && state.transport) why = made.status();
    late.refused.push_back(made.ok() ? std::string() : made.status().sentence());
    late.regions.push_back(made.ok() ? std::move(*made) : nullptr);
  }
  const bool any =
      std::any_of(late.regions.begin(), late.regions.end(), [](const auto& one) { return one != nullptr; });
  const std::lock_guard lock(mutex_);
  ++num_late_;
  if (closed_) return Status::Config("this worker is closed");
  if (!any) return why;
  late_.push_back(std::move(late));
  return late_.back().number;
}

void Engine::drop_region(uint32_t number) {
  std::vector<Late> dropped;  // released without the lock
  const std::lock_guard lock(late_mutex_);
  {
    const std::lock_guard listed(mutex_);
    const auto found = std::find_if(late_.begin(), late_.end(),
                                    [number](const Late& late) { return late.number == number; });
    if (found == late_.end()) return;
    dropped.push_back(std::move(*found));
    late_.erase(found);
  }
}

std::vector<LateRegion> Engine::late_regions() const {
  std::vector<LateRegion> all;
  const std::lock_guard lock(mutex_);
  for (const Late& late : late_) {
    LateRegion& region = all.emplace_back(LateRegion{late.number, late.bytes, {}, late.refused});
    for (const auto& each : late.regions) region.keys.push_back(each ? each->remote_key() : std::string());
  }
  return all;
}

uint32_t Engine::num_late_regions() const {
  const std::lock_guard lock(mutex_);
  return num_late_;
}

uint32_t Engine::segment_region(const std::string& transport, uint32_t number) const {
  const auto state = std::find_if(transports_.begin(), transports_.end(),
                                  [&](const TransportState& each) { return each.name == transport; });
  KVLINK_CHECK(state != transports_.end());
  return state->first_late + number;
}

Engine::TransportState* Engine::find(const std::string& transport) {
  for (TransportState& state : transports_) {
    if (state.name == transport && state.transport) return &state;
  }
  return nullptr;
}

Status Engine::absent(const std::string& transport) const {
  const auto state = std::find_if(transports_.begin(), transports_.end(),
                                  [&](const TransportState& state) { return state.name == transport; });
  const std::string why = state == transports_.end() ? std::string() : state->access.refused;
  return Status::Unavailable("this worker does not use " + transport + (why.empty() ? "" : ": " + why), {});
}

Result<Accepted> Engine::accept(const std::string& transport, const std::vector<std::string>& hellos,
                                bool takes_keys, uint64_t caller) {
  TransportState* state = find(transport);
  if (!state || closing_) return Status::Unavailable("this worker does not offer " + transport, {});
  if (hellos.empty() || hellos.size() > 64) return Status::Config("a connection has 1 to 64 lanes");
  const uint32_t id = 1 + next_connection_++ % Announcement::kLastConnection;
  Accepted accepted{announces(*state->transport) ? id : 0, {}};
  Status why;
  for (Result<std::string>& reply : state->transport->accept({id, caller}, Hellos(hellos))) {
    if (!reply.ok()) why = reply.status();
    accepted.replies.push_back(reply.ok() ? std::move(*reply) : std::string());  // empty: not this lane
  }
  const bool none =
      std::all_of(accepted.replies.begin(), accepted.replies.end(), std::mem_fn(&std::string::empty));
  if (none) return why;
  if (Status status = add_changed_keys(*state, takes_keys, accepted); !status.ok()) {
    state->transport->fence(id);
    return status;
  }
  return accepted;
}

Result<std::shared_ptr<Connection>> Engine::open(const std::string& transport, const std::string& address,
                                                 std::shared_ptr<PathStats> path_stats,
                                                 const WorkerRun& owner) {
  TransportState* state = find(transport);
  if (!state || closing_) return absent(transport);
  Result<std::vector<LaneEnd>> lanes = open_lane_ends(*state, address, options_.num_lanes, owner);
  if (!lanes.ok()) return lanes.status();
  const std::shared_ptr<Connection> connection(
      new Connection(std::move(*lanes), state->staging ? state->staging->make_policy() : nullptr,
                     options_.inline_ns, scratch_, progress_, std::move(path_stats), control_),
      DeleteOwn());
  if (placement_) connection->check_pulls([placement = placement_] { return placement->check(); });
  std::lock_guard lock(mutex_);
  if (closed_) return Status::Unavailable("this worker is closed", {});
  std::erase_if(connections_, [](const auto& known) { return known.expired(); });
  connections_.push_back(connection);
  return connection;
}

/// At least one lane has an endpoint.
Result<std::vector<LaneEnd>> Engine::open_lane_ends(const TransportState& state, const std::string& address,
                                                    uint32_t num_lanes, const WorkerRun& owner) {
  Result<Endpoints> endpoints = state.transport->open(address, num_lanes, owner);
  if (!endpoints.ok()) return endpoints.status();
  std::vector<LaneEnd> lanes(endpoints->size());
  if (state.staging) {
    endpoints = wrap_lanes(std::move(endpoints), [&](uint32_t lane, std::unique_ptr<Endpoint> inner) {
      auto wrapped = state.staging->wrap(std::move(inner));
      if (!wrapped.ok()) return Result<std::unique_ptr<Endpoint>>(wrapped.status());
      lanes[lane].staging = wrapped->get();
      return Result<std::unique_ptr<Endpoint>>(std::move(*wrapped));
    });
    if (!endpoints.ok()) return endpoints.status();
  }
  for (size_t lane = 0; lane < lanes.size(); ++lane) lanes[lane].endpoint = std::move((*endpoints)[lane]);
  return lanes;
}

Status Engine::check_serving() {
  if (!started()) return Status::Config("this worker has not started");
  if (closing_) return Status::Config("this worker is closed");
  if (offers_no_more_) {
    std::lock_guard lock(mutex_);
    return {Code::kConfig, "this worker offers no more: " + why_no_more_, "Restart it, and report this text"};
  }
  return check_placement();
}

/// The old memory still has what was offered before. It does not get what is written from now on.
Status Engine::check_placement() {
  if (!placement_) return {};
  Status status = placement_->check();
  if (!status.ok()) leases_->abort_all();
  return status;
}

bool Engine::set_ready(uint64_t lease, uint64_t ready) {
  return check_placement().ok() && leases_->set_ready(lease, ready);
}

Result<std::vector<LeaseSeat>> Engine::grant(uint64_t lease, uint32_t readers, uint64_t ready,
                                             int64_t ttl_ns) {
  if (Status status = check_serving(); !status.ok()) return status;
  auto seats = leases_->grant(lease, readers, ready, ttl_ns, now_ns());
  if (owner_sleep_.asleep()) wake_owner();
  return seats;
}

Status Engine::grant_at(uint64_t lease, std::span<const LeaseSeat> seats, uint64_t ready, int64_t ttl_ns) {
  if (Status status = check_serving(); !status.ok()) return status;
  Status status = leases_->grant_at(lease, seats, ready, ttl_ns, now_ns());
  if (owner_sleep_.asleep()) wake_owner();
  return status;
}

/// The table of leases cannot be trusted any more: no read validates from now on, and nothing is granted.
/// Pulls from other workers go on.
void Engine::stop_offering(const char* why) {
  leases_->void_all();
  std::lock_guard lock(mutex_);
  if (!offers_no_more_.exchange(true)) why_no_more_ = why;
}

void Engine::wake_owner() {
  const std::lock_guard lock(wake_mutex_);
  if (wake_fd_) set_event(wake_fd_.get());
}

void Engine::serve() {
  int64_t swept = 0;
  SweepPause pause;
  while (!closing_) {
    epoll_event events[16];
    const bool sleeps = owner_sleep_.may_sleep(
        [this] { return leases_->num_active() > 0 || now_ns() < watch_ended_until_ns_; });
    const int num_events = epoll_wait(epoll_fd_.get(), events, 16, sleeps ? -1 : pause.ms());
    owner_sleep_.awake();
    if (sleeps) pause = {};
    for (int index = 0; index < num_events; ++index) {
      const uint64_t state = events[index].data.u64;
      if (state < transports_.size()) {
        transports_[state].transport->serve();
        check_ports(transports_[state]);
      } else {
        clear_event(wake_fd_.get());
      }
    }
    const int64_t now = now_ns();
    if (now - swept < int64_t{pause.ms()} * 1'000'000) continue;
    swept = now;
    try {
      pause.swept(sweep() || announces_);  // sweeps collect what readers announce
    } catch (const BrokenContract& broken) {
      stop_offering(broken.what());
    }
  }
}

// Pools in device memory: which transports stage their reads.

void Engine::force_bounce(const std::string& transport, const std::string& why) {
  if (TransportState* const state = find(transport)) state->bounce_why = why;
}

Result<std::shared_ptr<DeviceCopier>> Engine::make_copier(const std::byte* memory) const {
  if (options_.make_copier) return options_.make_copier(memory);
  return make_cuda_copier(memory, options_.transport.cuda_kernel, options_.transport.gpu_blocks);
}

/// Transports that do not reach the pool's device bounce if they can. The others use the staging buffer if
/// requested.
void Engine::wrap_for_device_pool() {
  std::shared_ptr<Bounce> bounced;
  std::shared_ptr<StagingBuffer> staging;
  for (TransportState& state : transports_) {
    if (!state.transport) continue;
    if (state.transport->capabilities().reaches_device_memory && state.bounce_why.empty()) {
      if (staging_.memory.base) add_staging(state, staging);
      continue;
    }
    const Status wrapped = wrap_in_bounce(state, bounced);
    state.access.bounces = wrapped.ok();
    if (wrapped.ok()) continue;
    state.access.refused = cannot_stage(state.name, wrapped).sentence();
    close_transport(state);
  }
}

Status Engine::wrap_in_bounce(TransportState& state, std::shared_ptr<Bounce>& shared) {
  if (options_.bounce_bytes == 0) {
    return Status::Unavailable("bounce is not allowed", "add it to KVLINK_GPUDIRECT");
  }
  if (!shared) {
    auto made =
        Bounce::make(sample().base, options_.bounce_bytes, [this](auto... of) { return make_copier(of...); });
    if (!made.ok()) return made.status();
    shared = std::move(*made);
  }
  const auto num_regions = static_cast<uint32_t>(pool_.size());
  // Behind the pool come the scratch lines and the two regions of the leases.
  auto wrapped =
      bounce_wrap(std::move(state.transport), shared, num_regions, state.bounce_why, num_regions + 3);
  if (!wrapped.ok()) return wrapped.status();
  state.transport = std::move(*wrapped);
  return {};
}

/// Without the staging buffer the transport works as well, only slower between unlike layouts.
void Engine::add_staging(TransportState& state, std::shared_ptr<StagingBuffer>& shared) {
  if (!shared) {
    auto made = make_staging(staging_.memory, [this](auto... of) { return make_copier(of...); });
    if (!made.ok()) {
      staging_refused_ = made.status().sentence();
      return;
    }
    shared = std::move(*made);
  }
  const std::string plain = state.name.substr(state.name.find('+') + 1);
  // It is registered after the pool and the scratch memory, so that those keep their numbers.
  state.staging.emplace(shared, plain, staging_.always, static_cast<uint32_t>(pool_.size() + 1));
}

// Soft leases: transports that can be stopped are, before blocks that are revoked get new content.

Result<LeaseSeat> Engine::grant_soft(std::span<const uint32_t> blocks, uint64_t ready, int64_t ttl_ns) {
  if (Status status = check_serving(); !status.ok()) return status;
  auto seat = leases_->grant_soft(blocks, ready, ttl_ns, now_ns());
  if (owner_sleep_.asleep()) wake_owner();
  return seat;
}

Status Engine::grant_soft_at(const LeaseSeat& seat, std::span<const uint32_t> blocks, uint64_t ready,
                             int64_t ttl_ns) {
  if (Status status = check_serving(); !status.ok()) return status;
  Status status = leases_->grant_soft_at(seat, blocks, ready, ttl_ns, now_ns());
  if (owner_sleep_.asleep()) wake_owner();
  return status;
}

uint32_t Engine::revoke(std::span<const uint32_t> blocks) {
  if (!started()) return 0;
  const Revoked revoked = leases_->revoke(blocks);
  if (!is_enforced(revoked)) enforce(revoked);
  return revoked.num_ended;
}

/// Leases that expired or were displaced before may have slices under way, too, so their ends count as well.
bool Engine::is_enforced(const Revoked& revoked) const {
  return fenced_soft_ends_.load(std::memory_order_acquire) >= revoked.all_ended_so_far;
}

/// A second thread that revokes meanwhile waits for the same slices.
void Engine::enforce(const Revoked& revoked) {
  uint64_t fenced = fenced_soft_ends_.load(std::memory_order_acquire);
  enforce_guards();
  while (fenced < revoked.all_ended_so_far &&
         !fenced_soft_ends_.compare_exchange_weak(fenced, revoked.all_ended_so_far)) {
  }
}

/// On return nothing is sent under a lease that has ended, by transports that compare guards.
void Engine::enforce_guards() {
  for (const TransportState& state : transports_) {
    if (state.transport && state.transport->capabilities().guards) state.transport->fence(0);
  }
}

// Leases that ended: late readers are cut off, then the threads are told that wait for blocks.

/// Returns whether leases have ended.
bool Engine::sweep() {
  std::lock_guard whole(sweep_mutex_);  // take_ended() waits for a sweep under way
  const int64_t now = now_ns();
  Swept swept;
  leases_->sweep(now, swept);
  cut_off_readers(swept);
  if (swept.ended.empty()) return false;
  if (announces_) {
    watch_ended_until_ns_ = now + kWatchEndedNs;
    if (owner_sleep_.asleep()) wake_owner();  // another thread has swept the last lease away
  }
  std::lock_guard lock(mutex_);
  notify(ended_watchers_, swept.ended.front().lease);
  std::move(swept.ended.begin(), swept.ended.end(), std::back_inserter(ended_));
  return true;
}

/// This comes first: a block must not be written again while a late reader could still be sent its bytes. It
/// applies to settled leases too, because another reader may read under one again.
void Engine::cut_off_readers(const Swept& swept) {
  if (!swept.ended.empty()) enforce_guards();
  for (const uint64_t reader : swept.to_fence) {
    for (const TransportState& state : transports_) {
      if (state.transport) state.transport->fence(reader);
    }
  }
}

/// Forgets watchers that are gone. REQUIRES mutex_.
void Engine::notify(Watchers& watchers, uint64_t token) {
  std::erase_if(watchers, [token](const auto& known) {
    const std::shared_ptr<CompletionQueue> queue = known.lock();
    if (queue) queue->push(token);
    return !queue;
  });
}

std::vector<EndedLease> Engine::take_ended() {
  if (started() && !closing_) sweep();
  std::lock_guard lock(mutex_);
  release_fence();  // another thread may have stored the tombstones: blocks are written behind them
  return std::exchange(ended_, {});
}

void Engine::watch_ended(const std::shared_ptr<CompletionQueue>& queue) {
  std::lock_guard lock(mutex_);
  ended_watchers_.push_back(queue);
}

// Devices that come and go.

/// To be called after the reader's lanes were admitted, so that the keys belong to the devices that the lanes
/// use.
Status Engine::add_changed_keys(const TransportState& state, bool takes_keys, Accepted& accepted) {
  std::vector<std::string> keys;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return Status::Unavailable("this worker is closed", {});
    for (const auto& region : state.regions) keys.push_back(region->remote_key());
  }
  if (keys.size() != pool_.size() + 2) return {};  // it exports nothing
  std::vector<std::string> lease_keys(std::make_move_iterator(keys.end() - 2),
                                      std::make_move_iterator(keys.end()));
  keys.resize(pool_.size());
  if (keys == state.access.pool_keys && lease_keys == state.access.lease_keys) return {};
  if (!takes_keys) {
    return Status::Unavailable("a device of this worker's " + state.name +
                                   " was removed and came back with other keys, which a "
                                   "reader of an older release cannot take",
                               "upgrade the reader, or restart this worker");
  }
  accepted.pool_keys = std::move(keys);
  accepted.lease_keys = std::move(lease_keys);
  return {};
}

/// Runs while a device is gone, until nothing holds it any more; the device cannot leave before.
void Engine::check_ports(TransportState& state) {
  std::vector<PortState> ports = state.transport->ports();
  std::erase_if(ports, std::mem_fn(&PortState::left_out));
  if (ports.empty()) return;
  std::vector<std::weak_ptr<Connection>> connections;
  {
    std::lock_guard lock(mutex_);
    if (std::any_of(ports.begin(), ports.end(), std::mem_fn(&PortState::held))) connections = connections_;
    if (ports != state.ports) {
      state.ports = std::move(ports);
      notify(port_watchers_, 0);
    }
  }
  for (const auto& known : connections) {
    if (const auto connection = known.lock()) connection->look_after();
  }
}

std::vector<PortState> Engine::ports() const {
  std::lock_guard lock(mutex_);
  std::vector<PortState> all;
  for (const TransportState& state : transports_)
    all.insert(all.end(), state.ports.begin(), state.ports.end());
  return all;
}

void Engine::watch_ports(const std::shared_ptr<CompletionQueue>& queue) {
  std::lock_guard lock(mutex_);
  port_watchers_.push_back(queue);
}

void Engine::close() {
  if (process_.inherited()) return;
  std::vector<std::weak_ptr<Connection>> connections;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    connections = connections_;
  }
  closing_ = true;
  if (leases_) leases_->abort_all();
  for (const auto& known : connections) {
    if (const auto connection = known.lock()) connection->close();
  }
  for (const auto& thread : progress_) thread->stop();
  if (owner_.joinable()) {
    wake_owner();
    owner_.join();
  }
  std::vector<Late> late;
  {
    const std::lock_guard registering(late_mutex_);  // add_region() may be running
    const std::lock_guard lock(mutex_);
    late = std::exchange(late_, {});
  }
  late.clear();
  for (TransportState& state : transports_) {
    std::vector<std::unique_ptr<MemoryRegion>> revoked;
    {
      std::lock_guard lock(mutex_);
      revoked = std::exchange(state.regions, {});
    }
    revoked.clear();
    if (state.transport) state.transport->close();
  }
  close_descriptors();
}

/// A closed worker holds no descriptors. Its tables stay mapped, because late calls may read them.
void Engine::close_descriptors() {
  {
    const std::lock_guard lock(wake_mutex_);
    wake_fd_.reset();
  }
  epoll_fd_.reset();
  for (const auto& memory : {lease_slots_, peer_words_}) {
    if (memory) memory->close_memfd();
  }
  if (scratch_) scratch_->memory().close_memfd();
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <utility>

#include "base/clock.h"
#include "base/host_identity.h"
#include "base/sys.h"
#include "transports/registry.h"

namespace kvlink {
namespace {

// While leases are active the owner looks at their words this often: settled blocks come back within a
// millisecond.
constexpr int kSweepMs = 1;
constexpr int64_t kSweepNs = kSweepMs * 1'000'000;
constexpr uint64_t kScratchBytes = 1 << 20;  // 16,384 pulls in flight
constexpr char kStarting[] = "cannot start this worker";

/// Whether readers say in the lease slot which connection reads, so that it can be cut off.
bool announces(const Transport& transport) {
  return transport.capabilities().can_fence && !transport.capabilities().guards;
}

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
    Row row{name, nullptr, {}, {name, {}, {}, {}, {}}};
    Result<std::unique_ptr<Transport>> made = make_transport(name, options.transport);
    if (made.ok()) {
      row.transport = std::move(*made);
      row.access.address = row.transport->address();
    } else if (made.status().code() == Code::kTransportUnavailable) {
      row.access.refused = made.status().sentence();
    } else {
      return made.status();
    }
    engine->rows_.push_back(std::move(row));
  }
  return engine;
}

void Engine::refuse(const std::string& transport, const std::string& why) {
  Row* const row = find(transport);
  if (!row) return;
  row->access.refused = why;
  give_up(*row);
}

void Engine::give_up(Row& row) {
  if (row.transport) row.transport->close();
  row.transport.reset();
}

Result<uint32_t> Engine::add_pool_region(const MemoryRange& range) {
  if (leases_) return Status::Config("memory is registered before the worker starts");
  if (range.base == nullptr || range.bytes == 0) return Status::Config("a pool region must not be empty");
  if (!pool_.empty() && pool_.front().device != range.device) {
    return Status::Config("the regions of a pool are all in GPU memory or all in host memory");
  }
  pool_.push_back(range);
  return static_cast<uint32_t>(pool_.size() - 1);
}

Status Engine::lend(Row& row, const MemoryRange& range, Access access, std::string& key) {
  Result<std::unique_ptr<MemoryRegion>> region = row.transport->register_memory(range, access);
  if (!region.ok()) return region.status();
  key = (*region)->remote_key();
  row.regions.push_back(std::move(*region));
  return {};
}

Status Engine::lend_pool(Row& row) {
  row.access.pool_keys.resize(pool_.size());
  Status all;
  for (size_t index = 0; index < pool_.size(); ++index) {  // who cannot lend one still numbers it
    Status lent = lend(row, pool_[index], Access::kRead, row.access.pool_keys[index]);
    if (all.ok()) all = std::move(lent);
  }
  return all;
}

Status Engine::lend_leases(Row& row) {
  row.access.lease_keys.resize(2);
  Status status = lend(row, lease_slots_->range(), Access::kReadWords, row.access.lease_keys[0]);
  return status.ok() ? lend(row, peer_words_->range(), Access::kWriteWords, row.access.lease_keys[1])
                     : status;
}

Status Engine::lend_all(Row& row) {
  const Status lent = lend_pool(row);
  if (!lent.ok() && !lands_unlent(row)) return lent;
  const auto scratch = row.transport->register_memory(scratch_->memory().range(), Access::kLocal);
  if (!scratch.ok()) return scratch.status();
  if (row.staging) {
    const auto staged = row.transport->register_memory(staging_.memory, Access::kLocal);
    if (!staged.ok()) {
      staging_refused_ = row.name + ": " + staged.status().sentence();
      row.staging.reset();
    }
  }
  return lent.ok() ? lend_leases(row) : lent;
}

/// Whether reads of a transport that cannot lend the pool may still land in it.
bool Engine::lands_unlent(const Row& row) const {
  return row.access.bounces || !row.transport->capabilities().needs_registered_target;
}

Status Engine::start() {
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
  auto scratch = HostMemory::allocate(kScratchBytes, false);
  if (!scratch.ok()) return scratch.status();
  lease_slots_ = *slots;
  peer_words_ = *words;
  leases_ = std::make_unique<LeaseTable>(
      std::span(lease_slots_->range().base, LeaseTable::slots_bytes(num_slots)),
      std::span(peer_words_->range().base, LeaseTable::words_bytes(num_slots)), options_.epoch);
  // The local regions are the pool's, then the scratch lines; every transport numbers them so.
  scratch_ = std::make_shared<ScratchPool>(*scratch, static_cast<uint32_t>(pool_.size()));
  return {};
}

Status Engine::register_all() {
  if (Status status = allocate_own(); !status.ok()) return status;
  if (on_device()) open_detours();
  for (Row& row : rows_) {
    if (!row.transport) continue;
    const Status lent = lend_all(row);
    if (lent.ok()) continue;
    if (lent.code() != Code::kTransportUnavailable) return lent;
    row.access.refused = lent.sentence();
    row.access.pool_keys.clear();
    row.access.lease_keys.clear();
    row.regions.clear();
    if (!lands_unlent(row)) give_up(row);
  }
  for (Row& row : rows_) {
    if (!row.transport) continue;
    row.ports = row.transport->ports();
    announces_ |= announces(*row.transport);
  }
  return {};
}

Status Engine::open_descriptors() {
  Result<UniqueFd> epoll = sys::epoll(kStarting), wake = sys::event_fd(kStarting);
  if (!epoll.ok()) return epoll.status();
  if (!wake.ok()) return wake.status();
  epoll_fd_ = std::move(*epoll);
  wake_fd_ = std::move(*wake);
  bool watched = sys::watch(epoll_fd_.get(), wake_fd_.get(), EPOLLIN, UINT64_MAX);
  for (size_t index = 0; watched && index < rows_.size(); ++index) {
    const int fd = rows_[index].transport ? rows_[index].transport->capabilities().serve_fd : -1;
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
  for (const Row& row : rows_) all.push_back(row.access);
  return all;
}

Engine::Row* Engine::find(const std::string& transport) {
  for (Row& row : rows_) {
    if (row.name == transport && row.transport) return &row;
  }
  return nullptr;
}

Status Engine::absent(const std::string& transport) const {
  const auto row =
      std::find_if(rows_.begin(), rows_.end(), [&](const Row& row) { return row.name == transport; });
  const std::string why = row == rows_.end() ? std::string() : row->access.refused;
  return Status::Unavailable("this worker does not use " + transport + (why.empty() ? "" : ": " + why), {});
}

Result<Accepted> Engine::accept(const std::string& transport, const std::vector<std::string>& hellos,
                                bool takes_keys, uint64_t caller) {
  Row* row = find(transport);
  if (!row || closing_) return Status::Unavailable("this worker does not offer " + transport, {});
  if (hellos.empty() || hellos.size() > 64) return Status::Config("a connection has 1 to 64 lanes");
  const uint32_t id = 1 + next_connection_++ % Announcement::kLastConnection;
  Accepted accepted{announces(*row->transport) ? id : 0, {}};
  Status why;
  for (const std::string& hello : hellos) {
    const Result<std::string> reply = row->transport->accept({id, caller}, hello);
    if (!reply.ok()) why = reply.status();
    accepted.replies.push_back(reply.ok() ? *reply : std::string());  // empty: not this lane
  }
  const bool none =
      std::all_of(accepted.replies.begin(), accepted.replies.end(), std::mem_fn(&std::string::empty));
  if (none) return why;
  if (Status status = tell_keys(*row, takes_keys, accepted); !status.ok()) {
    row->transport->fence(id);
    return status;
  }
  return accepted;
}

bool Engine::fence(uint64_t connection_id) {
  bool fenced = false;
  for (Row& row : rows_) fenced |= row.transport && row.transport->fence(connection_id);
  return fenced;
}

Result<std::shared_ptr<Connection>> Engine::open(const std::string& transport, const std::string& address,
                                                 std::shared_ptr<Tally> tally) {
  Row* row = find(transport);
  if (!row || closing_) return absent(transport);
  Result<std::vector<LaneEnd>> lanes = open_lanes_of(*row, address, options_.num_lanes);
  if (!lanes.ok()) return lanes.status();
  const std::shared_ptr<Connection> connection(
      new Connection(std::move(*lanes), row->staging ? row->staging->make_policy() : nullptr,
                     options_.inline_bytes, scratch_, progress_, std::move(tally)),
      DeleteOwn());
  std::lock_guard lock(mutex_);
  if (closed_) return Status::Unavailable("this worker is closed", {});
  std::erase_if(connections_, [](const auto& known) { return known.expired(); });
  connections_.push_back(connection);
  return connection;
}

/// At least one has an endpoint.
Result<std::vector<LaneEnd>> Engine::open_lanes_of(const Row& row, const std::string& address,
                                                   uint32_t num_lanes) {
  Result<Endpoints> endpoints = row.transport->open(address, num_lanes);
  if (!endpoints.ok()) return endpoints.status();
  std::vector<LaneEnd> lanes(endpoints->size());
  Status why;
  bool any = false;
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    std::unique_ptr<Endpoint>& endpoint = (*endpoints)[lane];
    if (endpoint && row.staging) {
      auto wrapped = row.staging->wrap(std::move(endpoint));
      if (!wrapped.ok()) why = wrapped.status();
      if (wrapped.ok()) {
        lanes[lane].staging = wrapped->get();
        endpoint = std::move(*wrapped);
      }
    }
    any |= endpoint != nullptr;
    lanes[lane].endpoint = std::move(endpoint);
  }
  return any ? Result<std::vector<LaneEnd>>(std::move(lanes)) : why;
}

Status Engine::check_serving() const {
  if (!started()) return Status::Config("this worker has not started");
  return closing_ ? Status::Config("this worker is closed") : Status{};
}

Result<std::vector<LeaseSeat>> Engine::grant(uint64_t lease, uint32_t readers, uint64_t ready,
                                             int64_t ttl_ns) {
  if (Status status = check_serving(); !status.ok()) return status;
  auto seats = leases_->grant(lease, readers, ready, ttl_ns, now_ns());
  if (owner_asleep_) wake_owner();
  return seats;
}

Status Engine::grant_at(uint64_t lease, std::span<const LeaseSeat> seats, uint64_t ready, int64_t ttl_ns) {
  if (Status status = check_serving(); !status.ok()) return status;
  Status status = leases_->grant_at(lease, seats, ready, ttl_ns, now_ns());
  if (owner_asleep_) wake_owner();
  return status;
}

void Engine::wake_owner() {
  const std::lock_guard lock(wake_mutex_);
  if (!wake_fd_) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_fd_.get(), &one, sizeof(one));
}

void Engine::serve() {
  int64_t swept = 0;
  while (!closing_) {
    epoll_event events[16];
    owner_asleep_ = true;  // before looking at num_active(), as grant() looks in the other order
    const bool sweeps = leases_->num_active() > 0 || now_ns() < watch_ended_until_ns_;
    const int timeout_ms = sweeps ? kSweepMs : -1;
    owner_asleep_ = timeout_ms < 0;
    const int num_events = epoll_wait(epoll_fd_.get(), events, 16, timeout_ms);
    owner_asleep_ = false;
    for (int index = 0; index < num_events; ++index) {
      const uint64_t row = events[index].data.u64;
      if (row < rows_.size()) {
        rows_[row].transport->serve();
        look_after_ports(rows_[row]);
      } else {
        uint64_t count;
        [[maybe_unused]] const ssize_t got = ::read(wake_fd_.get(), &count, sizeof(count));
      }
    }
    const int64_t now = now_ns();
    if (now - swept < kSweepNs) continue;
    swept = now;
    sweep();
  }
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
  for (Row& row : rows_) {
    std::vector<std::unique_ptr<MemoryRegion>> revoked;
    {
      std::lock_guard lock(mutex_);
      revoked = std::exchange(row.regions, {});
    }
    revoked.clear();
    if (row.transport) row.transport->close();
  }
  close_descriptors();
}

/// Whoever keeps a closed worker keeps none. Its tables stay mapped: late calls may look into them.
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

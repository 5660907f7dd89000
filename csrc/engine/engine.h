// SPDX-License-Identifier: Apache-2.0
// One worker's data plane: its registered memory, lease table, transports and threads.
//
// Threads: progress threads drive the reader's lanes; one owner thread serves transports that need it and
// sweeps the lease table. Every method may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/completion_queue.h"
#include "base/process_mark.h"
#include "device/cuda_placement.h"
#include "engine/connection.h"
#include "lease/lease_table.h"
#include "memory/host_memory.h"
#include "staging/bounce_buffer.h"
#include "staging/device_staging.h"
#include "transport_api/options.h"
#include "transport_api/transport.h"

namespace kvlink {

struct EngineOptions {
  uint64_t epoch = 0;
  std::vector<std::string> transports;  // allowed ones, best first
  TransportOptions transport;
  uint32_t num_lease_slots = 4096;
  uint32_t num_progress_threads = 1;
  int64_t inline_ns = 500'000;
  uint32_t num_lanes = 0;  // 0: each transport's own default
  /// Host memory that may be pinned for a device pool, for transports that do not reach it. 0: none, and such
  /// transports are refused.
  uint64_t bounce_bytes = 64 << 20;
  MakeDeviceCopier make_copier = {};  // none: CUDA's, with TransportOptions::cuda_kernel
};

/// How peers reach this worker through one transport.
struct TransportAccess {
  std::string name, address;
  std::vector<std::string> pool_keys;
  std::vector<std::string> lease_keys;  // of the lease slots and of the peer words
  std::string refused;  // why the pool cannot be exported this way, and the fix; then there are no keys
  std::vector<PortState> left_out = {};  // ports that could not be used
  bool bounces = false;                  // what goes this way to and from the pool is staged in host memory
};

struct Accepted {
  uint32_t connection_id = 0;  // 0: nothing to announce, as no reader of this transport is ever fenced
  std::vector<std::string> replies;
  /// The keys if they differ from access(), because a device was removed and came back. Else empty.
  std::vector<std::string> pool_keys = {};
  std::vector<std::string> lease_keys = {};
};

/// Memory that was registered after start(), as peers see it.
struct LateRegion {
  uint32_t number = 0;  // never given again
  uint64_t bytes = 0;
  std::vector<std::string>
      keys;  // by transport, as access() lists them; empty: it does not export the region
  std::vector<std::string> refused;  // why, and the fix
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> make(const EngineOptions& options);
  ~Engine() { close(); }

  /// Closes a transport before start(). Peers and open() are given `why`.
  void disable(const std::string& transport, const std::string& why);
  /// To be called before start(). Keeps a transport that reaches devices from this pool: its reads are staged
  /// in host memory, and peers are given `why` they cannot read from it.
  void force_bounce(const std::string& transport, const std::string& why);
  /// To be called before start(). Gives transports that reach the pool's device another way into it, through
  /// `options.memory`, which the caller keeps until close().
  void set_staging(const StagingOptions& options) { staging_ = options; }
  /// After start(): why some transports do not have it; empty if all have it or it was not requested.
  const std::string& staging_refused() const { return staging_refused_; }
  /// Exports `range` to peers and makes it a destination of reads. The caller keeps the memory until close().
  Result<uint32_t> add_pool_region(const MemoryRange& range);
  /// To be called before start(), instead of add_pool_region(): all regions come later, and are memory of the
  /// kind and on the device of `like`.
  void expect_regions(const MemoryRange& like) { late_like_ = like; }
  /// Ends registration and starts the threads. A failure closes the engine. REQUIRES at least one pool
  /// region, unless regions are expected.
  Status start();
  std::vector<TransportAccess> access() const;

  /// After start(): exports `range` to peers that connect from now on, and makes it a destination of reads
  /// over connections that are opened from now on. Returns its number. Succeeds if some transport takes it.
  Result<uint32_t> add_region(const MemoryRange& range);
  /// On return no peer may read the region, unless by a transport without revocation (cma, cuda): so the
  /// leases that cover it end before. REQUIRES that no read of this worker lands there any more.
  void drop_region(uint32_t number);
  std::vector<LateRegion> late_regions() const;
  /// Returns the number that the next one gets.
  uint32_t num_late_regions() const;
  /// Returns the index of a region's segments in reads over this transport.
  uint32_t segment_region(const std::string& transport, uint32_t number) const;

  /// `caller` is ReaderId::caller. `takes_keys`: the reader will use the keys of the answer. A reader that
  /// cannot take new keys is refused after keys changed.
  Result<Accepted> accept(const std::string& transport, const std::vector<std::string>& hellos,
                          bool takes_keys = true, uint64_t caller = 0);
  Result<std::shared_ptr<Connection>> open(
      const std::string& transport, const std::string& address,
      std::shared_ptr<PathStats> path_stats = std::make_shared<PathStats>(), const WorkerRun& owner = {});

  /// Where pulls tell what they ask of the control thread. To be called before open().
  void set_control(std::shared_ptr<CompletionQueue> control) { control_ = std::move(control); }
  const std::shared_ptr<CompletionQueue>& control() const { return control_; }

  const ProcessMark& process() const { return process_; }
  bool started() const { return leases_ != nullptr; }
  /// REQUIRES started().
  LeaseTable& leases() {
    KVLINK_CHECK(started());
    return *leases_;
  }
  /// Grants through the engine, so that the owner thread sweeps while leases are active.
  Result<std::vector<LeaseSeat>> grant(uint64_t lease, uint32_t readers, uint64_t ready, int64_t ttl_ns);
  Status grant_at(uint64_t lease, std::span<const LeaseSeat> seats, uint64_t ready, int64_t ttl_ns);
  Result<LeaseSeat> grant_soft(std::span<const uint32_t> blocks, uint64_t ready, int64_t ttl_ns);
  Status grant_soft_at(const LeaseSeat& seat, std::span<const uint32_t> blocks, uint64_t ready,
                       int64_t ttl_ns);
  /// Whether these calls ask the driver what is behind the pool.
  bool asks_driver() const { return placement_ != nullptr; }
  /// Returns false if there is no such lease, or it has ended.
  bool set_ready(uint64_t lease, uint64_t ready);
  /// Ends the soft leases that cover one of the blocks, and returns their number. On return the blocks may be
  /// written: what is read from then on does not validate, and transports with guards send none of it.
  uint32_t revoke(std::span<const uint32_t> blocks);
  /// The second half of revoke(), after the first: whether there is nothing to wait for, and the wait until
  /// nothing is sent under what LeaseTable::revoke() has ended.
  bool is_enforced(const Revoked& revoked) const;
  void enforce(const Revoked& revoked);
  /// Sweeps, then returns the leases that ended since the last call. Their blocks are free and their late
  /// readers fenced.
  std::vector<EndedLease> take_ended();
  void watch_ended(const std::shared_ptr<CompletionQueue>& queue);
  /// Returns the ports of all transports. Watchers are notified of each change.
  std::vector<PortState> ports() const;
  void watch_ports(const std::shared_ptr<CompletionQueue>& queue);

  /// Idempotent. Connections break, threads join, keys are revoked; on return nothing accesses registered
  /// memory. Does nothing in a forked child.
  void close();

 private:
  struct TransportState {
    std::string name;
    std::unique_ptr<Transport> transport;
    std::vector<std::unique_ptr<MemoryRegion>> regions;
    TransportAccess access;
    std::string bounce_why = {};  // it reaches devices and yet not the pool
    std::optional<DeviceStaging> staging = {};
    std::vector<PortState> ports = {};
    uint32_t first_late = 0;  // regions were registered before start() ended; each counts
  };
  struct Late {
    uint32_t number;
    uint64_t bytes;
    std::vector<std::unique_ptr<MemoryRegion>> regions;  // by transport
    std::vector<std::string> refused;
  };

  using Watchers = std::vector<std::weak_ptr<CompletionQueue>>;

  explicit Engine(const EngineOptions& options) : options_(options) {}
  Status register_range(TransportState& state, const MemoryRange& range, Access access, std::string& key);
  Status register_pool(TransportState& state);
  Status register_transport(TransportState& state);
  Status register_leases(TransportState& state);
  void wrap_for_device_pool();
  Status wrap_in_bounce(TransportState& state, std::shared_ptr<Bounce>& shared);
  void add_staging(TransportState& state, std::shared_ptr<StagingBuffer>& shared);
  static Result<std::vector<LaneEnd>> open_lane_ends(const TransportState& state, const std::string& address,
                                                     uint32_t num_lanes, const WorkerRun& owner);
  Result<std::shared_ptr<DeviceCopier>> make_copier(const std::byte* memory) const;
  /// Returns a range of the kind that all regions are of, or an empty one.
  const MemoryRange& sample() const { return pool_.empty() ? late_like_ : pool_.front(); }
  bool on_device() const { return sample().device; }
  Status check_range(const MemoryRange& range) const;
  bool reads_without_export(const TransportState& state) const;
  static void close_transport(TransportState& state);
  TransportState* find(const std::string& transport);
  Status add_changed_keys(const TransportState& state, bool takes_keys, Accepted& accepted);
  void check_ports(TransportState& state);
  void refresh(TransportState& state) const;
  Status check_serving();
  Status check_placement();
  void stop_offering(const char* why);
  Status absent(const std::string& transport) const;
  Status allocate_own();
  Status register_all();
  Status open_descriptors();
  Status start_threads();
  void serve();
  bool sweep();
  void cut_off_readers(const Swept& swept);
  void enforce_guards();
  static void notify(Watchers& watchers, uint64_t token);
  void wake_owner();
  void close_descriptors();

  const ProcessMark process_;
  const EngineOptions options_;
  std::vector<TransportState> transports_;
  std::vector<MemoryRange> pool_;
  MemoryRange late_like_;
  StagingOptions staging_;
  std::string staging_refused_;
  std::shared_ptr<HostMemory> lease_slots_, peer_words_;
  std::shared_ptr<ScratchPool> scratch_;
  std::shared_ptr<const cuda::Placement> placement_;  // null: nothing keeps the pool's memory but its address
  std::unique_ptr<LeaseTable> leases_;
  std::vector<std::shared_ptr<ProgressThread>> progress_;
  std::shared_ptr<CompletionQueue> control_;

  bool announces_ = false;  // readers of some transport do; constant from start() on
  std::atomic<uint32_t> next_connection_{0};
  std::atomic<int64_t> watch_ended_until_ns_{0};
  std::atomic<uint64_t> fenced_soft_ends_{0};  // ends of soft leases after which guards were enforced
  std::atomic<bool> closing_{false};
  std::atomic<bool> offers_no_more_{false};
  SweeperSleep owner_sleep_;
  std::mutex wake_mutex_;  // guards wake_fd_
  UniqueFd wake_fd_, epoll_fd_;
  std::thread owner_;

  std::mutex late_mutex_;     // one registers at a time, so that every transport numbers alike; as the next
  std::mutex sweep_mutex_;    // taken before mutex_
  mutable std::mutex mutex_;  // guards what follows, and each state's regions and ports from start() on
  std::vector<std::weak_ptr<Connection>> connections_;
  std::vector<EndedLease> ended_;
  std::vector<Late> late_;
  uint32_t num_late_ = 0;  // so far
  Watchers ended_watchers_, port_watchers_;
  std::string why_no_more_;
  bool closed_ = false;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The reader's side of one peer over one transport. Its lanes share the work of every pull.
#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/completion_queue.h"
#include "base/patience.h"
#include "base/process_mark.h"
#include "base/sync.h"
#include "engine/lane.h"
#include "engine/progress_thread.h"
#include "engine/transfer.h"
#include "memory/scratch_pool.h"

namespace kvlink {

class Connection {
 public:
  /// A pull without any time left gets this: several loopback round trips, far below the shortest step of an
  /// inference engine.
  static constexpr int64_t kLeastNs = 300'000;

  /// Pulls that should end within `inline_ns` run on the calling thread for as long, and then pass to the
  /// progress thread; if posts are launches, all are posted there. Lanes without an endpoint could not be
  /// opened and are missing. `policy` decides which reads are staged; null: none. Every pull is added to
  /// `path_stats` when it ends.
  Connection(std::vector<LaneEnd> lanes, std::shared_ptr<StagingPolicy> policy, int64_t inline_ns,
             std::shared_ptr<ScratchPool> scratch, std::vector<std::shared_ptr<ProgressThread>> threads,
             std::shared_ptr<PathStats> path_stats, std::shared_ptr<CompletionQueue> control = nullptr);
  ~Connection() { close(); }

  const ProcessMark& process() const { return process_; }
  /// Sets what says before each pull whether it may land in this worker's pool. To be called before the
  /// first.
  void check_pulls(std::function<Status()> check) { check_pull_ = std::move(check); }
  /// Returns one hello per lane, for Transport::accept at the owner.
  std::vector<std::string> hellos() const;
  /// Connects every lane, imports the owner's regions, and reads the header of its lease table. Success means
  /// that this path works and leads to the right process. Lanes that fail are left out as long as one
  /// remains. Returns the region index of each pool key.
  Result<std::vector<uint32_t>> establish(uint32_t connection_id, const std::vector<std::string>& replies,
                                          const std::vector<std::string>& pool_keys,
                                          const std::vector<std::string>& lease_keys, uint64_t epoch,
                                          int64_t timeout_ns);

  /// Plans a pull that does not stream, for PullRequest::prepared of later pulls over this connection.
  Result<std::shared_ptr<const Plan>> prepare(const PullRequest& request) const {
    return prepare_plan(request, *driver_);
  }
  /// Blocks no longer than a small inline pull takes. Returns null if the connection is broken.
  std::shared_ptr<Transfer> pull(const PullRequest& request);
  /// Where pulls over this connection tell what they ask of the control thread; may be null.
  const std::shared_ptr<CompletionQueue>& control() const { return control_; }
  /// See Lane::settle. `token` is pushed to control() when take_lost() has something.
  bool settle(uint32_t slot, uint64_t value);
  uint64_t token() const { return reinterpret_cast<uintptr_t>(this); }
  /// Returns the settles that were queued and have died with their lane, since the last call.
  std::vector<LaneWord> take_lost();
  /// Returns the nanoseconds of one bare read on the first lane, from post to completion. For benchmarks.
  Result<int64_t> time_read(const ReadOp& op, const Segment& segment);

  /// Returns whether a pull of this size ends within microseconds on the calling thread.
  bool runs_at_once(uint64_t bytes) const { return copies_ && inline_ns_ > 0 && bytes <= kAtOnceBytes; }
  /// See PathStats::predict_us.
  double predict_us(uint64_t ops, uint64_t bytes) const { return path_stats_->predict_us(ops, bytes); }
  /// Returns whether a lane broke, so that the next pull needs another connection.
  bool broken() const;
  /// Returns how many lanes should be there and did not connect. Constant after establish().
  size_t num_missing() const { return missing_; }
  /// Returns whether lanes answered small reads only. Constant after establish().
  bool lost_large() const { return lost_large_; }
  bool idle() const;
  /// Lets idle lanes find out that they broke, and wakes the drivers of the others. Never waits for a lane.
  void look_after();
  /// Returns the number of transfers queued or under way. One that uses several lanes counts once per lane.
  uint32_t pending() const;
  std::string why_broken() const;
  /// Returns Traits::path of each lane, and whether its rail is set aside.
  std::vector<std::string> paths() const;
  /// Idempotent. Transfers in flight fail, and on return no byte of theirs lands any more. An establish()
  /// that waits for the owner ends at once. Their failures say `why`.
  void close(const std::string& why = "the connection was closed");

 private:
  struct Probe;  // of one lane while connecting

  static constexpr uint64_t kAtOnceBytes = 128 << 10;  // copying them takes about 10 us

  std::shared_ptr<const TransferDriver> make_driver() const;
  bool ends_soon(const Transfer& transfer) const;
  void find_rails();
  uint64_t choose_lanes(Transfer& transfer, bool may_measure) const;
  Lane& lane_at(uint64_t lanes) const { return *lanes_[static_cast<size_t>(std::countr_zero(lanes))]; }
  void submit(const std::shared_ptr<Transfer>& transfer, uint64_t lanes) const;
  Status connect(Probe& probe, const std::string& reply, const std::vector<std::string>& pool_keys,
                 const std::vector<std::string>& lease_keys, const Patience& patience);
  static const Probe* refused_before(const std::vector<Probe>& probes, Lane& lane);
  Status why_missing(const Probe& probe);
  void await(std::vector<Probe>& probes, uint64_t epoch, const Patience& patience) const;
  ProgressThread& thread_of(size_t lane) { return *threads_[lane % threads_.size()]; }

  const ProcessMark process_;
  const int64_t inline_ns_;
  uint64_t stripe_bytes_ = 0;  // pulls from this size on use every lane
  size_t missing_ = 0;
  bool lost_large_ = false;
  bool copies_ = false, nic_driven_ = false, launches_ = false;
  std::shared_ptr<StagingPolicy> policy_;
  std::shared_ptr<ScratchPool> scratch_;
  std::function<Status()> check_pull_;  // may be empty
  std::shared_ptr<PathStats> path_stats_;
  std::shared_ptr<CompletionQueue> control_;
  std::vector<std::shared_ptr<ProgressThread>> threads_;
  std::shared_ptr<const TransferDriver> driver_;
  std::vector<std::shared_ptr<Lane>> lanes_;
  std::shared_ptr<const std::vector<Rail>> rails_;  // null: there is only one, or its lanes have none
  Atomic<bool> closed_{
      false};         // set before the mutex is taken: it ends the waits of establish(), which holds it
  Mutex connecting_;  // an endpoint serves one thread at a time: close() waits for establish()
  bool established_ = false;  // guarded by it
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// A worker of the program: its memory, its groups, and what happens to its offers and pulls.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/completion_queue.h"
#include "capi/table.h"
#include "channel/connect.h"
#include "codec/card.h"
#include "codec/connect.h"
#include "engine/engine.h"

namespace kvlink::capi {

class Region final : public Object {
 public:
  static constexpr Kind kKind = Kind::kRegion;
  Region(MemoryRange range, std::shared_ptr<HostMemory> memory)
      : Object(kKind), range_(std::move(range)), memory_(std::move(memory)) {}

  const MemoryRange& range() const { return range_; }
  Outcome close() override;
  /// Returns false if the region was closed.
  bool begin_use();
  void end_use();

 private:
  const MemoryRange range_;
  const std::shared_ptr<HostMemory> memory_;  // null: the program's own
  std::mutex mutex_;
  uint32_t num_users_ = 0;  // workers that are not closed
  bool closed_ = false;
};

/// The options of kvl_worker_open.
struct WorkerSetup {
  std::string worker_id, agent;
  std::vector<std::string> ticket_keys;
  EngineOptions engine;
  bool listens = false;  // for readers that connect by the native channel
  uint16_t channel_port = 0;
};

class Worker final : public Object {
 public:
  static constexpr Kind kKind = Kind::kWorker;
  static Result<std::shared_ptr<Worker>> open(WorkerSetup setup);
  ~Worker() override { static_cast<void>(close()); }

  Outcome add_region(const std::shared_ptr<Region>& region, uint32_t& index);
  Outcome add_group(CardLayout layout);
  Outcome start();
  Result<std::string> card() const;
  /// Answers a reader. An answer that does not fit is kept for the next call of the same caller.
  Outcome answer_into(uint64_t caller, std::string_view message, const Space& space);
  /// Returns what connects by the native channel, until the worker is closed.
  Result<channel::Connector*> connector();
  Outcome count(kvl_worker_stats& stats);
  Outcome close() override;
  std::string explain() const override;

  bool started() const { return started_.load(std::memory_order_acquire); }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  Engine& engine() { return *engine_; }
  // Constant once it has started.
  const std::string& id() const { return setup_.worker_id; }
  uint64_t epoch() const { return setup_.engine.epoch; }
  const WorkerSetup& setup() const { return setup_; }
  const std::vector<CardLayout>& groups() const { return groups_; }
  const std::vector<MemoryRange>& ranges() const { return ranges_; }
  uint64_t model() const { return model_; }

  // Events.
  const std::shared_ptr<CompletionQueue>& queue() const { return queue_; }
  /// The offer's end has an event from now on, until forget_offer().
  void follow_offer(kvl_handle offer, uint64_t user);
  void forget_offer(kvl_handle offer);
  std::vector<kvl_event> take_events(size_t most);

 private:
  Worker(WorkerSetup setup, std::unique_ptr<Engine> engine, std::shared_ptr<CompletionQueue> queue);
  Result<Accepted> accept(const ConnectRequest& request, uint64_t caller);
  Status open_channel();
  Status listen();
  void collect_ended();
  void add_event(uint32_t kind, kvl_handle handle, uint64_t user, int32_t code);

  const WorkerSetup setup_;
  const std::string incarnation_;
  const std::unique_ptr<Engine> engine_;
  const std::shared_ptr<CompletionQueue> queue_;
  std::atomic<bool> started_{false}, closed_{false};

  std::mutex mutex_;  // guards what follows; some is constant once it has started
  std::vector<std::shared_ptr<Region>> regions_;
  std::vector<MemoryRange> ranges_;
  std::vector<CardLayout> groups_;
  uint64_t model_ = 0;
  std::shared_ptr<channel::Channel> channel_;  // null until it is needed
  std::unique_ptr<channel::Connector> connector_;
  std::optional<CardChannel> listens_at_;

  struct Answer {
    uint64_t caller;
    std::string message, reply;
  };
  std::mutex answers_mutex_;
  std::deque<Answer> answers_;  // that did not fit

  std::mutex events_mutex_;
  std::unordered_map<kvl_handle, uint64_t> offers_;
  std::deque<kvl_event> events_;
  uint32_t num_offered_ = 0;
};

}  // namespace kvlink::capi

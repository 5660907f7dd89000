// SPDX-License-Identifier: Apache-2.0
// An owner that a worker reads from. It connects step by step, by messages that the program carries, or by
// the owner's native channel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "capi/worker.h"
#include "channel/connect.h"
#include "engine/connection.h"
#include "plan/planner.h"

namespace kvlink::capi {

class Peer final : public Object {
 public:
  static constexpr Kind kKind = Kind::kPeer;
  static Result<std::shared_ptr<Peer>> open(std::shared_ptr<Worker> worker, std::string_view sealed_card,
                                            int64_t timeout_ns);
  Peer(std::shared_ptr<Worker> worker, WorkerCard card, int64_t timeout_ns)
      : Object(kKind, std::move(worker)), card_(std::move(card)), timeout_ns_(timeout_ns) {}
  ~Peer() override { static_cast<void>(close()); }

  /// See kvl_peer_step. One call at a time; others wait.
  Outcome step(std::string_view answer, const Space& space);
  /// See kvl_peer_connect. The event is of `handle`, which is that of the peer.
  static Outcome connect(const std::shared_ptr<Peer>& peer, kvl_handle handle, uint64_t user);
  /// See kvl_peer_wait. Negative: as long as it takes.
  Outcome wait(int64_t timeout_ns);
  Outcome close() override;
  std::string explain() const override;

  bool ready() const { return ready_.load(std::memory_order_acquire); }
  const WorkerCard& card() const { return card_; }
  /// Returns why it is not connected; kOk while that is open.
  Status failed() const;
  uint64_t user() const;
  // REQUIRES ready().
  const std::shared_ptr<Connection>& connection() const { return path_.connection; }
  const std::vector<std::shared_ptr<const Planner>>& planners() const { return planners_; }

 private:
  enum class Way : uint8_t { kNone, kSteps, kChannel };

  void advance(std::string_view answer);
  void take(Result<channel::Path> outcome);
  Status make_planners(const std::vector<uint32_t>& regions);

  const WorkerCard card_;
  const int64_t timeout_ns_;

  std::mutex stepping_;  // guards what follows
  std::optional<channel::PathSearch> search_;
  std::string message_;  // that the program has not taken

  mutable std::mutex mutex_;  // guards what follows, and is never held while connecting
  std::condition_variable changed_;
  Way way_ = Way::kNone;
  channel::Path path_;  // constant from ready_ on
  std::shared_ptr<channel::Attempt> attempt_;
  uint64_t user_ = 0;
  Status failed_;
  bool closed_ = false;

  std::vector<std::shared_ptr<const Planner>> planners_;  // constant from ready_ on
  std::atomic<bool> ready_{false};
};

}  // namespace kvlink::capi

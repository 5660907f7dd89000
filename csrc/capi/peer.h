// SPDX-License-Identifier: Apache-2.0
// An owner that a worker reads from: it connects step by step, by messages that the program carries.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "capi/worker.h"
#include "codec/connect.h"
#include "engine/connection.h"
#include "plan/planner.h"

namespace kvlink::capi {

class Peer final : public Object {
 public:
  static constexpr Kind kKind = Kind::kPeer;
  static Result<std::shared_ptr<Peer>> open(std::shared_ptr<Worker> worker, std::string_view sealed_card,
                                            int64_t timeout_ns);
  Peer(std::shared_ptr<Worker> worker, WorkerCard card, int64_t timeout_ns);
  ~Peer() override { static_cast<void>(close()); }

  /// See kvl_peer_step. One call at a time; others wait.
  Outcome step(std::string_view answer, const Space& space);
  Outcome close() override;
  std::string explain() const override;

  bool ready() const { return ready_.load(std::memory_order_acquire); }
  const WorkerCard& card() const { return card_; }
  // REQUIRES ready().
  const std::shared_ptr<Connection>& connection() const { return connection_; }
  const std::vector<std::shared_ptr<const Planner>>& planners() const { return planners_; }

 private:
  struct Refusal {
    std::string transport;
    Status why;
  };

  void find_candidates();
  Status take_answer(std::string_view answer);
  Status establish(const ConnectReply& reply);
  Status make_planners(const std::vector<uint32_t>& regions);
  bool ask_next();
  Status why_none() const;

  const WorkerCard card_;
  const int64_t timeout_ns_;

  std::mutex stepping_;                           // guards what follows
  std::vector<const CardTransport*> candidates_;  // best first
  size_t next_ = 0;
  std::string transport_;  // that of the answer to come; empty: none is to come
  std::string message_;    // that the program has not taken
  Status failed_;

  mutable std::mutex mutex_;  // guards what follows, and is never held while connecting
  std::shared_ptr<Connection> connection_;
  std::vector<Refusal> refusals_;
  bool closed_ = false;

  std::vector<std::shared_ptr<const Planner>> planners_;
  std::atomic<bool> ready_{false};  // from then on what pulls need is constant
};

}  // namespace kvlink::capi

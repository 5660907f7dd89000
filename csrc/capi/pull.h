// SPDX-License-Identifier: Apache-2.0
// Pulls of the program, and plans for several of them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "capi/peer.h"
#include "codec/ticket.h"
#include "engine/pull.h"

namespace kvlink::capi {

class PlanObject final : public Object {
 public:
  static constexpr Kind kKind = Kind::kPlan;
  PlanObject(std::shared_ptr<Peer> peer, std::shared_ptr<const Plan> plan, std::vector<uint32_t> owner_blocks)
      : Object(kKind, peer->worker()),
        peer_(std::move(peer)),
        plan_(std::move(plan)),
        owner_blocks_(std::move(owner_blocks)) {}

  const std::shared_ptr<Peer>& peer() const { return peer_; }
  const std::shared_ptr<const Plan>& plan() const { return plan_; }
  const std::vector<uint32_t>& owner_blocks() const { return owner_blocks_; }

 private:
  const std::shared_ptr<Peer> peer_;
  const std::shared_ptr<const Plan> plan_;
  const std::vector<uint32_t> owner_blocks_;
};

class PullObject final : public Object {
 public:
  static constexpr Kind kKind = Kind::kPull;
  PullObject(std::shared_ptr<Peer> peer, std::shared_ptr<Pull> pull, uint64_t user)
      : Object(kKind, peer->worker()), peer_(std::move(peer)), pull_(std::move(pull)), user_(user) {}

  Pull& pull() { return *pull_; }
  uint64_t user() const { return user_; }
  /// KVL_PENDING, or how the pull ended.
  Outcome outcome() const { return outcome_of(*pull_); }
  static Outcome outcome_of(const Pull& pull);
  Outcome count(kvl_pull_stats& stats) const;
  std::string explain() const override;

 private:
  const std::shared_ptr<Peer> peer_;
  const std::shared_ptr<Pull> pull_;
  const uint64_t user_;
};

/// A request of the program to read from a peer under a ticket.
class PullTerms {
 public:
  PullTerms();
  /// Finds and checks what `options` name. The blocks are borrowed from them.
  Outcome take(const kvl_pull_options* options);
  /// Starts the pull.
  Outcome start(std::shared_ptr<Pull>& pull);
  Outcome prepare(std::shared_ptr<PlanObject>& plan);
  Outcome release();

  const kvl_pull_options& options() const { return options_; }
  const std::shared_ptr<Peer>& peer() const { return peer_; }

 private:
  Outcome check_ticket() const;
  Outcome take_seat();
  Outcome take_reads();
  Outcome take_group(size_t index, std::span<const uint32_t> theirs, std::span<const uint32_t> ours);
  StreamUnit stream_unit() const;

  kvl_pull_options options_;
  std::shared_ptr<Peer> peer_;
  std::shared_ptr<PlanObject> plan_;
  Ticket& ticket_;  // of this thread, so that a pull need not allocate one
  std::vector<GroupRead> more_;
  PullRequest request_;
};

}  // namespace kvlink::capi

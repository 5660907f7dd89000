// SPDX-License-Identifier: Apache-2.0
#include "engine/stream_planner.h"

#include <algorithm>

#include "base/check.h"

namespace kvlink {

Status StreamPlanner::start(const PullRequest& request) {
  KVLINK_CHECK(request.stream != StreamUnit::kNone);
  unit_ = request.stream;
  if (request.batch_units > 0) batch_units_ = request.batch_units;
  Range layers = request.layers;
  layers.end = std::min(layers.end, request.planner->num_layers());
  if (unit_ == StreamUnit::kLayers) total_units_ = layers.end;
  if (unit_ == StreamUnit::kBlocks) total_units_ = request.owner_blocks.size();
  if (unit_ == StreamUnit::kTokens) total_units_ = request.num_tokens;
  if (!request.more.empty() && unit_ != StreamUnit::kTokens) {
    return Status::Config("a pull of several cache groups follows what is ready by tokens only");
  }
  groups_.reserve(1 + request.more.size());
  follow(request);
  groups_[0].read.layers = layers;
  for (const GroupRead& group : request.more) follow(group);
  if (request.more.empty()) {
    return request.planner->check(request.owner_blocks, request.reader_blocks, {request.tokens, layers});
  }
  Plan whole;
  return plan_groups(request, request.more, whole);
}

void StreamPlanner::follow(const GroupRead& read) {
  Followed& group = groups_.emplace_back(Followed{read,
                                                  {read.owner_blocks.begin(), read.owner_blocks.end()},
                                                  {read.reader_blocks.begin(), read.reader_blocks.end()}});
  group.read.owner_blocks = group.owner_blocks;
  group.read.reader_blocks = group.reader_blocks;
}

Status StreamPlanner::plan(uint64_t ready, bool fold, Plan& into) {
  KVLINK_CHECK(any_beyond(ready));
  ready = std::min(ready, total_units_);
  if (ready - planned_units_ > batch_units_) ready = planned_units_ + batch_units_;
  into.clear();
  for (const Followed& group : groups_) {
    PlanScope scope = newly_ready(group.read, ready);
    if (scope.tokens.begin >= scope.tokens.end || scope.layers.begin >= scope.layers.end) continue;
    scope.fold = fold && groups_.size() == 1;
    const Status planned =
        groups_.size() > 1 ? plan_behind(group.read, scope, into)
                           : group.read.planner->plan(group.owner_blocks, group.reader_blocks, scope, into);
    if (!planned.ok()) return planned;
  }
  planned_units_ = ready;
  return {};
}

/// Returns the part of a group that is among the units between the last plan and `ready`.
PlanScope StreamPlanner::newly_ready(const GroupRead& read, uint64_t ready) const {
  PlanScope scope{read.tokens, read.layers};
  if (unit_ == StreamUnit::kLayers) {
    scope.layers = {static_cast<uint32_t>(std::max<uint64_t>(planned_units_, read.layers.begin)),
                    static_cast<uint32_t>(ready)};
    return scope;
  }
  if (read.at_end) {
    if (ready < total_units_) scope.tokens.end = scope.tokens.begin;
    return scope;
  }
  const auto tokens_in = [&](uint64_t units) {
    return unit_ == StreamUnit::kBlocks ? read.planner->tokens_in(units) : units;
  };
  scope.tokens.begin = static_cast<uint32_t>(
      std::max<uint64_t>(read.tokens.begin, planned_units_ ? tokens_in(planned_units_) : 0));
  scope.tokens.end = static_cast<uint32_t>(
      ready == total_units_ ? read.tokens.end : std::min<uint64_t>(read.tokens.end, tokens_in(ready)));
  return scope;
}

}  // namespace kvlink

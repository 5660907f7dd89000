// SPDX-License-Identifier: Apache-2.0
#include "plan/groups.h"

#include <algorithm>

#include "base/check.h"

namespace kvlink {

namespace {

/// REQUIRES that no group alone writes a byte twice.
Status check_writes_once(const Plan& plan) {
  std::vector<Segment> writes = plan.segments;
  std::sort(writes.begin(), writes.end(),
            [](const Segment& a, const Segment& b) { return a.local < b.local; });
  for (size_t i = 1; i < writes.size(); ++i) {
    if (writes[i - 1].local + writes[i - 1].bytes > writes[i].local) {
      return Status::Config(
          "reader_blocks: two cache groups name blocks in the same memory; give each group blocks of its "
          "own");
    }
  }
  return {};
}

}  // namespace

Status plan_groups(const GroupRead& first, std::span<const GroupRead> more, Plan& into) {
  into.clear();
  Status planned = plan_behind(first, {first.tokens, first.layers}, into);
  for (size_t i = 0; i < more.size() && planned.ok(); ++i) {
    planned = plan_behind(more[i], {more[i].tokens, more[i].layers}, into);
  }
  if (planned.ok()) planned = check_writes_once(into);
  if (!planned.ok()) into.clear();
  return planned;
}

Status plan_behind(const GroupRead& group, const PlanScope& scope, Plan& into) {
  KVLINK_CHECK(into.repeats.empty());
  Plan more;
  if (Status refused = group.planner->plan(group.owner_blocks, group.reader_blocks, scope, more);
      !refused.ok()) {
    into.clear();
    return refused;
  }
  const uint32_t first = static_cast<uint32_t>(into.segments.size());
  for (ReadOp& op : more.ops) op.first_segment += first;
  into.ops.insert(into.ops.end(), more.ops.begin(), more.ops.end());
  into.segments.insert(into.segments.end(), more.segments.begin(), more.segments.end());
  into.bytes += more.bytes;
  return {};
}

}  // namespace kvlink

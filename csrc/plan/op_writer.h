// SPDX-License-Identifier: Apache-2.0
// Turns pieces into ReadOps and joins those that touch. Internal to plan/planner.cc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "plan/planner.h"

namespace kvlink {

/// Fills a plan from its start. The vectors are longer than what is filled until finish().
class Writer {
 public:
  /// Allocates memory for `expected` pieces at once.
  Writer(Plan& into, size_t expected) : ops_(into.ops), segments_(into.segments) {
    ops_.reserve(expected);
    segments_.reserve(expected);
  }

  /// Offsets count from the plane's start.
  void put(const PlanePair& plane, uint64_t remote, uint64_t local, uint64_t bytes) {
    for (; bytes > Planner::kMaxOpBytes; bytes -= Planner::kMaxOpBytes) {
      put_one(plane, plane.remote + remote, plane.local + local, Planner::kMaxOpBytes);
      remote += Planner::kMaxOpBytes;
      local += Planner::kMaxOpBytes;
    }
    put_one(plane, plane.remote + remote, plane.local + local, static_cast<uint32_t>(bytes));
  }

  struct Mark {
    size_t ops, segments;
  };
  /// Marks the current end: nothing is joined to what is before it any more, so it may be stamped.
  Mark seal() {
    sealed_ops_ = num_ops_;
    return {num_ops_, num_segments_};
  }

  void reserve(Mark more) {
    if (num_ops_ + more.ops > ops_.size()) grow(ops_, num_ops_ + more.ops);
    if (num_segments_ + more.segments > segments_.size()) grow(segments_, num_segments_ + more.segments);
  }

  /// Repeats everything before `end`, moved from one plane's start to another's. REQUIRES a sealed `end`, and
  /// that all before it reads one remote region into one local region.
  void stamp(Mark end, const PlanePair& from, const PlanePair& to) {
    KVLINK_CHECK(end.ops == sealed_ops_ && end.segments <= num_segments_);
    reserve(end);
    const uint64_t shift = to.remote - from.remote;
    const uint32_t first = static_cast<uint32_t>(num_segments_);
    ReadOp* op = ops_.data();
    for (ReadOp *out = op + num_ops_, *last = op + end.ops; op < last; ++op, ++out) {
      *out = {op->offset + shift, op->bytes, to.remote_region, op->first_segment + first, op->num_segments};
    }
    Segment* segment = segments_.data();
    for (Segment *out = segment + num_segments_, *last = segment + end.segments; segment < last;
         ++segment, ++out) {
      *out = {to.local + (segment->local - from.local), segment->bytes, to.local_region};
    }
    num_ops_ += end.ops;
    num_segments_ += end.segments;
  }

  void finish() {
    ops_.resize(num_ops_);
    segments_.resize(num_segments_);
  }

 private:
  void put_one(const PlanePair& plane, uint64_t offset, std::byte* to, uint32_t bytes) {
    if (num_ops_ > sealed_ops_) {
      ReadOp& op = ops_[num_ops_ - 1];
      if (op.offset + op.bytes == offset && op.region == plane.remote_region &&
          bytes <= Planner::kMaxOpBytes - op.bytes && scatter(op, {to, bytes, plane.local_region})) {
        op.bytes += bytes;
        return;
      }
    }
    if (num_ops_ == ops_.size()) grow(ops_, num_ops_ + 1);
    ops_[num_ops_++] = {offset, bytes, plane.remote_region, static_cast<uint32_t>(num_segments_), 1};
    append({to, bytes, plane.local_region});
  }

  /// Returns false if the op has no room for another segment.
  bool scatter(ReadOp& op, const Segment& more) {
    Segment& last = segments_[num_segments_ - 1];
    if (last.local + last.bytes == more.local && last.region == more.region) {
      last.bytes += more.bytes;
      return true;
    }
    if (op.num_segments == Planner::kMaxOpSegments) return false;
    ++op.num_segments;
    append(more);
    return true;
  }

  void append(const Segment& segment) {
    if (num_segments_ == segments_.size()) grow(segments_, num_segments_ + 1);
    segments_[num_segments_++] = segment;
  }

  template <typename T>
  [[gnu::noinline]] static void grow(std::vector<T>& vector, size_t needed) {
    vector.resize(std::max({needed, vector.size() * 3 / 2, size_t{64}}));
  }

  std::vector<ReadOp>& ops_;
  std::vector<Segment>& segments_;
  size_t num_ops_ = 0, num_segments_ = 0, sealed_ops_ = 0;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "transports/fabric/post_queue.h"

#include <algorithm>

namespace kvlink::fabric {

PostQueue::PostQueue(Wire& wire, const OpLimits& limits)
    : wire_(wire), limits_(limits), owner_(limits.ops, kNone) {
  for (uint32_t op = limits.ops; op > 0; --op) free_.push_back(op - 1);
}

void PostQueue::write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) {
  posts_.push_back({.token = token, .region = region, .offset = offset, .value = value});
}

Wire::Taken PostQueue::start_read(Post& post, uint32_t op, const std::vector<RemoteRegion>& remotes) {
  const ReadOp& from = post.chunk.ops[post.at.op];
  ChunkCursor at = post.at;
  uint64_t bytes = 0;
  pieces_.clear();
  walk(post.chunk, at, limits_.bytes, [&](const ReadOp& of, uint32_t, std::byte* local, uint32_t count) {
    if (&of != &from || pieces_.size() == limits_.pieces) return false;
    const uint32_t region = post.chunk.segments[of.first_segment + at.segment].region;
    pieces_.push_back({local, count, region});
    bytes += count;
    return true;
  });
  const Wire::Taken taken = wire_.read(op, remotes[from.region], from.offset + post.at.in_op, pieces_);
  if (taken == Wire::Taken::kYes) post.at = at;
  return taken;
}

/// Starts one operation of a post.
Wire::Taken PostQueue::start(Post& post, uint64_t number, const std::vector<RemoteRegion>& remotes) {
  const uint32_t op = free_.back();
  const Wire::Taken taken = post.is_write() ? wire_.write(op, remotes[post.region], post.offset, post.value)
                                            : start_read(post, op, remotes);
  if (taken != Wire::Taken::kYes) return taken;
  free_.pop_back();
  owner_[op] = number;
  post.started = true;
  ++post.under_way;
  return taken;
}

Status PostQueue::start_all(const std::vector<RemoteRegion>& remotes, bool& progressed) {
  waits_ = false;
  while (num_started_ < posts_.size()) {
    // Only the last of the started posts can be a store that has not ended.
    if (num_started_ > 0 && posts_[num_started_ - 1].is_write() && posts_[num_started_ - 1].under_way > 0)
      return {};
    Post& post = posts_[num_started_];
    while (!post.all_started()) {
      if (free_.empty()) return {};
      const Wire::Taken taken = start(post, first_ + num_started_, remotes);
      if (taken == Wire::Taken::kFailed) return wire_.why();
      waits_ = taken == Wire::Taken::kLater;
      if (waits_) return {};
      progressed = true;
    }
    ++num_started_;
  }
  return {};
}

Status PostQueue::retire(std::vector<Completion>& ended) {
  for (const uint32_t op : done_) {
    if (op >= owner_.size() || owner_[op] == kNone)
      return Status::Unreachable("the provider completed an operation twice");
    Post& post = posts_[owner_[op] - first_];
    owner_[op] = kNone;
    free_.push_back(op);
    if (--post.under_way > 0 || !post.all_started()) continue;
    ended.push_back({post.token, {}});
    post.reported = true;
  }
  while (num_started_ > 0 && posts_.front().under_way == 0) {
    posts_.pop_front();
    ++first_;
    --num_started_;
  }
  return {};
}

Status PostQueue::drive(const std::vector<RemoteRegion>& remotes, std::vector<Completion>& ended,
                        bool& progressed) {
  if (Status status = start_all(remotes, progressed); !status.ok()) return status;
  done_.clear();
  if (Status status = wire_.poll(done_); !status.ok()) return status;
  if (done_.empty()) return {};
  progressed = true;
  const Status retired = retire(ended);
  return retired.ok() ? start_all(remotes, progressed) : retired;
}

bool PostQueue::only_writes() const {
  return !posts_.empty() &&
         std::all_of(posts_.begin(), posts_.end(), [](const Post& post) { return post.is_write(); });
}

bool PostQueue::cancel(uint64_t token) {
  const auto found = std::find_if(posts_.begin(), posts_.end(), [token](const Post& post) {
    return post.token == token && !post.reported && !post.cancelled;
  });
  if (found == posts_.end()) return true;
  if (!found->started) {
    posts_.erase(found);  // it is behind those that were started
    return true;
  }
  found->cancelled = true;  // starts nothing more
  return found->under_way == 0;
}

}  // namespace kvlink::fabric

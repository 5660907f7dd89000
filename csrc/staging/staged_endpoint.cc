// SPDX-License-Identifier: Apache-2.0
// Reads that land in a slot first. Posts are split into parts, each a slot of the ring, which is on the wire,
// then copied to its place, then free. Completions keep the order of the posts, so a slot read behind data
// proves that the data has landed.
#include <algorithm>
#include <list>

#include "base/poll_timer.h"
#include "staging/staged_read.h"
#include "staging/staged_transport.h"
#include "transport_api/forwarding.h"

namespace kvlink {
namespace {

constexpr uint32_t kCopiesAhead = 4;  // posts under way besides those that keep the wire busy

// Nothing signals that a copy has ended or that another endpoint returned a slot. A sleeping thread polls
// again after half the time that a slot takes to copy, then less and less often.
constexpr int64_t kFirstLookNs = 10'000, kLastLookNs = 320'000;

class StagedEndpoint final : public StageableEndpoint {
 public:
  StagedEndpoint(std::unique_ptr<Endpoint> inner, std::shared_ptr<StagingBuffer> buffer,
                 std::unique_ptr<CopyQueue> queue, const StagingRules& rules, uint32_t slot_region)
      : StageableEndpoint(std::move(inner)),
        buffer_(std::move(buffer)),
        queue_(std::move(queue)),
        rules_(rules),
        slot_region_(slot_region) {}
  ~StagedEndpoint() override { close(); }

  Status establish(std::string_view reply, const Patience& patience) override;
  const Traits& traits() const override { return traits_; }

  Status post_read(uint64_t token, const Chunk& chunk) override;
  Status post_staged(uint64_t token, const Chunk& chunk) override;
  Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) override;
  PollResult poll(int64_t now_ns, bool waiting, std::vector<Completion>& ended) override;
  bool cancel(uint64_t token) override;
  bool arm() override;
  void close() override;

 private:
  using Post = StagedPost;
  using Posts = std::list<Post>;
  struct Part : StagedPart {
    Posts::iterator post = {};
    bool used = false, copying = false;
    SlotRing::Slot slot = {nullptr, {nullptr}};
    uint64_t copy = 0;  // its number, while copying
  };

  Status add(uint64_t token, const Chunk& chunk, bool lands);
  bool ask_for_next();
  Status ask(Post& post, Part& part, uint64_t token);
  void arrived(Part& part, const Status& status);
  bool finish_copies();
  bool retire(std::vector<Completion>& ended);
  static void fail(Post& post, const Status& why);
  uint64_t claim(Posts::iterator post);
  void release(Part& part);

  const std::shared_ptr<StagingBuffer> buffer_;
  const std::unique_ptr<CopyQueue> queue_;
  const StagingRules rules_;
  const uint32_t slot_region_;
  Traits traits_;
  uint32_t on_wire_ = 0;  // at most so many slots
  PartLimits limits_{};   // of a part
  PollTimer look_{kFirstLookNs, kLastLookNs, 8};

  Posts posts_;                               // in order
  Posts::iterator unasked_ = posts_.end();    // the first of which not all is asked for
  std::vector<std::unique_ptr<Part>> parts_;  // by the token that `inner_` knows them by
  uint32_t num_on_wire_ = 0;                  // slots
  uint32_t num_passed_on_ = 0;                // parts of `inner_`, slots included
  uint32_t num_copying_ = 0;
  bool starved_ = false;  // there was no free slot
  std::vector<Completion> inner_ended_;
};

Status StagedEndpoint::establish(std::string_view reply, const Patience& patience) {
  if (Status status = inner_->establish(reply, patience); !status.ok()) return status;
  if (Status status = look_.open(inner_->traits().wake_fd); !status.ok()) return status;
  traits_ = inner_->traits();
  Window& window = traits_.window;
  on_wire_ = window.depth;
  limits_ = {window.chunk_ops, buffer_->copier().most_pieces(), rules_.gap_bytes};
  if (rules_.stages_all()) window.chunk_bytes = std::min(window.chunk_bytes, SlotRing::kSlotBytes);
  window.depth += kCopiesAhead;
  if (window.bytes != UINT64_MAX) window.bytes += uint64_t{kCopiesAhead} * window.chunk_bytes;
  traits_.supports_repeats = traits_.device_driven = false;
  traits_.cpu_copies = false;  // the device copies
  traits_.wake_fd = look_.fd();
  return {};
}

Status StagedEndpoint::post_read(uint64_t token, const Chunk& chunk) {
  if (!rules_.stages_all() && !chunk.ops.empty()) return add(token, chunk, false);
  const Result<bool> lands = is_out_of_reach(chunk, rules_);
  return lands.ok() ? add(token, chunk, *lands) : lands.status();
}

Status StagedEndpoint::post_staged(uint64_t token, const Chunk& chunk) {
  const Result<bool> in_reach = is_out_of_reach(chunk, {});
  return in_reach.ok() ? add(token, chunk, true) : in_reach.status();
}

Status StagedEndpoint::add(uint64_t token, const Chunk& chunk, bool lands) {
  posts_.push_back({.token = token, .chunk = chunk, .lands = lands});
  if (unasked_ == posts_.end()) --unasked_;
  return {};
}

Status StagedEndpoint::post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) {
  posts_.push_back({.token = token, .region = region, .offset = offset, .value = value});
  if (unasked_ == posts_.end()) --unasked_;
  return {};
}

uint64_t StagedEndpoint::claim(Posts::iterator post) {
  uint64_t token = 0;
  while (token < parts_.size() && parts_[token]->used) ++token;
  if (token == parts_.size()) parts_.push_back(std::make_unique<Part>());
  parts_[token]->used = true;
  parts_[token]->post = post;
  ++post->num_parts;
  ++num_passed_on_;
  return token;
}

void StagedEndpoint::release(Part& part) {
  --part.post->num_parts;
  part.copying ? --num_copying_ : --num_passed_on_;
  if (part.slot && !part.copying) --num_on_wire_;
  part.used = part.copying = false;
  part.slot.reset();
  part.clear();
}

void StagedEndpoint::fail(Post& post, const Status& why) {
  if (post.status.ok()) post.status = why;
  post.asked = true;
}

/// Returns false if there is nothing to ask for, or no room.
bool StagedEndpoint::ask_for_next() {
  starved_ = false;
  while (unasked_ != posts_.end() && unasked_->asked) ++unasked_;
  if (unasked_ == posts_.end()) return false;
  Post& post = *unasked_;
  SlotRing::Slot slot{nullptr, {nullptr}};
  if (post.lands) {
    if (num_on_wire_ >= on_wire_) return false;
    slot = buffer_->ring().take();
    starved_ = !slot;
    if (starved_) return false;
  }
  const uint64_t token = claim(unasked_);
  Part& part = *parts_[token];
  part.slot = std::move(slot);
  num_on_wire_ += part.slot != nullptr;
  if (Status status = ask(post, part, token); !status.ok()) {
    fail(post, status);
    release(part);
  }
  return true;
}

Status StagedEndpoint::ask(Post& post, Part& part, uint64_t token) {
  if (post.chunk.ops.empty()) {
    post.asked = true;
    return inner_->post_write(token, post.region, post.offset, post.value);
  }
  if (post.lands) {
    post.fill(part, {part.slot.get(), SlotRing::kSlotBytes, slot_region_}, limits_);
    return inner_->post_read(token, part.chunk(post.chunk.guard));
  }
  if (!rules_.stages_all()) {
    post.asked = true;
    return inner_->post_read(token, post.chunk);
  }
  post.pass_on(part, rules_.num_out_of_reach);
  return inner_->post_read(token, part.chunk(post.chunk.guard));
}

void StagedEndpoint::arrived(Part& part, const Status& status) {
  Post& post = *part.post;
  if (!status.ok()) fail(post, status);
  if (!post.status.ok() || !part.slot) return release(part);
  const Result<uint64_t> copy = queue_->start(CopyTo::kDevice, part.pieces);
  if (!copy.ok()) {
    fail(post, copy.status());
    return release(part);
  }
  part.copying = true;
  part.copy = *copy;
  --num_on_wire_;
  --num_passed_on_;
  ++num_copying_;
}

bool StagedEndpoint::finish_copies() {
  bool any = false;
  for (const auto& part : parts_) {
    if (num_copying_ == 0) break;
    if (!part->copying) continue;
    const Result<bool> done = queue_->done(part->copy);
    if (done.ok() && !*done) continue;
    if (!done.ok()) fail(*part->post, done.status());
    release(*part);
    any = true;
  }
  return any;
}

bool StagedEndpoint::retire(std::vector<Completion>& ended) {
  bool any = false;
  while (!posts_.empty() && posts_.front().asked && posts_.front().num_parts == 0) {
    ended.push_back({posts_.front().token, std::move(posts_.front().status)});
    if (unasked_ == posts_.begin()) ++unasked_;
    posts_.pop_front();
    any = true;
  }
  return any;
}

PollResult StagedEndpoint::poll(int64_t now_ns, bool waiting, std::vector<Completion>& ended) {
  while (ask_for_next()) {
  }
  PollResult result = inner_->poll(now_ns, waiting, inner_ended_);
  for (const Completion& completion : inner_ended_) arrived(*parts_[completion.token], completion.status);
  inner_ended_.clear();
  if (num_copying_ > 0) result.progressed |= finish_copies();
  result.progressed |= retire(ended);
  if (result.progressed) look_.progressed();
  return result;
}

bool StagedEndpoint::cancel(uint64_t token) {
  const auto post =
      std::find_if(posts_.begin(), posts_.end(), [token](const Post& one) { return one.token == token; });
  if (post == posts_.end()) return true;
  fail(*post, Status::Cancelled("the read was cancelled"));
  for (uint64_t part = 0; part < parts_.size() && post->num_parts > 0; ++part) {
    const bool passed_on = parts_[part]->used && !parts_[part]->copying && parts_[part]->post == post;
    if (passed_on && inner_->cancel(part)) release(*parts_[part]);
  }
  if (post->num_parts > 0) return false;
  if (unasked_ == post) ++unasked_;
  posts_.erase(post);
  return true;
}

bool StagedEndpoint::arm() {
  const bool can_ask = unasked_ != posts_.end() && !starved_ && num_on_wire_ < on_wire_;
  if (can_ask || (inner_->traits().cpu_copies && num_passed_on_ > 0) || !inner_->arm()) return false;
  look_.arm(num_copying_ > 0 || starved_);
  return true;
}

void StagedEndpoint::close() {
  inner_->close();
  queue_->drain();
  parts_.clear();
  posts_.clear();
  unasked_ = posts_.end();
  num_on_wire_ = num_passed_on_ = num_copying_ = 0;
  starved_ = false;
  look_.close();
}

}  // namespace

Result<std::unique_ptr<StageableEndpoint>> stage_endpoint(std::unique_ptr<Endpoint> inner,
                                                          std::shared_ptr<StagingBuffer> buffer,
                                                          const StagingRules& rules, uint32_t slot_region) {
  Result<std::unique_ptr<CopyQueue>> queue = buffer->copier().open_queue();
  if (!queue.ok()) return queue.status();
  return std::make_unique<StagedEndpoint>(std::move(inner), std::move(buffer), std::move(*queue), rules,
                                          slot_region);
}

}  // namespace kvlink

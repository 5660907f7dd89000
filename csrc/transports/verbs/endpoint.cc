// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/endpoint.h"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>

#include "base/clock.h"

namespace kvlink::verbs {
namespace {

// The bytes that one queue pair of the widest rail has under way: enough for 400 Gb/s over 20 us with four of
// them. They are posted in parts small enough that several queue pairs share a pull evenly to its end. Lanes
// without a share of a small pull stand by for one that breaks.
constexpr double kWindowBytes = 2 << 20;
constexpr double kChunkOps = 256;
constexpr uint32_t kDepth = 4;
constexpr uint32_t kLeastChunk = 16 << 10;

Window window_of(double width) {
  const double bytes = kWindowBytes * width;
  return {.chunk_bytes = std::max(static_cast<uint32_t>(bytes / kDepth), kLeastChunk),
          .chunk_ops = std::max(static_cast<uint32_t>(kChunkOps * width), 1u),
          .depth = kDepth,
          .stripe_bytes = 0,
          .bytes = static_cast<uint64_t>(bytes)};
}

constexpr uint32_t kChainWrs = 64;  // one doorbell
// The largest work request, and the bytes after which one of several is signalled. As signs of life,
// completions come several times a tick on a queue pair that carries 4 MB/s.
constexpr uint64_t kReadBytes = 128 << 10;
constexpr int kPollBatch = 16;
constexpr int64_t kGoodbyeNs = 2'000'000;  // round trips of any fabric

class VerbsEndpoint final : public Endpoint {
 public:
  VerbsEndpoint(Route route, std::unique_ptr<Cq> cq, std::unique_ptr<Qp> qp, std::shared_ptr<CmPort> cm,
                const ChainLimits& limits, uint32_t max_wrs, std::vector<LocalRegion> locals,
                LivenessTimeouts timeouts)
      : owner_nic_(route.owner_nic),
        owner_gid_(route.owner_gid),
        // The owner's NIC may fetch for two reads in any order. A fenced read leaves this NIC only after the
        // reads before it have landed, which saves the way to the CPU and back.
        traits_{.path = std::move(route.path),
                .window = window_of(route.width),
                .ordered = true,
                .ordering_needs_fence = true,
                .nic_driven = true,
                .wake_fd = cq->wake_fd()},
        cq_(std::move(cq)),
        qp_(std::move(qp)),
        cm_(std::move(cm)),
        chain_(limits),
        max_wrs_(max_wrs),
        locals_(std::move(locals)),
        timeouts_(timeouts),
        liveness_(timeouts.silence_ns),
        losses_(qp_->nic()->losses()) {}
  ~VerbsEndpoint() override { close(); }

  std::string hello() const override { return Hello{owner_nic_, qp_->address()}.format(); }
  Status establish(std::string_view reply, const Patience& patience) override;
  Result<uint32_t> import_region(std::string_view remote_key) override;

  const Traits& traits() const override { return traits_; }
  Status post_read(uint64_t token, const Chunk& chunk) override;
  Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) override;
  PollResult poll(int64_t now, bool waiting, std::vector<Completion>& ended) override;
  bool arm() override;
  bool cancel(uint64_t token) override;
  void close() override;

 private:
  struct Post {
    uint64_t token = 0;
    Chunk chunk = {};
    uint64_t bytes = 0;
    ChunkCursor at = {};
    uint64_t last_wr = 0;  // its number; 0: not all is posted
    uint64_t first_wr = 0;
    bool fenced = false;
    uint32_t region = 0;  // from here on of a write, which has no operations
    uint64_t offset = 0, value = 0;
  };

  bool is_large(const Post& post) const { return post.bytes > qp_->packet_bytes(); }
  uint64_t under_way() const { return num_posted_ - num_completed_; }
  bool lost_nic() const { return qp_->nic()->removed() || qp_->nic()->losses() != losses_; }
  Status connect(std::string_view reply, const Patience& patience);
  uint32_t add(Post& post, uint32_t used, uint32_t room);
  void pump();
  Status check_alive(int64_t now, bool answered, bool waiting);
  Status why_failed(const ibv_wc& completion) const;
  void take(const ibv_wc& completion);
  void retire(std::vector<Completion>& ended);
  void say_goodbye();
  void wait_until_flushed(int64_t most_ns);

  const uint32_t owner_nic_;
  const Gid owner_gid_;
  const Traits traits_;
  std::unique_ptr<Cq> cq_;
  std::unique_ptr<Qp> qp_;  // after the queue that it uses
  std::shared_ptr<CmPort> cm_;
  Chain chain_;
  const uint32_t max_wrs_;
  const std::vector<LocalRegion> locals_;
  const LivenessTimeouts timeouts_;
  Liveness liveness_;
  const uint32_t losses_;
  std::vector<RemoteRegion> remotes_;
  std::deque<Post> posts_;
  size_t num_full_ = 0;  // of posts_, from the front: all their work requests are posted
  uint64_t num_posted_ = 0, num_completed_ = 0;  // work requests
  bool connected_ = false;
  bool armed_ = false;
  bool small_done_ = false, large_done_ = false;  // reads
  std::array<ibv_wc, kPollBatch> completions_;
  int num_stashed_ = 0;  // in completions_, found by arm()
  Status broken_;
};

Status VerbsEndpoint::establish(std::string_view reply, const Patience& patience) {
  Status status = connect(reply, patience);
  connected_ = status.ok();
  return status;
}

Status VerbsEndpoint::connect(std::string_view reply, const Patience& patience) {
  if (cm_) {
    if (const auto to = CmReply::parse(reply)) return cm_->connect(*qp_, *to, timeouts_, patience);
  } else {
    if (const auto parsed = Reply::parse(reply)) return qp_->connect(parsed->owner, timeouts_);
  }
  return Status::Unreachable("the owner's answer for " + qp_->name() + " is malformed");
}

Result<uint32_t> VerbsEndpoint::import_region(std::string_view remote_key) {
  auto key = RemoteKey::parse(remote_key);
  if (!key || owner_nic_ >= key->rkeys.size()) {
    return Status::AccessDenied("the key of a region of the owner is malformed");
  }
  remotes_.push_back(
      {key->access, key->base, key->bytes, key->slice_bytes, std::move(key->rkeys[owner_nic_])});
  return static_cast<uint32_t>(remotes_.size() - 1);
}

Status VerbsEndpoint::post_read(uint64_t token, const Chunk& chunk) {
  if (!broken_.ok()) return broken_;
  if (chunk.ops.empty()) return Status::Config("a read has no operations");
  uint64_t bytes = 0;
  for (const ReadOp& op : chunk.ops) {
    if (Status status = check(op, chunk.segments, locals_, remotes_); !status.ok()) return status;
    bytes += op.bytes;
  }
  const bool fenced = remotes_[chunk.ops.front().region].access == Access::kReadWords;
  posts_.push_back({.token = token, .chunk = chunk, .bytes = bytes, .fenced = fenced});
  return {};
}

Status VerbsEndpoint::post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) {
  if (!broken_.ok()) return broken_;
  if (Status status = check_store(region, offset, remotes_); !status.ok()) return status;
  posts_.push_back({.token = token, .region = region, .offset = offset, .value = value});
  return {};
}

/// Adds as much of a post to the chain as there is room for. Returns the number of work requests.
uint32_t VerbsEndpoint::add(Post& post, uint32_t used, uint32_t room) {
  if (post.first_wr == 0) post.first_wr = num_posted_ + used + 1;
  const bool begins = post.at.op == 0 && post.at.in_op == 0;
  uint32_t num_wrs = 1;
  if (post.chunk.ops.empty()) {
    const RemoteRegion& to = remotes_[post.region];
    chain_.add_write(used, to.iova + post.offset, to.rkeys[post.offset / to.slice_bytes], post.value);
  } else {
    num_wrs = chain_.fill(post.chunk, post.at, room, locals_, remotes_, used, num_posted_ + used + 1);
  }
  if (post.fenced && begins) chain_.fence(used);
  if (post.at.op < post.chunk.ops.size()) return num_wrs;
  post.last_wr = num_posted_ + used + num_wrs;
  chain_.signal(used + num_wrs - 1, post.last_wr);
  ++num_full_;
  return num_wrs;
}

/// Posts as much as the send queue has room for, under one doorbell.
void VerbsEndpoint::pump() {
  while (broken_.ok() && num_full_ < posts_.size() && under_way() < max_wrs_) {
    const auto room = std::min(chain_.capacity(), static_cast<uint32_t>(max_wrs_ - under_way()));
    uint32_t used = 0;
    while (used < room && num_full_ < posts_.size()) used += add(posts_[num_full_], used, room - used);
    chain_.finish(used, num_posted_ + used);
    broken_ = qp_->post(chain_.first());
    num_posted_ += used;
  }
}

/// No thread of the owner takes part in a read, so only its NIC can be silent. If nothing is under way, a
/// pull that waits asks it now and then.
Status VerbsEndpoint::check_alive(int64_t now, bool answered, bool waiting) {
  if (lost_nic()) return qp_->nic()->why_lost();
  if (qp_->failed()) return qp_->why_failed();
  if (answered) liveness_.answered();
  if (waiting && under_way() == 0 && liveness_.idle_too_long(now)) {
    if (Status status = qp_->ask(++num_posted_); !status.ok()) return status;
  }
  if (answered || under_way() == 0 || !liveness_.too_long(now)) return {};
  return Status::Unreachable(qp_->name() + ": the owner's NIC answered nothing for " +
                             std::to_string(timeouts_.silence_ns / 1'000'000) +
                             " ms; its port, device or host is gone");
}

/// A removed NIC can fail its work in any way.
Status VerbsEndpoint::why_failed(const ibv_wc& completion) const {
  if (lost_nic()) return qp_->nic()->why_lost();
  if (completion.status == IBV_WC_WR_FLUSH_ERR && qp_->failed()) return qp_->why_failed();
  return failure(qp_->nic()->api(), completion, qp_->name());
}

void VerbsEndpoint::take(const ibv_wc& completion) {
  if (completion.status == IBV_WC_SUCCESS) {
    num_completed_ = completion.wr_id;
  } else if (broken_.ok()) {
    broken_ = why_failed(completion);
  }
}

/// Work requests of one queue pair complete in order.
void VerbsEndpoint::retire(std::vector<Completion>& ended) {
  while (num_full_ > 0 && posts_.front().last_wr <= num_completed_) {
    ended.push_back({posts_.front().token, {}});
    (is_large(posts_.front()) ? large_done_ : small_done_) = true;
    posts_.pop_front();
    --num_full_;
  }
}

PollResult VerbsEndpoint::poll(int64_t now, bool waiting, std::vector<Completion>& ended) {
  if (!broken_.ok()) return {broken_, false};
  pump();
  bool progressed = false;
  for (;;) {
    const bool stashed = num_stashed_ > 0;
    const int count = stashed ? std::exchange(num_stashed_, 0) : cq_->poll(completions_.data(), kPollBatch);
    if (count < 0) broken_ = Status::Unreachable(qp_->name() + ": its completion queue failed");
    for (int i = 0; i < count; ++i) take(completions_[static_cast<size_t>(i)]);
    progressed |= count > 0;
    if (!stashed && count < kPollBatch) break;
  }
  if (progressed && std::exchange(armed_, false)) cq_->take_events();
  retire(ended);
  if (broken_.ok()) broken_ = check_alive(now, progressed, waiting);
  pump();
  return {broken_, progressed, liveness_.next_check_ns()};
}

bool VerbsEndpoint::arm() {
  const bool can_post = num_full_ < posts_.size() && under_way() < max_wrs_;
  if (!broken_.ok() || num_stashed_ > 0 || can_post) return false;
  if (armed_ || under_way() == 0) return true;
  cq_->arm();
  armed_ = true;
  num_stashed_ = std::max(cq_->poll(completions_.data(), kPollBatch), 0);
  return num_stashed_ == 0;
}

bool VerbsEndpoint::cancel(uint64_t token) {
  const auto found =
      std::find_if(posts_.begin(), posts_.end(), [token](const Post& post) { return post.token == token; });
  if (found == posts_.end()) return true;
  if (found - posts_.begin() < static_cast<ptrdiff_t>(num_full_)) return false;
  if (found->first_wr == 0) {
    posts_.erase(found);
    return true;
  }
  found->last_wr = num_posted_;  // only the post behind the full ones is partly posted
  ++num_full_;
  return false;
}

void VerbsEndpoint::wait_until_flushed(int64_t most_ns) {
  const int64_t end = now_ns() + most_ns;
  uint64_t flushed = num_completed_;
  for (int count = std::exchange(num_stashed_, 0);;) {
    // Unsignalled requests before one have completed or have completions of their own.
    for (int i = 0; i < count; ++i) flushed = std::max(flushed, completions_[static_cast<size_t>(i)].wr_id);
    if (flushed >= num_posted_ || now_ns() >= end) return;
    count = cq_->poll(completions_.data(), kPollBatch);
    if (count < 0) return;
  }
}

/// Sends waiting settles, and tells the owner, which need not find out by itself. Not with reads under way,
/// which must not land any more.
void VerbsEndpoint::say_goodbye() {
  if (std::any_of(posts_.begin(), posts_.end(), [](const Post& post) { return !post.chunk.ops.empty(); }))
    return;
  const int64_t end = now_ns() + kGoodbyeNs;
  std::vector<Completion> ended;
  while (!posts_.empty() && broken_.ok() && now_ns() < end) static_cast<void>(poll(now_ns(), false, ended));
  if (!posts_.empty() || !broken_.ok()) return;
  qp_->break_peer();
  while (cq_->poll(completions_.data(), kPollBatch) == 0 && now_ns() < end) {
  }
}

void VerbsEndpoint::close() {
  if (!qp_) return;
  if (small_done_ && !large_done_ && !lost_nic() &&
      std::any_of(posts_.begin(), posts_.end(), [this](const Post& post) { return is_large(post); })) {
    qp_->nic()->note_large_lost(owner_gid_);
  }
  if (connected_ && broken_.ok() && !qp_->failed()) say_goodbye();
  if (qp_->halt() && !qp_->nic()->removed()) wait_until_flushed(kFlushNs);
  posts_.clear();
  num_full_ = 0;
  if (broken_.ok()) broken_ = Status::Unreachable("the connection was closed");
  qp_.reset();  // no byte lands after this
  cq_.reset();
  cm_.reset();
}

}  // namespace

Result<std::unique_ptr<Endpoint>> open_endpoint(std::shared_ptr<Nic> nic, std::shared_ptr<CmPort> cm,
                                                Route route, std::vector<LocalRegion> locals,
                                                LivenessTimeouts timeouts) {
  const Nic::Limits& limits = nic->limits();
  const ChainLimits chain{.wrs = std::min(kChainWrs, limits.max_wrs),
                          .sges_per_wr = limits.max_sge,
                          .bytes_per_wr = std::min(kReadBytes, limits.max_read_bytes),
                          .bytes_per_signal = kReadBytes};
  Result<std::unique_ptr<Cq>> cq = Cq::create(nic, limits.max_wrs, true);
  if (!cq.ok()) return cq.status();
  Result<std::unique_ptr<Qp>> qp = Qp::create(nic, **cq, limits.max_wrs, limits.max_sge);
  if (!qp.ok()) return qp.status();
  if (nic->loses_large(route.owner_gid)) {
    (*qp)->set_most_mtu(kSmallMtu);
    route.path += " in packets of 1024 bytes, because larger ones were lost";
  }
  return std::unique_ptr<Endpoint>(new VerbsEndpoint(std::move(route), std::move(*cq), std::move(*qp),
                                                     std::move(cm), chain, limits.max_wrs, std::move(locals),
                                                     timeouts));
}

}  // namespace kvlink::verbs

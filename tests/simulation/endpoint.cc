// SPDX-License-Identifier: Apache-2.0
#include "endpoint.h"

#include <algorithm>
#include <cstring>

#include "coverage.h"
#include "simulated_sync.h"

namespace kvlink::simulation {
namespace {

// Work that is neither seen nor sent for this long was forgotten: a tick, and time for threads
// that wait for a CPU.
constexpr int64_t kForgottenNs = 2'500'000;

Random& random() { return Scheduler::the().random(); }

}  // namespace

/// The engine serialises calls; other threads run before and after one.
class SimulatedEndpoint::Call {
 public:
  explicit Call(bool& inside) : inside_(inside) {
    Scheduler::the().point();
    if (std::exchange(inside_, true)) fail("two threads use an endpoint at once");
  }
  ~Call() {
    Scheduler::the().point();  // inside: a second thread would be found out
    inside_ = false;
  }

 private:
  const Scheduler::InEngine not_here_{false};
  bool& inside_;
};

SimulatedEndpoint::Post* SimulatedEndpoint::State::find(uint64_t number) {
  const auto found =
      std::find_if(posts.begin(), posts.end(), [number](const Post& post) { return post.number == number; });
  return found == posts.end() ? nullptr : &*found;
}

SimulatedEndpoint::SimulatedEndpoint(Owner& owner, const EndpointPlan& plan, Observer observer)
    : owner_(owner),
      plan_(plan),
      observer_(std::move(observer)),
      fd_(open_fd()),
      traits_{.path = plan.path,
              .window = plan.window,
              .ordered = plan.ordered,
              .device_driven = plan.manner == Manner::kLaunch,
              .cpu_copies = plan.manner == Manner::kCopy,
              .wake_fd = fd_} {
  if (plan_.breaks_at_ns == INT64_MAX) return;
  Scheduler::the().at(plan_.breaks_at_ns, [state = state_, fd = fd_] {
    if (state->closed) return;
    state->broken = true;
    Scheduler::the().trace("a connection breaks");
    note(Event::kBreak);
    hang_up(fd);
    // An idle lane may find out when it is used, one that is being tried when the trial is over.
    if (state->posts.empty() || state->posts.front().number == 0) return;
    Scheduler::the().at(Scheduler::the().now() + kForgottenNs, [state] {
      if (state->closed || state->posts.empty()) return;  // recalled meanwhile, the lane is idle
      fail("a broken connection lay unseen for 2.5 ms");
    });
  });
}

/// The first post is the one by which a connection is tried.
bool SimulatedEndpoint::faulty(uint32_t percent) { return num_posted_ > 1 && random().chance(percent); }

/// When a post that leaves now is answered; INT64_MAX: never.
/// No post overtakes a store.
int64_t SimulatedEndpoint::due_ns(bool of_store) {
  const int64_t now = Scheduler::the().now();
  int64_t due = now + random().between(plan_.delay_ns / 2, 2 * plan_.delay_ns);
  if (random().chance(5)) due += random().between(0, 10 * plan_.delay_ns);
  due = std::max(due, last_due_ns_ + 1);
  if (plan_.breaks_order && !of_store) note(Event::kBrokenOrder);
  if ((plan_.ordered && !plan_.breaks_order) || of_store) last_due_ns_ = due;
  return due < plan_.silent_at_ns ? due : INT64_MAX;
}

Status SimulatedEndpoint::post_read(uint64_t token, const Chunk& chunk) {
  const Call call(inside_);
  if (faulty(plan_.failed_post_percent)) {
    note(Event::kRefusedPost);
    return Status::AccessDenied("the post was refused");
  }
  state_->work.reads += !chunk.ops.empty() && chunk.ops.front().region == kPoolRegion;
  Post post{.number = num_posted_++, .token = token, .pieces = {}};
  for (const ReadOp& op : chunk.ops) {
    uint64_t offset = op.offset;
    for (uint32_t index = 0; index < op.num_segments; ++index) {
      const Segment& segment = chunk.segments[op.first_segment + index];
      post.pieces.push_back({segment.local, segment.bytes, op.region, offset});
      offset += segment.bytes;
    }
  }
  if (faulty(plan_.refused_percent)) {
    note(Event::kRefusedRead);
    post.status = Status::AccessDenied("the key was revoked");
  }
  return add(std::move(post));
}

Status SimulatedEndpoint::post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) {
  const Call call(inside_);
  const bool fails = faulty(plan_.failed_write_percent);
  if (fails && random().chance(50)) {
    note(Event::kRefusedWrite);
    return Status::AccessDenied("the store was refused");
  }
  ++state_->work.stores;
  owner_.note_posted(value);
  Post post{.number = num_posted_++,
            .token = token,
            .pieces = {},
            .offset = offset,
            .value = value,
            .region = region};
  if (fails) {
    note(Event::kLostWrite);
    post.status = Status::AccessDenied("the store is lost");
  }
  return add(std::move(post));
}

Status SimulatedEndpoint::add(Post post) {
  if (state_->closed) fail("a post on a closed endpoint");
  for (const Post& other : state_->posts) {
    if (other.token == post.token) fail("two posts under one token");
  }
  Scheduler::the().trace((post.pieces.empty() ? "posts write " : "posts read ") + std::to_string(post.token));
  watch(post.number);
  state_->posts.push_back(std::move(post));
  if (plan_.manner == Manner::kQueue || plan_.manner == Manner::kLaunch) send(state_->posts.back());
  return {};
}

/// Fails if nobody polls for a post that needs it: a stream sends it, a copy goes on.
void SimulatedEndpoint::watch(uint64_t number) {
  if (!plan_.recalls()) return;
  const int64_t now = Scheduler::the().now();
  Scheduler::the().at(now + kForgottenNs, [this, state = state_, number, now] {
    if (state->closed || state->broken || !state->find(number)) return;
    if (state->last_poll_ns < now) fail("nobody polled for a post for 2.5 ms");
    if (plan_.manner == Manner::kCopy) watch(number);
  });
}

void SimulatedEndpoint::send(Post& post) {
  post.sent = true;
  const int64_t due = due_ns(post.pieces.empty());
  if (due == INT64_MAX) return;
  if (!post.pieces.empty()) owner_.expect_read(post.pieces[0].region, post.pieces[0].offset, due);
  Scheduler& scheduler = Scheduler::the();
  if (plan_.manner == Manner::kStream && post.pieces.empty()) {  // on its way, whatever the reader does next
    scheduler.at(due, [&owner = owner_, state = state_, post] {
      if (!state->broken && post.status.ok()) owner.store(post.region, post.offset, post.value);
    });
    return;
  }
  if (!plan_.recalls() && post.pieces.size() > 1 && post.status.ok()) {  // a part lands before the rest
    scheduler.at(due - plan_.delay_ns / 4, [this, state = state_, number = post.number] {
      if (Post* const found = state->closed ? nullptr : state->find(number)) land(*found, 1);
    });
  }
  scheduler.at(due, [this, state = state_, number = post.number] {
    if (!state->closed && !state->broken) finish(*state, number);
  });
}

/// The owner's answer is here. A NIC has moved the bytes; a stream has them for whoever polls.
void SimulatedEndpoint::finish(State& state, uint64_t number) {
  Post* const post = state.find(number);
  if (!post) return;  // called back
  post->ended = true;
  if (!plan_.recalls()) land(*post, SIZE_MAX);
  tell(state);
  Scheduler::the().at(Scheduler::the().now() + kForgottenNs, [state = state_, number] {
    if (!state->closed && !state->broken && state->find(number)) fail("a completion lay unseen for 2.5 ms");
  });
}

void SimulatedEndpoint::tell(State& state) {
  if (plan_.manner == Manner::kCopy) return;
  if (plan_.manner == Manner::kStream || std::exchange(state.armed, false)) set_event(fd_);
}

void SimulatedEndpoint::land(Post& post, size_t most_pieces) {
  if (!post.status.ok()) return;
  if (post.pieces.empty() && post.num_landed++ == 0) owner_.store(post.region, post.offset, post.value);
  for (; post.num_landed < post.pieces.size() && most_pieces > 0; ++post.num_landed, --most_pieces) {
    const Piece& piece = post.pieces[post.num_landed];
    observer_.landing(piece.local);
    std::memcpy(piece.local, owner_.at(piece.region, piece.offset, piece.bytes), piece.bytes);
  }
}

PollResult SimulatedEndpoint::poll(int64_t, bool, std::vector<Completion>& ended) {
  const Call call(inside_);
  const Scheduler::Undisturbed undisturbed;
  State& state = *state_;
  if (state.closed) fail("a poll of a closed endpoint");
  state.last_poll_ns = Scheduler::the().now();
  if (state.broken) return {Status::Unreachable("the connection broke"), false};
  PollResult result;
  for (Post& post : state.posts) {
    if (post.sent) continue;
    result.progressed = true;
    if (plan_.manner != Manner::kCopy) {
      send(post);
      post.ended |= post.pieces.empty();  // the kernel has a write once it is sent
    } else if (Scheduler::the().now() < plan_.silent_at_ns) {
      land(post, 2);
      post.ended = post.sent = !post.status.ok() || post.num_landed >= post.pieces.size();
      break;
    } else {
      result.progressed = false;
      break;
    }
  }
  const auto collect = [&](Post& post) {
    if (!post.ended) return false;
    if (&post != state.posts.data()) note(Event::kReorderedCompletion);
    if (plan_.manner == Manner::kStream && !post.pieces.empty()) land(post, SIZE_MAX);
    note_look(post);
    ended.push_back({post.token, post.status});
    Scheduler::the().trace("collects " + std::to_string(post.token));
    return true;
  };
  const bool had_posts = !state.posts.empty();
  result.progressed |= std::erase_if(state.posts, collect) > 0;
  if (plan_.manner == Manner::kStream) clear_event(fd_);
  if (had_posts && state.posts.empty()) observer_.quiet();
  return result;
}

/// Slot 0 is the header of the table, which is read to try the connection.
void SimulatedEndpoint::note_look(const Post& post) {
  if (post.pieces.empty() || post.pieces[0].region != kLeaseRegion || post.pieces[0].offset == 0) return;
  ++state_->work.num_looks;
  if (post.status.ok()) ++state_->work.looks[post.pieces[0].local];
}

bool SimulatedEndpoint::cancel(uint64_t token) {
  const Call call(inside_);
  if (state_->closed) fail("a recall on a closed endpoint");
  Scheduler::the().trace("calls back " + std::to_string(token));
  note(plan_.recalls() ? Event::kRecalledRead : Event::kUnrecalledRead);
  if (!plan_.recalls()) return false;
  if (std::erase_if(state_->posts, [token](const Post& post) { return post.token == token; }) == 0) {
    fail("a recall of what was never posted");
  }
  if (state_->posts.empty()) observer_.quiet();
  return true;
}

bool SimulatedEndpoint::arm() {
  const Call call(inside_);
  if (plan_.recalls()) return true;
  clear_event(fd_);
  if (state_->broken ||
      std::any_of(state_->posts.begin(), state_->posts.end(), [](const Post& post) { return post.ended; })) {
    return false;
  }
  state_->armed = true;
  return true;
}

namespace {

class SimulatedQueue final : public CopyQueue {
 public:
  explicit SimulatedQueue(std::function<void(const std::byte* at)> landing) : landing_(std::move(landing)) {}
  ~SimulatedQueue() override { drain(); }

  Result<uint64_t> start(CopyTo, std::span<const CopyPiece> pieces) override {
    const Scheduler::InEngine not_here(false);
    note(Event::kStagedRead);
    const auto copy = std::make_shared<Copy>(Copy{{pieces.begin(), pieces.end()}});
    copies_.push_back(copy);
    Scheduler::the().at(Scheduler::the().now() + random().between(1'000, 200'000),
                        [copy, landing = landing_] { copy->land(landing); });
    return copies_.size() - 1;
  }
  Result<bool> done(uint64_t number) override { return copies_.at(number)->pieces.empty(); }
  void drain() override {
    for (const auto& copy : copies_) copy->land(landing_);
  }

 private:
  struct Copy {
    std::vector<CopyPiece> pieces;  // none: they have landed
    void land(const std::function<void(const std::byte* at)>& landing) {
      for (const CopyPiece& piece : std::exchange(pieces, {})) {
        landing(piece.device);
        std::memcpy(piece.device, piece.slot, piece.bytes);
      }
    }
  };
  const std::function<void(const std::byte* at)> landing_;
  std::vector<std::shared_ptr<Copy>> copies_;
};

struct SimulatedCopier final : DeviceCopier {
  explicit SimulatedCopier(std::function<void(const std::byte* at)> told) : landing(std::move(told)) {}
  Status pin(std::byte*, uint64_t) override { return {}; }
  Result<std::unique_ptr<CopyQueue>> open_queue() override {
    return std::unique_ptr<CopyQueue>(std::make_unique<SimulatedQueue>(landing));
  }
  const std::function<void(const std::byte* at)> landing;
};

}  // namespace

std::shared_ptr<DeviceCopier> make_copier(std::function<void(const std::byte* at)> landing) {
  return std::make_shared<SimulatedCopier>(std::move(landing));
}

void SimulatedEndpoint::close() {
  const Call call(inside_);
  if (std::exchange(state_->closed, true)) return;
  const bool had_posts = !state_->posts.empty();
  state_->posts.clear();
  close_fd(fd_);
  if (had_posts) observer_.quiet();  // others have time to take over
}

}  // namespace kvlink::simulation

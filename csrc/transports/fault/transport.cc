// SPDX-License-Identifier: Apache-2.0
// fault: wraps any other transport and disturbs chosen reads by the plan of transports/fault/plan.h.
// Everything else (addresses, keys, hellos, the owner's side) passes through, so the other end need not know.
#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <unordered_map>

#include "base/clock.h"
#include "base/sys.h"
#include "base/unique_fd.h"
#include "transport_api/forwarding.h"
#include "transports/factories.h"
#include "transports/fault/plan.h"

namespace kvlink {
namespace {

constexpr uint32_t kMaxSlotBytes = 64;
constexpr uint64_t kDecidingSlotBytes = 8;  // the nonce: a flip elsewhere in a slot might go unnoticed

/// Reads that try a new connection are under no lease, and so kAny.
FaultTarget target_of(const Chunk& chunk) {
  if (std::ranges::all_of(chunk.ops, [](const ReadOp& op) { return op.bytes <= kMaxSlotBytes; }))
    return FaultTarget::kSlot;
  return chunk.guard.value != 0 ? FaultTarget::kData : FaultTarget::kAny;
}

/// The rules, and counts of the posts they have seen. Any thread.
class Plan {
 public:
  explicit Plan(std::vector<FaultRule> rules) : rules_(std::move(rules)) {}

  struct Verdict {
    const FaultRule* rule = nullptr;  // null: let it pass
    uint64_t number = 0;              // of the post among all
  };
  bool corrupts_data() const {
    return std::any_of(rules_.begin(), rules_.end(), [](const FaultRule& rule) {
      return rule.action == FaultAction::kCorrupt && rule.target != FaultTarget::kSlot;
    });
  }
  Verdict judge(FaultTarget target) {
    std::lock_guard lock(mutex_);
    uint64_t& all = count(FaultTarget::kAny);
    ++all;
    if (target != FaultTarget::kAny) ++count(target);
    for (const FaultRule& rule : rules_) {
      const bool meant = rule.target == FaultTarget::kAny || rule.target == target;
      if (meant && rule.hits(count(rule.target))) return {&rule, all};
    }
    return {};
  }

 private:
  uint64_t& count(FaultTarget target) { return posts_[static_cast<size_t>(target)]; }

  const std::vector<FaultRule> rules_;
  std::mutex mutex_;
  std::array<uint64_t, 3> posts_{};  // by FaultTarget
};

// splitmix64: gives a place that looks random and is the same in every run.
uint64_t scramble(uint64_t value) {
  value += 0x9e37'79b9'7f4a'7c15;
  value = (value ^ value >> 30) * 0xbf58'476d'1ce4'e5b9;
  value = (value ^ value >> 27) * 0x94d0'49bb'1331'11eb;
  return value ^ value >> 31;
}

void flip_byte(const Chunk& chunk, uint64_t number) {
  uint64_t bytes = 0;
  for (const ReadOp& op : chunk.ops) bytes += op.bytes;
  if (target_of(chunk) == FaultTarget::kSlot) bytes = std::min(bytes, kDecidingSlotBytes);
  uint64_t at = scramble(number) % bytes;
  for (const ReadOp& op : chunk.ops) {
    for (uint32_t i = 0; i < op.num_segments; ++i) {
      const Segment& segment = chunk.segments[op.first_segment + i];
      if (at < segment.bytes) {
        segment.local[at] ^= std::byte{0xff};
        return;
      }
      at -= segment.bytes;
    }
  }
}

class FaultEndpoint final : public WrappedEndpoint {
 public:
  FaultEndpoint(std::unique_ptr<Endpoint> inner, std::shared_ptr<Plan> plan)
      : WrappedEndpoint(std::move(inner)), plan_(std::move(plan)) {}

  Status establish(std::string_view reply, const Patience& patience) override {
    Status status = inner_->establish(reply, patience);
    if (status.ok()) status = watch();
    traits_ = inner_->traits();
    traits_.supports_repeats = traits_.device_driven = false;
    if (wake_) traits_.wake_fd = wake_.get();
    return status;
  }
  const Traits& traits() const override { return traits_; }

  Status post_read(uint64_t token, const Chunk& chunk) override {
    const auto [rule, number] = plan_->judge(target_of(chunk));
    if (!broken_.ok()) return broken_;
    if (hung_) return {};
    if (!rule) return inner_->post_read(token, chunk);
    switch (rule->action) {
      case FaultAction::kDrop:
        return {};
      case FaultAction::kHang:
        hang();
        return {};
      case FaultAction::kBreak:
        broken_ = Status::Unreachable("an injected fault broke the connection");
        wake_at(now_ns());
        return {};
      case FaultAction::kFail:
        withhold({token, Status::Unreachable("an injected fault failed this read")}, now_ns());
        return {};
      case FaultAction::kDeny:
        withhold({token, Status::AccessDenied("an injected fault denied this read")}, now_ns());
        return {};
      case FaultAction::kDelay:
      case FaultAction::kCorrupt:
        Status status = inner_->post_read(token, chunk);
        if (status.ok()) marked_[token] = {rule, number, chunk};
        return status;
    }
    return {};
  }

  Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) override {
    if (!broken_.ok()) return broken_;
    return hung_ ? Status{} : inner_->post_write(token, region, offset, value);
  }

  PollResult poll(int64_t now_ns, bool waiting, std::vector<Completion>& ended) override {
    if (!broken_.ok()) return {broken_, false};
    if (hung_) return {};
    const auto already = static_cast<ptrdiff_t>(ended.size());
    PollResult result = inner_->poll(now_ns, waiting, ended);
    const auto taken = std::remove_if(ended.begin() + already, ended.end(),
                                      [this](Completion& completion) { return spoil(completion); });
    ended.erase(taken, ended.end());
    result.progressed |= release(ended);
    return result;
  }

  bool arm() override { return hung_ || !broken_.ok() || inner_->arm(); }

  bool cancel(uint64_t token) override {
    marked_.erase(token);
    std::erase_if(withheld_, [token](const Withheld& held) { return held.completion.token == token; });
    return inner_->cancel(token);
  }

  void close() override {
    marked_.clear();
    withheld_.clear();
    inner_->close();
    wake_.reset();
    timer_.reset();
  }

 private:
  struct Mark {
    const FaultRule* rule;
    uint64_t number;
    Chunk chunk;  // borrowed until the completion is handed on
  };
  struct Withheld {
    Completion completion;
    int64_t due_ns;
  };

  // A thread that sleeps on Traits::wake_fd must wake for withheld completions too.
  Status watch() {
    if (inner_->traits().wake_fd < 0) return {};
    static const std::string kDoing = "the fault transport cannot watch its connection";
    Result<UniqueFd> wake = sys::epoll(kDoing, Code::kTransportUnavailable),
                     timer = sys::timer(kDoing, Code::kTransportUnavailable);
    if (!wake.ok()) return wake.status();
    if (!timer.ok()) return timer.status();
    wake_ = std::move(*wake);
    timer_ = std::move(*timer);
    for (const int fd : {inner_->traits().wake_fd, timer_.get()}) {
      if (!sys::watch(wake_.get(), fd, EPOLLIN, 0))
        return sys::failed(Code::kTransportUnavailable, kDoing, "epoll_ctl", errno);
    }
    return {};
  }

  // Sets the timer; 0 stops it.
  void wake_at(int64_t when_ns) {
    if (!timer_) return;
    itimerspec when{};
    when.it_value = {when_ns / 1'000'000'000, when_ns % 1'000'000'000};
    ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
  }

  void hang() {
    hung_ = true;
    if (wake_) ::epoll_ctl(wake_.get(), EPOLL_CTL_DEL, inner_->traits().wake_fd, nullptr);
    wake_at(0);
  }

  void withhold(Completion completion, int64_t due_ns) {
    withheld_.push_back({std::move(completion), due_ns});
    rearm();
  }

  void rearm() {
    int64_t next_ns = 0;
    for (const Withheld& held : withheld_) {
      if (next_ns == 0 || held.due_ns < next_ns) next_ns = held.due_ns;
    }
    wake_at(next_ns);
  }

  // Returns true if the completion is withheld.
  bool spoil(Completion& completion) {
    const auto found = marked_.find(completion.token);
    if (found == marked_.end()) return false;
    const Mark mark = found->second;
    marked_.erase(found);
    if (mark.rule->action == FaultAction::kDelay) {
      withhold(std::move(completion), now_ns() + mark.rule->delay_ns);
      return true;
    }
    if (completion.status.ok()) flip_byte(mark.chunk, mark.number);
    return false;
  }

  bool release(std::vector<Completion>& ended) {
    if (withheld_.empty()) return false;
    const int64_t now = now_ns();
    const auto kept = std::stable_partition(withheld_.begin(), withheld_.end(),
                                            [now](const Withheld& held) { return held.due_ns <= now; });
    const bool any = kept != withheld_.begin();
    for (auto it = withheld_.begin(); it != kept; ++it) ended.push_back(std::move(it->completion));
    withheld_.erase(withheld_.begin(), kept);
    if (any) rearm();
    return any;
  }

  std::shared_ptr<Plan> plan_;
  std::unordered_map<uint64_t, Mark> marked_;
  std::vector<Withheld> withheld_;
  Status broken_;
  bool hung_ = false;
  Traits traits_;
  UniqueFd timer_, wake_;
};

class FaultTransport final : public WrappedTransport {
 public:
  FaultTransport(std::unique_ptr<Transport> inner, std::vector<FaultRule> rules)
      : WrappedTransport(std::move(inner)), plan_(std::make_shared<Plan>(std::move(rules))) {}

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>& through) override {
    lands_on_device_ |= range.device && inner_->capabilities().reaches_device_memory;
    return inner_->register_memory(range, access, through);
  }
  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes,
                         const WorkerRun& owner) override {
    if (lands_on_device_ && plan_->corrupts_data()) {
      return Status::Unavailable("it would corrupt GPU memory, which no CPU reaches",
                                 "corrupt on a transport that stages in host memory (fault+tcp)");
    }
    return WrappedTransport::open(owner_address, num_lanes, owner);
  }

 protected:
  Result<std::unique_ptr<Endpoint>> wrap(std::unique_ptr<Endpoint> inner) override {
    return std::make_unique<FaultEndpoint>(std::move(inner), plan_);
  }

 private:
  std::shared_ptr<Plan> plan_;
  bool lands_on_device_ = false;  // by one thread, before the first open()
};

}  // namespace

Result<std::unique_ptr<Transport>> fault_wrap(std::unique_ptr<Transport> inner,
                                              const TransportOptions& options) {
  Result<std::vector<FaultRule>> rules = parse_fault_plan(options.fault);
  if (!rules.ok()) return rules.status();
  return std::make_unique<FaultTransport>(std::move(inner), std::move(*rules));
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/owner.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <iterator>
#include <span>

#include "base/clock.h"
#include "base/host_identity.h"
#include "base/sys.h"
#include "transports/verbs/aside.h"

namespace kvlink::verbs {
namespace {

// An empty write detects a reader that died without disconnecting. Its queue pair costs the owner a few KiB
// until then.
constexpr int64_t kProbeNs = 5'000'000'000;
constexpr int64_t kCutNs = 2'000'000;  // round trips of any fabric; a dead reader will not answer anyway
constexpr size_t kMostServed = kServedCqes / kServedWrs;  // or their completions would not all find room
constexpr ptrdiff_t kMostOfOne = kMostServed / 2;         // of one caller's: the others get in
constexpr int64_t kExpectedNs = 30'000'000'000;           // from reply to connection
constexpr uint64_t kTimer = UINT64_MAX;
constexpr int64_t kConnectNs = 2'000'000'000;  // for all lanes of a reader at one port

}  // namespace

Result<std::unique_ptr<Owner>> Owner::make(Ports& ports, LivenessTimeouts timeouts) {
  std::unique_ptr<Owner> owner(new Owner(ports, timeouts));
  if (Status status = owner->watch_all(); !status.ok()) return status;
  return owner;
}

Owner::Owner(Ports& ports, LivenessTimeouts timeouts)
    : ports_(ports), timeouts_(timeouts), probed_ns_(now_ns()) {}

Status Owner::watch_all() {
  static const std::string kDoing = "cannot watch RDMA devices";
  Result<UniqueFd> epoll = sys::epoll(kDoing), timer = sys::timer(kDoing);
  if (!epoll.ok()) return epoll.status();
  if (!timer.ok()) return timer.status();
  epoll_ = std::move(*epoll);
  timer_ = std::move(*timer);
  bool watched = sys::watch(epoll_.get(), timer_.get(), EPOLLIN, kTimer);
  for (size_t port = 0; port < ports_.size(); ++port) watched = watched && watch(port);
  if (!watched) return sys::transport_failed(kDoing, "epoll_ctl", errno);
  const itimerspec every{{0, kLookNs}, {0, kLookNs}};
  if (timerfd_settime(timer_.get(), 0, &every, nullptr) == 0) return {};
  return sys::transport_failed(kDoing, "timerfd_settime", errno);
}

bool Owner::watch(size_t port) const {
  const auto opened = ports_.at(port);
  return sys::watch(epoll_.get(), opened->nic->events_fd(), EPOLLIN, port) &&
         (!opened->cm || sys::watch(epoll_.get(), opened->cm->events_fd(), EPOLLIN, ports_.size() + port));
}

/// Ports have other numbers now. What was left out is closed, and so no longer watched.
void Owner::watch_again() const {
  for (size_t port = 0; port < ports_.size(); ++port) unwatch(port);
  for (size_t port = 0; port < ports_.size(); ++port) static_cast<void>(watch(port));
}

void Owner::unwatch(size_t port) const {
  const auto opened = ports_.at(port);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, opened->nic->events_fd(), nullptr);
  if (opened->cm) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, opened->cm->events_fd(), nullptr);
}

/// The owner releases everything of a device that is gone, so that its removal can complete.
void Owner::look_after_ports() {
  const int64_t now = now_ns();
  for (size_t port = 0; port < ports_.size(); ++port) {
    const Ports::Change change = ports_.poll(port, now);
    if (change == Ports::Change::kBack) static_cast<void>(watch(port));
    if (change != Ports::Change::kLost) continue;
    unwatch(port);
    ports_.release(port, now, dismiss(port));
  }
}

template <typename Which>
std::vector<Owner::Served> Owner::take_out(Which which) {
  const auto taken = std::stable_partition(served_.begin(), served_.end(), std::not_fn(which));
  std::vector<Served> out(std::make_move_iterator(taken), std::make_move_iterator(served_.end()));
  served_.erase(taken, served_.end());
  return out;
}

std::vector<std::unique_ptr<Qp>> Owner::dismiss(size_t port) {
  std::lock_guard lock(mutex_);
  std::vector<Served> leaving = take_out([port](const Served& served) { return served.port == port; });
  notify(leaving, kNotifyNs);
  std::vector<std::unique_ptr<Qp>> left;
  for (Served& served : leaving) left.push_back(std::move(served.qp));
  return left;
}

std::vector<Result<std::string>> Owner::admit(ReaderId reader, std::span<const std::string> hellos) {
  std::vector<Result<std::string>> replies(hellos.size(),
                                           Status::AccessDenied("the reader's hello is malformed"));
  std::vector<std::vector<Lane>> by_port(ports_.size());
  for (size_t lane = 0; lane < hellos.size(); ++lane) {
    const auto hello = Hello::parse(hellos[lane]);
    if (!hello) continue;
    if (hello->owner_nic < by_port.size())
      by_port[hello->owner_nic].push_back({*hello, &replies[lane]});
    else
      replies[lane] = Status::AccessDenied("the reader asks for a port that does not exist");
  }
  std::erase_if(by_port, std::mem_fn(&std::vector<Lane>::empty));
  std::vector<std::future<void>> others;
  for (size_t port = 1; port < by_port.size(); ++port) {
    const auto job = [this, reader, &lanes = by_port[port]] { admit_at_port(reader, lanes); };
    others.push_back(aside(job));
    if (!others.back().valid()) job();
  }
  if (!by_port.empty()) admit_at_port(reader, by_port.front());
  others.clear();  // waits for them: they write into `replies`
  return replies;
}

void Owner::admit_at_port(ReaderId reader, std::span<const Lane> lanes) {
  const int64_t ends = now_ns() + kConnectNs;
  Status why;
  for (const Lane& lane : lanes) {
    if (why.ok() && now_ns() >= ends)
      why = Status::Unreachable("the reader's other lanes took too long to connect");
    *lane.reply = why.ok() ? admit_lane(reader, lane.hello) : why;
    if (!lane.reply->ok()) why = lane.reply->status();
  }
}

Result<std::string> Owner::admit_lane(ReaderId reader, const Hello& hello) {
  const size_t port = hello.owner_nic;
  const auto opened = reserve(reader, port);
  if (!opened.ok()) return opened.status();
  Served served{reader.connection_id, reader.caller, port, nullptr};
  Result<std::string> reply = connect(**opened, hello, served);  // the kernel may look for the peer for long
  std::lock_guard lock(mutex_);
  admitting_.erase(std::find(admitting_.begin(), admitting_.end(), reader.caller));
  if (!reply.ok()) return reply;
  if (closed_) return Status::Unavailable("this worker is closed", {});
  if ((*opened)->nic->removed()) return (*opened)->nic->check();
  served_.push_back(std::move(served));
  return reply;
}

Result<std::shared_ptr<const OpenPort>> Owner::reserve(ReaderId reader, size_t port) {
  const auto opened = ports_.at(port);
  if (!opened) return ports_.why_away(port);
  if (Status status = opened->nic->check(); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  if (closed_) return Status::Unavailable("this worker is closed", {});
  if (Status status = check_room(reader); !status.ok()) return status;
  admitting_.push_back(reader.caller);
  return opened;
}

Status Owner::check_room(ReaderId reader) const {
  if (served_.size() + admitting_.size() >= kMostServed) {
    return Status::Unavailable("this worker serves " + std::to_string(kMostServed) + " queue pairs already",
                               "give readers fewer lanes (KVLINK_LANES)");
  }
  const auto is_callers = [reader](const Served& served) { return served.caller == reader.caller; };
  if (std::count_if(served_.begin(), served_.end(), is_callers) +
          std::count(admitting_.begin(), admitting_.end(), reader.caller) >=
      kMostOfOne) {
    return Status::Unavailable("this worker serves " + std::to_string(kMostOfOne) +
                                   " queue pairs of this reader's process or host already",
                               "give readers fewer lanes (KVLINK_LANES)");
  }
  return {};
}

Result<std::string> Owner::connect(const OpenPort& opened, const Hello& hello, Served& served) const {
  Result<std::unique_ptr<Qp>> qp = Qp::create(opened.nic, *opened.cq, kServedWrs, 1);
  if (!qp.ok()) return qp.status();
  served.qp = std::move(*qp);
  if (opened.cm) {
    CmReply reply = opened.cm->address();
    const std::string secret = random_bytes(reply.secret.size());
    std::copy(secret.begin(), secret.end(), reply.secret.begin());
    served.secret = reply.secret;
    served.expected_ns = now_ns() + kExpectedNs;
    return reply.format();
  }
  if (Status status = served.qp->connect(hello.reader, timeouts_); !status.ok()) return status;
  return Reply{served.qp->address()}.format();
}

void Owner::accept_caller(size_t port, CmCaller caller) {
  const auto text = [](const Secret& secret) { return std::string_view(secret.data(), secret.size()); };
  std::lock_guard lock(mutex_);
  const auto opened = ports_.at(port);
  for (Served& served : served_) {
    if (served.port != port || served.expected_ns == 0 ||
        !same_secret(text(served.secret), text(caller.secret)))
      continue;
    served.expected_ns = 0;
    const Status status = opened->cm->accept(std::move(caller), *served.qp, timeouts_);
    if (!status.ok()) served.qp->fail(IBV_EVENT_QP_FATAL);
    return;
  }
}

bool Owner::fence(uint64_t connection_id) {
  std::vector<Served> condemned;
  std::lock_guard lock(mutex_);
  condemned =
      take_out([connection_id](const Served& served) { return served.connection_id == connection_id; });
  cut(condemned);
  const bool found = !condemned.empty();
  return found;
}

void Owner::cut(std::span<Served> condemned) {
  notify(condemned, kCutNs);
  for (const Served& served : condemned) served.qp->halt();
}

void Owner::notify(std::span<Served> leaving, int64_t most_ns) {
  const auto knows = [](const Served& served) { return served.qp->failed() || served.expected_ns != 0; };
  for (const Served& served : leaving) {
    if (!knows(served)) served.qp->break_peer();
  }
  for (const int64_t end = now_ns() + most_ns;
       !std::all_of(leaving.begin(), leaving.end(), knows) && now_ns() < end;) {
    take_answers(leaving);
  }
}

/// Records the results of probes and goodbyes.
void Owner::take_answers(std::span<Served> leaving) {
  for (size_t port = 0; port < ports_.size(); ++port) {
    const auto opened = ports_.at(port);
    std::array<ibv_wc, 16> answers;
    for (int count;
         opened && (count = opened->cq->poll(answers.data(), static_cast<int>(answers.size()))) > 0;) {
      for (const ibv_wc& answer : std::span(answers).first(static_cast<size_t>(count))) {
        const auto is_it = [&answer, port](const Served& served) {
          return served.port == port && served.qp->qpn() == answer.qp_num;
        };
        for (const std::span<Served> all : {std::span(served_), leaving}) {
          const auto found = std::find_if(all.begin(), all.end(), is_it);
          if (found == all.end()) continue;
          found->probed = false;
          if (answer.status != IBV_WC_SUCCESS) found->qp->fail(IBV_EVENT_QP_FATAL);
        }
      }
    }
  }
}

void Owner::probe_readers() {
  for (Served& served : served_) {
    if (served.probed || served.expected_ns != 0 || served.qp->failed()) continue;
    served.probed = served.qp->ask(0).ok();
  }
}

void Owner::take_failed() {
  const int64_t now = now_ns();
  std::vector<Served> failed = take_out([now](const Served& served) {
    return served.qp->failed() || (served.expected_ns != 0 && served.expected_ns < now);
  });
  for (Served& served : failed) ended_.push_back({ports_.at(served.port), std::move(served.qp)});
}

void Owner::drop_ended() {
  if (is_running(dropping_)) return;
  std::vector<Ended> ended;
  {
    std::lock_guard lock(mutex_);
    ended = std::exchange(ended_, {});
  }
  if (ended.empty()) return;
  dropping_ = aside([ended = std::move(ended)]() mutable {
    const std::vector<Ended> ends_here = std::move(ended);  // the future keeps the job, and so its ports
  });
}

void Owner::serve() {
  std::array<epoll_event, 16> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  bool ticked = false;
  for (int i = 0; i < count; ++i) {
    const uint64_t what = events[static_cast<size_t>(i)].data.u64;
    if (what == kTimer) {
      uint64_t times;
      ticked = ::read(timer_.get(), &times, sizeof times) > 0;
      continue;
    }
    const size_t port = what % ports_.size();
    const auto opened = ports_.at(port);
    if (!opened) continue;
    if (what < ports_.size()) {
      opened->nic->take_events();  // without the lock: a queue pair under destruction waits for it
    } else {
      opened->cm->take_events([this, port](CmCaller caller) { accept_caller(port, std::move(caller)); });
    }
  }
  look_after_ports();
  drop_ended();
  std::lock_guard lock(mutex_);
  take_answers({});
  take_failed();
  if (!ticked || now_ns() - probed_ns_ < kProbeNs) return;
  probed_ns_ = now_ns();
  probe_readers();
}

void Owner::close() {
  std::vector<Served> served;
  std::vector<Ended> ended;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    served = std::exchange(served_, {});
    ended = std::exchange(ended_, {});
    cut(served);
  }
  for (size_t port = 0; port < ports_.size(); ++port) {
    const auto opened = ports_.at(port);
    if (opened && opened->cm) opened->cm->stop_listening();
  }
}

}  // namespace kvlink::verbs

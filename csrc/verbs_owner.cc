// SPDX-License-Identifier: Apache-2.0
#include "verbs_owner.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include "clock.h"
#include "host.h"

namespace kvlink::verbs {
namespace {

// A reader that died without a word is found out by an empty write. Its queue pair costs the owner a few KiB
// until then.
constexpr int64_t kProbeS = 5;
constexpr int64_t kCutNs = 2'000'000;  // round trips of any fabric; who is dead will not answer anyway
constexpr uint32_t kServedWrs = 4;     // a probe and a cut
constexpr uint32_t kCqEntries = 16384;
constexpr size_t kMostServed = kCqEntries / kServedWrs;  // or their completions would not all find room
constexpr int64_t kExpectedNs = 30'000'000'000;          // from reply to connection
constexpr uint64_t kTimer = UINT64_MAX;

ibv_send_wr empty_write(uint64_t wr_id) {
  ibv_send_wr wr{};
  wr.wr_id = wr_id;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  return wr;
}

}  // namespace

Result<std::unique_ptr<Owner>> Owner::make(std::vector<std::shared_ptr<Nic>> nics,
                                           std::vector<std::shared_ptr<CmPort>> cm_ports, Patience patience) {
  std::vector<std::unique_ptr<Cq>> cqs;
  for (const auto& nic : nics) {
    Result<std::unique_ptr<Cq>> cq = Cq::create(nic, kCqEntries, false);
    if (!cq.ok()) return cq.status();
    cqs.push_back(std::move(*cq));
  }
  std::unique_ptr<Owner> owner(new Owner(std::move(nics), std::move(cm_ports), std::move(cqs), patience));
  if (Status status = owner->watch(); !status.ok()) return status;
  return owner;
}

Owner::Owner(std::vector<std::shared_ptr<Nic>> nics, std::vector<std::shared_ptr<CmPort>> cm_ports,
             std::vector<std::unique_ptr<Cq>> cqs, Patience patience)
    : nics_(std::move(nics)),
      cm_ports_(std::move(cm_ports)),
      patience_(patience),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      cqs_(std::move(cqs)) {}

Status Owner::watch() {
  bool watched = epoll_ && timer_;
  const auto add = [&](int fd, uint64_t what) {
    epoll_event event{EPOLLIN, {.u64 = what}};
    watched = watched && epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  };
  for (size_t nic = 0; nic < nics_.size(); ++nic) {
    add(nics_[nic]->events_fd(), nic);
    if (cm_ports_[nic]) add(cm_ports_[nic]->events_fd(), nics_.size() + nic);
  }
  add(timer_.get(), kTimer);
  const itimerspec every{{kProbeS, 0}, {kProbeS, 0}};
  if (watched && timerfd_settime(timer_.get(), 0, &every, nullptr) == 0) return {};
  return Status::Unavailable(std::string("watching RDMA devices: ") + std::strerror(errno),
                             "raise ulimit -n");
}

Result<std::string> Owner::admit(uint64_t connection_id, const Hello& hello) {
  if (hello.owner_nic >= nics_.size())
    return Status::AccessDenied("the reader asks for a port that there is not");
  const std::shared_ptr<Nic>& nic = nics_[hello.owner_nic];
  if (Status status = nic->check(); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  if (closed_) return Status::Unavailable("this worker is closed", {});
  if (served_.size() >= kMostServed) {
    return Status::Unavailable("this worker serves " + std::to_string(kMostServed) + " queue pairs already",
                               "give readers fewer lanes (KVLINK_LANES)");
  }
  Result<std::unique_ptr<Qp>> qp = Qp::create(nic, *cqs_[hello.owner_nic], kServedWrs, 1);
  if (!qp.ok()) return qp.status();
  if (const auto& cm = cm_ports_[hello.owner_nic]) {
    CmReply reply = cm->address();
    const std::string secret = random_bytes(reply.secret.size());
    std::copy(secret.begin(), secret.end(), reply.secret.begin());
    served_.push_back(
        {connection_id, hello.owner_nic, std::move(*qp), false, reply.secret, now_ns() + kExpectedNs});
    return reply.format();
  }
  if (Status status = (*qp)->connect(hello.reader, patience_); !status.ok()) return status;
  const Reply reply{(*qp)->address()};
  served_.push_back({connection_id, hello.owner_nic, std::move(*qp)});
  return reply.format();
}

void Owner::welcome(size_t nic, CmCaller caller) {
  const auto text = [](const Secret& secret) { return std::string_view(secret.data(), secret.size()); };
  std::lock_guard lock(mutex_);
  for (Served& served : served_) {
    if (served.nic != nic || served.expected_ns == 0 ||
        !same_secret(text(served.secret), text(caller.secret)))
      continue;
    served.expected_ns = 0;
    const Status status = cm_ports_[nic]->accept(std::move(caller), *served.qp, patience_);
    if (!status.ok()) served.qp->fail(IBV_EVENT_QP_FATAL);
    return;
  }
}

bool Owner::fence(uint64_t connection_id) {
  std::lock_guard lock(mutex_);
  std::vector<Served> condemned;
  for (Served& served : served_) {
    if (served.connection_id == connection_id) condemned.push_back(std::move(served));
  }
  std::erase_if(served_, [](const Served& served) { return served.qp == nullptr; });
  const bool found = !condemned.empty();
  cut(std::move(condemned));
  return found;
}

void Owner::cut(std::vector<Served> condemned) {
  std::erase_if(condemned,
                [](const Served& served) { return served.qp->failed() || served.expected_ns != 0; });
  for (const Served& served : condemned) served.qp->break_peer();
  size_t missing = condemned.size();
  for (const int64_t end = now_ns() + kCutNs; missing > 0 && now_ns() < end;) {
    missing -= std::min(missing, take_answers(condemned));
  }
  for (const Served& served : condemned) served.qp->halt();
}

/// Takes note of what probes and cuts came to. Returns how many of the condemned have ended.
size_t Owner::take_answers(std::span<const Served> condemned) {
  size_t num_ended = 0;
  for (const auto& cq : cqs_) {
    std::array<ibv_wc, 16> answers;
    for (int count; (count = cq->poll(answers.data(), static_cast<int>(answers.size()))) > 0;) {
      for (const ibv_wc& answer : std::span(answers).first(static_cast<size_t>(count))) {
        const auto is_it = [&answer](const Served& served) { return served.qp->qpn() == answer.qp_num; };
        const bool ended = answer.status != IBV_WC_SUCCESS;
        num_ended += ended && std::any_of(condemned.begin(), condemned.end(), is_it);
        for (Served& served : served_) {
          if (!is_it(served)) continue;
          served.probed = false;
          if (ended) served.qp->fail(IBV_EVENT_QP_FATAL);
        }
      }
    }
  }
  return num_ended;
}

void Owner::probe_readers() {
  for (Served& served : served_) {
    if (served.probed || served.expected_ns != 0 || served.qp->failed()) continue;
    ibv_send_wr wr = empty_write(0);
    served.probed = served.qp->post(&wr).ok();
  }
}

void Owner::drop_failed() {
  const int64_t now = now_ns();
  std::erase_if(served_, [now](const Served& served) {
    return served.qp->failed() || (served.expected_ns != 0 && served.expected_ns < now);
  });
}

void Owner::serve() {
  std::array<epoll_event, 16> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  bool probe = false;
  for (int i = 0; i < count; ++i) {
    const uint64_t what = events[static_cast<size_t>(i)].data.u64;
    if (what < nics_.size()) {
      nics_[what]->take_events();  // without the lock: a queue pair under destruction waits for it
    } else if (const uint64_t nic = what - nics_.size(); nic < nics_.size()) {
      cm_ports_[nic]->take_events([this, nic](CmCaller caller) { welcome(nic, std::move(caller)); });
    } else {
      uint64_t times;
      probe = ::read(timer_.get(), &times, sizeof times) > 0;
    }
  }
  std::lock_guard lock(mutex_);
  take_answers({});
  drop_failed();
  if (probe) probe_readers();
}

void Owner::close() {
  std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return;
  cut(std::exchange(served_, {}));
  cqs_.clear();
  for (const auto& cm : cm_ports_) {
    if (cm) cm->stop_listening();
  }
}

}  // namespace kvlink::verbs

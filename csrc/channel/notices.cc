// SPDX-License-Identifier: Apache-2.0
#include "channel/notices.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace kvlink::channel {

/// Forgets the caller that was silent for longest and has nothing queued. REQUIRES the lock.
void Inbox::forget_one() {
  auto oldest = callers_.end();
  for (auto each = callers_.begin(); each != callers_.end(); ++each) {
    if (each->second.bytes == 0 && (oldest == callers_.end() || each->second.used < oldest->second.used))
      oldest = each;
  }
  if (oldest != callers_.end()) callers_.erase(oldest);
}

NoticeVerdict Inbox::add(const Instance& caller, uint64_t link, Notice notice) {
  const std::lock_guard lock(mutex_);
  if (!callers_.contains(caller) && callers_.size() >= kMaxCallers) forget_one();
  Caller& from = callers_[caller];
  from.link = link;
  from.used = ++num_added_;
  if (notice.number <= from.seen) return {true, from.taken};
  const uint64_t bytes = notice.message.size() + kNoticeCost;
  if (from.bytes + bytes > kMaxNoticeBytes + kNoticeCost) return {false};
  from.seen = notice.number;
  from.bytes += bytes;
  queued_.emplace_back(caller, std::move(notice));
  return {};
}

void Inbox::take(std::vector<std::pair<std::string, std::string>>& into, const Tell& tell) {
  std::map<Instance, std::pair<uint64_t, uint64_t>> told;  // link and number
  {
    const std::lock_guard lock(mutex_);
    for (auto& [caller, notice] : std::exchange(queued_, {})) {
      Caller& from = callers_[caller];
      from.taken = notice.number;
      from.bytes -= notice.message.size() + kNoticeCost;
      told[caller] = {from.link, notice.number};
      into.emplace_back(std::move(notice.sender), std::move(notice.message));
    }
  }
  for (const auto& [caller, what] : told) tell(what.first, what.second);
}

Status Outbox::add(std::string message) {
  const std::lock_guard sending(sending_);
  uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t bytes = message.size() + kNoticeCost;
    if (bytes_ + bytes > kMaxNoticeBytes + kNoticeCost) {
      return Status::Config("the peer has not taken " + std::to_string(bytes_) +
                            " bytes of notifications, and 16 MiB may be queued");
    }
    number = ++last_;
    bytes_ += bytes;
    queued_.emplace_back(number, message);
  }
  if (send_) send_(number, message);
  return {};
}

void Outbox::attach(Send send) {
  const std::lock_guard sending(sending_);
  std::deque<std::pair<uint64_t, std::string>> queued;
  {
    const std::lock_guard lock(mutex_);
    queued = queued_;
  }
  for (const auto& [number, message] : queued) send(number, message);
  send_ = std::move(send);
}

void Outbox::detach() {
  const std::lock_guard sending(sending_);
  send_ = {};
}

void Outbox::taken(uint64_t number) {
  const std::lock_guard lock(mutex_);
  while (!queued_.empty() && queued_.front().first <= number) {
    bytes_ -= queued_.front().second.size() + kNoticeCost;
    queued_.pop_front();
  }
}

bool Outbox::empty() const {
  const std::lock_guard lock(mutex_);
  return queued_.empty();
}

}  // namespace kvlink::channel

// SPDX-License-Identifier: Apache-2.0
// Notices at both ends: in order, none twice, and at most kMaxNoticeBytes that nobody has taken yet.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "channel/messages.h"

namespace kvlink::channel {

/// Each notice counts so much beside its message, so that empty ones are bounded as well.
inline constexpr uint64_t kNoticeCost = 64;

/// The owner's end. Any thread.
class Inbox {
 public:
  /// Tells the caller at a link that its notices up to `number` were taken.
  using Tell = std::function<void(uint64_t link, uint64_t number)>;

  /// Takes a notice that arrived, or drops one that had arrived before over another link.
  NoticeVerdict add(const Instance& caller, uint64_t link, Notice notice);
  /// Appends (sender, message) of all that is queued.
  void take(std::vector<std::pair<std::string, std::string>>& into, const Tell& tell);

 private:
  static constexpr size_t kMaxCallers = 4096;

  struct Caller {
    uint64_t seen = 0;   // the last number that arrived
    uint64_t taken = 0;  // the last one that was taken
    uint64_t link = 0;   // the newest
    uint64_t bytes = 0;  // queued
    uint64_t used = 0;   // when it came last, counted in notices
  };
  void forget_one();

  Mutex mutex_;  // guards everything below
  std::map<Instance, Caller> callers_;
  std::deque<std::pair<Instance, Notice>> queued_;
  uint64_t num_added_ = 0;
};

/// The caller's end for one owner. Any thread. A notice stays until the owner's user has taken it, and is
/// sent again over the next link to the same instance.
class Outbox {
 public:
  /// Sends one notice over a link that works.
  using Send = std::function<void(uint64_t number, std::string_view message)>;

  /// Queues a notice, and sends it if there is a link. Returns kConfig if too much is queued.
  Status add(std::string message);
  /// A link was made: sends all that is queued, and later what is added, until detach(). `send` may lock what
  /// taken() is called under.
  void attach(Send send);
  void detach();
  void taken(uint64_t number);
  bool empty() const;

 private:
  Mutex sending_;  // keeps the order of what is sent; taken before mutex_, never under it
  Send send_;      // guarded by it

  mutable Mutex mutex_;  // guards everything below
  std::deque<std::pair<uint64_t, std::string>> queued_;
  uint64_t last_ = 0, bytes_ = 0;
};

}  // namespace kvlink::channel

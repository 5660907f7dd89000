// SPDX-License-Identifier: Apache-2.0
// The plan of the fault transport (TransportOptions::fault):
//
// clang-format off
//
//   plan   := rule (";" rule)*                 the first rule that hits a post decides
//   rule   := action ["-" target] ["=" time] "@" when
//   action := delay     withholds the completion for `time`
//           | drop      never executes nor completes the post
//           | hang      completes nothing on this endpoint from here on
//           | fail      completes with kPeerUnreachable without executing
//           | deny      completes with kAccessDenied without executing
//           | corrupt   flips one byte that landed; in a slot, within its first word
//           | break     loses this endpoint's connection
//   target := slot | data                      slot: reads whose operations all have at most 64 bytes;
//                                              data: all others, except those that try a new connection
//   time   := number ("us" | "ms" | "s")       only with delay
//   when   := N | A ".." B | "every:" K        1-based number of post_read, over all endpoints of the transport,
//                                              counted among the posts of the rule's target
//
// For example "drop@3", "delay=5ms@1..10", "corrupt-data@every:7;hang-slot@2".
// clang-format on
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvlink {

enum class FaultAction : uint8_t { kDelay, kDrop, kHang, kFail, kDeny, kCorrupt, kBreak };
enum class FaultTarget : uint8_t { kAny, kSlot, kData };

struct FaultRule {
  FaultAction action = FaultAction::kDrop;
  FaultTarget target = FaultTarget::kAny;
  uint64_t first = 0, last = 0;  // when every == 0
  uint64_t every = 0;
  int64_t delay_ns = 0;

  bool hits(uint64_t number) const {
    return every != 0 ? number % every == 0 : first <= number && number <= last;
  }
};

/// An empty plan has no rules. Returns kConfig with the grammar if the plan does not parse.
Result<std::vector<FaultRule>> parse_fault_plan(std::string_view plan);

}  // namespace kvlink

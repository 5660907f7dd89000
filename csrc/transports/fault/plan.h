// SPDX-License-Identifier: Apache-2.0
// The plan of the fault transport (TransportOptions::fault):
//
//   plan   := rule (";" rule)*                 the first rule that hits a post decides
//   rule   := action ["-" target] ["=" time] "@" when
//   action := delay     completion withheld for `time`
//           | drop      never completes, never executed
//           | hang      this endpoint completes nothing from here on
//           | fail      completes with kPeerUnreachable, not executed
//           | deny      completes with kAccessDenied, not executed
//           | corrupt   lands with one byte flipped; in a slot, within its first word
//           | break     this endpoint's connection is lost
//   target := slot | data                      reads whose operations all have at most 64 bytes, or the
//   others time   := number ("us" | "ms" | "s")       of delay, and only there when   := N | A ".." B |
//   "every:" K        1-based number of post_read, over all endpoints of the transport,
//                                              counted among the posts of the rule's target
//   e.g. "drop@3", "delay=5ms@1..10", "corrupt-data@every:7;hang-slot@2"
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

/// Empty: no rules. kConfig with the grammar when it does not parse.
Result<std::vector<FaultRule>> parse_fault_plan(std::string_view plan);

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The ticket, which a reader needs to pull one request from one owner. kvlink/ticket/__init__.py describes
// the bytes. A reader refuses whatever a writer cannot have written, before it allocates for it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "lease/lease_words.h"

namespace kvlink {

inline constexpr size_t kMaxTicketBlocks = 1 << 20, kMaxTicketSlots = 1 << 20, kSignatureBytes = 16;
inline constexpr size_t kTraceBytes = 25, kMaxDigestBytes = 4 << 20;

/// The unit that a lease slot's `ready` counts.
enum class ReadyUnit : uint8_t { kBlocks, kLayers, kTokens };

struct TicketGroup {
  uint32_t num_blocks = 0, num_tokens = 0;
};

/// Secret: its holder may read and settle.
struct Ticket {
  std::string request_id, worker_id, agent;
  uint64_t epoch = 0;
  std::vector<LeaseSeat> seats;
  std::vector<uint32_t> block_ids;  // of all groups, one after the other
  uint32_t num_tokens = 0, ready = 0;
  ReadyUnit ready_unit = ReadyUnit::kBlocks;
  uint16_t rank = 0, num_ranks = 1;
  uint32_t ttl_ms = 0;
  std::vector<TicketGroup> groups;  // empty, or 2 and more
  std::string signature;            // empty, or kSignatureBytes
  std::string trace;                // empty, or kTraceBytes
  uint8_t digest_bytes = 0;         // of each
  std::string digests;
  uint64_t model = 0;

  bool is_soft() const { return seats.size() == 1 && seats.front().is_shared(); }
};

/// Returns kConfig if a field exceeds its bound.
Result<std::string> write_ticket(const Ticket& ticket);
Result<Ticket> read_ticket(std::string_view blob);
/// The same, and reuses the memory of `into`, whose content is not defined after a failure.
Status read_ticket_into(std::string_view blob, Ticket& into);

/// Signs by HMAC-SHA256. REQUIRES a ticket that write_ticket() takes.
void sign_ticket(Ticket& ticket, std::string_view key);
/// Returns kAccessDenied unless one of the keys signed the ticket.
Status check_signature(const Ticket& ticket, std::span<const std::string> keys);

}  // namespace kvlink

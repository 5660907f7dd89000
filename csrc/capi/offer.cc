// SPDX-License-Identifier: Apache-2.0
#include "capi/offer.h"

#include <algorithm>
#include <vector>

#include "capi/times.h"

namespace kvlink::capi {
namespace {

constexpr uint64_t kTtlUs = 30'000'000;

/// Returns kConfig unless the blocks are different ones of the group, and as many as the tokens need.
Outcome check_blocks(std::span<const uint32_t> blocks, uint32_t num_tokens, const CardLayout& group) {
  std::vector<bool> seen(group.memory.num_blocks);
  for (const uint32_t block : blocks) {
    if (block >= group.memory.num_blocks) {
      return refuse("block " + std::to_string(block) + " is offered, and the group has " +
                    std::to_string(group.memory.num_blocks));
    }
    if (seen[block]) return refuse("block " + std::to_string(block) + " is offered twice");
    seen[block] = true;
  }
  const uint64_t block_tokens = group.memory.block_tokens;
  if (group.is_state || (num_tokens + block_tokens - 1) / block_tokens == blocks.size()) return {};
  return refuse(std::to_string(num_tokens) + " tokens do not fit " + std::to_string(blocks.size()) +
                " blocks of " + std::to_string(block_tokens) + " tokens");
}

Outcome take_groups(const kvl_offer_options& options, const std::vector<CardLayout>& groups, Ticket& ticket) {
  if (std::max(options.num_groups, 1u) != groups.size() || (groups.size() > 1 && !options.group_blocks) ||
      (options.num_blocks > 0 && !options.blocks) || options.num_blocks > kMaxTicketBlocks) {
    return refuse("the worker has " + std::to_string(groups.size()) +
                  " cache groups: blocks, group_blocks and num_groups must name the blocks of each");
  }
  if (options.num_tokens == 0) return refuse("num_tokens must not be 0");
  ticket.block_ids.assign(options.blocks, options.blocks + options.num_blocks);
  ticket.num_tokens = options.num_tokens;
  if (groups.size() == 1) return check_blocks(ticket.block_ids, options.num_tokens, groups[0]);
  uint64_t first = 0;
  for (size_t index = 0; index < groups.size(); ++index) {
    const TicketGroup group{options.group_blocks[index], options.group_tokens && !groups[index].is_state
                                                             ? options.group_tokens[index]
                                                             : options.num_tokens};
    if (first + group.num_blocks > ticket.block_ids.size() || group.num_tokens > options.num_tokens) {
      return refuse("group_blocks add up to more than num_blocks, or a group keeps more than num_tokens");
    }
    const std::span<const uint32_t> blocks = std::span(ticket.block_ids).subspan(first, group.num_blocks);
    if (Outcome outcome = check_blocks(blocks, group.num_tokens, groups[index]); !outcome.ok())
      return outcome;
    ticket.groups.push_back(group);
    first += group.num_blocks;
  }
  return first == ticket.block_ids.size() ? Outcome{} : refuse("group_blocks add up to less than num_blocks");
}

/// How much is written, and how readers follow the rest.
Outcome take_ready(const kvl_offer_options& options, const std::vector<CardLayout>& groups, Ticket& ticket) {
  if (options.ready_unit > KVL_READY_TOKENS) return refuse("ready_unit is none of KVL_READY_*");
  const bool streams = (options.flags & KVL_OFFER_STREAM) != 0;
  ticket.ready_unit = groups.size() > 1 ? ReadyUnit::kTokens : static_cast<ReadyUnit>(options.ready_unit);
  if (streams && groups.size() > 1 && options.ready_unit != KVL_READY_TOKENS) {
    return refuse("readers follow several cache groups by tokens only: KVL_READY_TOKENS");
  }
  uint32_t units = static_cast<uint32_t>(ticket.block_ids.size());
  if (ticket.ready_unit == ReadyUnit::kTokens) units = ticket.num_tokens;
  if (ticket.ready_unit == ReadyUnit::kLayers) {
    units = 0;
    for (const Plane& plane : groups[0].memory.planes) units = std::max(units, plane.layer + 1);
  }
  ticket.ready = streams ? options.ready : units;
  if (ticket.ready <= units) return {};
  return refuse("ready is " + std::to_string(options.ready) + ", and there are " + std::to_string(units) +
                " units");
}

Outcome take_options(const kvl_offer_options& options, const Worker& worker, Ticket& ticket) {
  if (options.flags & ~uint32_t{KVL_OFFER_STREAM})
    return refuse("kvl_offer_options.flags has bits that are not known");
  if (Outcome outcome = take_text(options.request_id, ticket.request_id, "request_id"); !outcome.ok())
    return outcome;
  if (Status status = check_name(ticket.request_id, "request_id"); !status.ok()) return status;
  if (options.readers > kMaxSeats) return refuse("an offer has 1 to 255 readers");
  if (Outcome outcome = take_groups(options, worker.groups(), ticket); !outcome.ok()) return outcome;
  return take_ready(options, worker.groups(), ticket);
}

}  // namespace

Outcome Offer::open(const std::shared_ptr<Worker>& worker, const kvl_offer_options* given,
                    kvl_handle& handle) {
  kvl_offer_options options;
  if (Outcome outcome = take_struct(given, options, "kvl_offer_options"); !outcome.ok()) return outcome;
  if (!worker->started()) return refuse("this worker has not started");
  Ticket ticket;
  if (Outcome outcome = take_options(options, *worker, ticket); !outcome.ok()) return outcome;
  int64_t ttl_ns = 0;
  if (Outcome outcome = take_time(options.ttl_us, kTtlUs, ttl_ns); !outcome.ok()) return outcome;
  ticket.ttl_ms = static_cast<uint32_t>(ttl_ns / 1'000'000);
  ticket.worker_id = worker->id();
  ticket.agent = worker->setup().agent;
  ticket.epoch = worker->epoch();
  const CardLayout& layout = worker->groups().front();
  ticket.rank = static_cast<uint16_t>(layout.tp_rank);
  ticket.num_ranks = static_cast<uint16_t>(layout.tp_size);
  ticket.model = worker->model();
  handle = Table::get().reserve();
  worker->follow_offer(handle, options.user);
  Outcome outcome = [&]() -> Outcome {
    auto seats = worker->engine().grant(handle, std::max(options.readers, 1u), ticket.ready, ttl_ns);
    if (!seats.ok()) return seats.status();
    ticket.seats = std::move(*seats);
    if (!worker->setup().ticket_keys.empty()) sign_ticket(ticket, worker->setup().ticket_keys.front());
    Result<std::string> written = write_ticket(ticket);
    if (!written.ok()) return written.status();
    return Table::get().put(handle, std::make_shared<Offer>(worker, std::move(*written)));
  }();
  if (outcome.ok()) return outcome;
  worker->forget_offer(handle);
  worker->engine().leases().abort(handle);
  Table::get().remove(handle);
  return outcome;
}

}  // namespace kvlink::capi

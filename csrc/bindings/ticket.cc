// SPDX-License-Identifier: Apache-2.0
// The codec of tickets. In Python a ticket is the tuple of its fields that kvlink/_core/__init__.pyi lists.
#include "codec/ticket.h"

#include <pybind11/stl.h>

#include <cstring>

#include "bindings/bindings.h"
#include "bindings/lease_seat.h"

namespace kvlink {
namespace {

template <typename T>
py::bytes packed(const std::vector<T>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)};
}

template <typename T>
void unpack(std::string_view bytes, std::vector<T>& into) {
  if (bytes.size() % sizeof(T) != 0) raise(Status::Config("a list of numbers ends within a number"));
  into.resize(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(into.data(), bytes.data(), bytes.size());
}

py::tuple read(std::string_view blob) {
  const Ticket ticket = take(read_ticket(blob));
  return py::make_tuple(ticket.request_id, ticket.worker_id, ticket.agent, ticket.epoch, ticket.seats,
                        packed(ticket.block_ids), packed(ticket.groups), ticket.num_tokens, ticket.ready,
                        static_cast<uint8_t>(ticket.ready_unit), ticket.rank, ticket.num_ranks, ticket.ttl_ms,
                        py::bytes(ticket.signature), py::bytes(ticket.trace), ticket.digest_bytes,
                        py::bytes(ticket.digests), ticket.model);
}

py::bytes write(std::string request_id, std::string worker_id, std::string agent, uint64_t epoch,
                std::vector<LeaseSeat> seats, std::string_view block_ids, std::string_view groups,
                uint32_t num_tokens, uint32_t ready, uint8_t ready_unit, uint16_t rank, uint16_t num_ranks,
                uint32_t ttl_ms, std::string signature, std::string trace, uint8_t digest_bytes,
                std::string digests, uint64_t model) {
  Ticket ticket{.request_id = std::move(request_id),
                .worker_id = std::move(worker_id),
                .agent = std::move(agent),
                .epoch = epoch,
                .seats = std::move(seats),
                .block_ids = {},
                .num_tokens = num_tokens,
                .ready = ready,
                .ready_unit = static_cast<ReadyUnit>(ready_unit),
                .rank = rank,
                .num_ranks = num_ranks,
                .ttl_ms = ttl_ms,
                .groups = {},
                .signature = std::move(signature),
                .trace = std::move(trace),
                .digest_bytes = digest_bytes,
                .digests = std::move(digests),
                .model = model};
  unpack(block_ids, ticket.block_ids);
  unpack(groups, ticket.groups);
  return take(write_ticket(ticket));
}

}  // namespace

void register_ticket(py::module_& m) {
  m.def("read_ticket", &read);
  m.def("write_ticket", &write);
}

}  // namespace kvlink

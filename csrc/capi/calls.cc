// SPDX-License-Identifier: Apache-2.0
// The functions of capi/kvlink.h. Each passes through call(), so no exception leaves the library.
#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "capi/layouts.h"
#include "capi/offer.h"
#include "capi/peer.h"
#include "capi/pull.h"
#include "capi/table.h"
#include "capi/times.h"
#include "capi/worker.h"
#include "memory/host_memory.h"

namespace kvlink::capi {
namespace {

constexpr uint64_t kConnectUs = 10'000'000;
constexpr size_t kMostKeys = 8, kLeastKeyBytes = 32, kMostKeysBytes = 8192;

template <typename Body>
int32_t call(kvl_error* error, Body body) noexcept {
  if (Table::inherited()) {
    report(error, KVL_FORKED, "this process was forked from the one that uses kvlink",
           "start it by spawn or exec, or fork before the first worker", StaleReason::kUnknown);
    return KVL_FORKED;
  }
  try {
    const Outcome outcome = body();
    if (error) {
      const Status status = outcome.status();
      report(error, outcome.code(), status.what(), status.fix(), status.stale());
    }
    return outcome.code();
  } catch (const std::bad_alloc&) {
    report(error, KVL_MEMORY, "this process is out of memory", {}, StaleReason::kUnknown);
    return KVL_MEMORY;
  } catch (const std::exception& broken) {
    report(error, KVL_INTERNAL, broken.what(), {}, StaleReason::kUnknown);
  } catch (...) {
    report(error, KVL_INTERNAL, "an unknown exception", {}, StaleReason::kUnknown);
  }
  return KVL_INTERNAL;
}

/// The same for a function of one object, of class T.
template <typename T, typename Body>
int32_t call_on(kvl_handle handle, kvl_error* error, Body body) noexcept {
  return call(error, [&]() -> Outcome {
    const std::shared_ptr<T> object = Table::get().find<T>(handle);
    if (!object) return {KVL_HANDLE, "there is no object of this kind with this handle"};
    return body(object);
  });
}

/// The same for a worker that has started.
template <typename Body>
int32_t call_started(kvl_handle worker, kvl_error* error, Body body) noexcept {
  return call_on<Worker>(worker, error, [&](const std::shared_ptr<Worker>& found) -> Outcome {
    if (!found->started()) return refuse("this worker has not started");
    return body(found);
  });
}

Outcome give_bytes(const Space& space, std::string_view bytes) {
  Outcome outcome = space.check();
  return outcome.ok() ? space.give(bytes) : std::move(outcome);
}

/// Grows from one start of a worker to the next, also of one in Python.
uint64_t wall_clock_ns() {
  using std::chrono::nanoseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<nanoseconds>(now).count());
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

Outcome check_keys(const std::vector<std::string>& keys) {
  const bool fit = keys.size() <= kMostKeys &&
                   std::all_of(keys.begin(), keys.end(),
                               [](const std::string& key) { return key.size() >= kLeastKeyBytes; });
  return fit ? Outcome{} : refuse("ticket_keys has at most 8 secrets of 32 characters or more, one a line");
}

Outcome check_transports(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (name == "cuda") return refuse("pools in GPU memory are served in Python only: cuda");
    if (name != "loopback" && name != "shm" && name != "cma" && name != "tcp" && name != "verbs") {
      return refuse("there is no transport " + name + "; known are loopback, shm, cma, verbs, tcp");
    }
  }
  return {};
}

Outcome take_setup(const kvl_worker_options* given, WorkerSetup& setup) {
  kvl_worker_options options;
  if (Outcome outcome = take_struct(given, options, "kvl_worker_options"); !outcome.ok()) return outcome;
  std::string names, host, nics, keys;
  EngineOptions& engine = setup.engine;
  for (const auto& [from, into, name, most] :
       {std::tuple(options.worker_id, &setup.worker_id, "worker_id", kMaxNameBytes),
        std::tuple(options.agent, &setup.agent, "agent", kMaxNameBytes),
        std::tuple(options.transports, &names, "transports", kMaxNameBytes),
        std::tuple(options.host, &host, "host", kMaxNameBytes),
        std::tuple(options.advertise, &engine.transport.advertise, "advertise", kMaxNameBytes),
        std::tuple(options.nics, &nics, "nics", kMaxNameBytes),
        std::tuple(options.ticket_keys, &keys, "ticket_keys", kMostKeysBytes)}) {
    if (Outcome outcome = take_text(from, *into, name, most); !outcome.ok()) return outcome;
  }
  if (Status status = check_name(setup.worker_id, "worker_id"); !status.ok()) return status;
  if (options.flags & ~uint32_t{KVL_WORKER_CHANNEL})
    return refuse("kvl_worker_options.flags has bits that are not known");
  if (options.port > 65535 || options.channel_port > 65535) return refuse("a port must be 0 to 65535");
  if (options.reserved != 0) return refuse("kvl_worker_options.reserved must be 0");
  setup.listens = (options.flags & KVL_WORKER_CHANNEL) != 0;
  setup.channel_port = static_cast<uint16_t>(options.channel_port);
  if (setup.channel_port != 0 && !setup.listens) return refuse("channel_port needs KVL_WORKER_CHANNEL");
  setup.ticket_keys = split(keys, '\n');
  if (Outcome outcome = check_keys(setup.ticket_keys); !outcome.ok()) return outcome;
  if (names.empty()) names = nics.empty() ? "shm,cma,tcp" : "shm,cma,verbs,tcp";
  engine.transports = split(names, ',');
  if (Outcome outcome = check_transports(engine.transports); !outcome.ok()) return outcome;
  engine.transport.nics.emplace();
  for (std::string& port : split(nics, ',')) engine.transport.nics->push_back({std::move(port), 1, true});
  if (!host.empty()) engine.transport.host = host;
  engine.transport.port = static_cast<uint16_t>(options.port);
  engine.epoch = options.epoch == 0 ? wall_clock_ns() : options.epoch;
  engine.transport.self = {setup.worker_id, engine.epoch};
  if (options.num_lease_slots != 0) engine.num_lease_slots = options.num_lease_slots;
  if (options.num_progress_threads != 0) engine.num_progress_threads = options.num_progress_threads;
  engine.num_lanes = options.num_lanes;
  engine.bounce_bytes = 0;  // no pool here is in GPU memory
  return take_time(options.inline_us, static_cast<uint64_t>(engine.inline_ns / 1000), engine.inline_ns);
}

Outcome add_region(MemoryRange range, std::shared_ptr<HostMemory> memory, kvl_handle* region) {
  return Table::get().add(std::make_shared<Region>(std::move(range), std::move(memory)), *region);
}

Outcome start_pull(const kvl_pull_options* options, kvl_handle* handle) {
  PullTerms terms;
  if (Outcome outcome = terms.take(options); !outcome.ok()) return outcome;
  std::shared_ptr<Pull> pull;
  if (Outcome outcome = terms.start(pull); !outcome.ok()) return outcome;
  if (!handle) {
    if (!pull->done()) pull->wait(-1);
    return PullObject::outcome_of(*pull);
  }
  auto object = std::make_shared<PullObject>(terms.peer(), pull, terms.options().user);
  if (Outcome outcome = Table::get().add(std::move(object), *handle); !outcome.ok()) return outcome;
  if (terms.options().flags & KVL_PULL_NOTIFY) {
    const auto& queue = terms.peer()->worker()->queue();
    if (!pull->notify(queue, *handle)) queue->push(*handle);
  }
  return {};
}

Outcome tell_ticket(std::string_view bytes, kvl_ticket_info* info) {
  const Result<Ticket> ticket = read_ticket(bytes);
  if (!ticket.ok()) return ticket.status();
  kvl_ticket_info told{};
  told.num_blocks = static_cast<uint32_t>(ticket->block_ids.size());
  told.num_groups = static_cast<uint32_t>(std::max<size_t>(ticket->groups.size(), 1));
  told.num_tokens = ticket->num_tokens;
  told.num_readers = static_cast<uint32_t>(ticket->seats.size());
  told.ready = ticket->ready;
  told.ready_unit = static_cast<uint32_t>(ticket->ready_unit);
  told.epoch = ticket->epoch;
  told.ttl_us = uint64_t{ticket->ttl_ms} * 1000;
  ticket->worker_id.copy(told.worker_id, sizeof told.worker_id - 1);
  ticket->request_id.copy(told.request_id, sizeof told.request_id - 1);
  return give_struct(told, info, "kvl_ticket_info");
}

Outcome give_events(Worker& worker, kvl_event* events, uint32_t capacity, uint32_t* num_events) {
  if (!events || !num_events || capacity == 0)
    return refuse("events or num_events is NULL, or capacity is 0");
  const uint32_t stride = events->size;
  if (stride < sizeof(kvl_event) || stride > kMostStructBytes)
    return refuse("kvl_event.size is wrong; set it to sizeof(kvl_event)");
  *num_events = 0;
  for (kvl_event& event : worker.take_events(capacity)) {
    char* const place = reinterpret_cast<char*>(events) + size_t{stride} * (*num_events)++;
    event.size = stride;
    std::memcpy(place, &event, sizeof event);
  }
  return {};
}

/// For calls on an offer's lease, which `body` returns false for once it has ended.
template <typename Body>
int32_t call_on_lease(kvl_handle offer, kvl_error* error, Body body) noexcept {
  return call_on<Offer>(offer, error, [&](const std::shared_ptr<Offer>& found) -> Outcome {
    if (body(found->worker()->engine())) return {};
    return {KVL_ENDED, "the offer has ended"};
  });
}

}  // namespace
}  // namespace kvlink::capi

using namespace kvlink;        // NOLINT: the functions below are outside of it
using namespace kvlink::capi;  // NOLINT

int32_t kvl_about(kvl_about_info* about, kvl_error* error) {
  return call(error, [&] {
    kvl_about_info told{0, KVL_VERSION_MAJOR, KVL_VERSION_MINOR, kProtocolVersion};
    return give_struct(told, about, "kvl_about_info");
  });
}

int32_t kvl_region_alloc(uint64_t bytes, uint32_t flags, kvl_handle* region, void** base, kvl_error* error) {
  return call(error, [&]() -> Outcome {
    if (!region || !base) return refuse("region or base is NULL");
    if (flags & ~uint32_t{KVL_REGION_HUGE_PAGES}) return refuse("flags has bits that are not known");
    auto memory = HostMemory::allocate(bytes, (flags & KVL_REGION_HUGE_PAGES) != 0);
    if (!memory.ok()) return memory.status();
    *base = (*memory)->range().base;
    return add_region((*memory)->range(), *memory, region);
  });
}

int32_t kvl_region_wrap(void* base, uint64_t bytes, kvl_handle* region, kvl_error* error) {
  return call(error, [&]() -> Outcome {
    if (!base || bytes == 0 || !region) return refuse("base or region is NULL, or bytes is 0");
    return add_region({.base = static_cast<std::byte*>(base), .bytes = bytes}, nullptr, region);
  });
}

int32_t kvl_worker_open(const kvl_worker_options* options, kvl_handle* worker, kvl_error* error) {
  return call(error, [&]() -> Outcome {
    if (!worker) return refuse("worker is NULL");
    WorkerSetup setup;
    if (Outcome outcome = take_setup(options, setup); !outcome.ok()) return outcome;
    Result<std::shared_ptr<Worker>> opened = Worker::open(std::move(setup));
    if (!opened.ok()) return opened.status();
    return Table::get().add(std::move(*opened), *worker);
  });
}

int32_t kvl_worker_add_region(kvl_handle worker, kvl_handle region, uint32_t* index, kvl_error* error) {
  return call_on<Worker>(worker, error, [&](const std::shared_ptr<Worker>& found) -> Outcome {
    const auto memory = Table::get().find<Region>(region);
    if (!memory) return {KVL_HANDLE, "there is no region with this handle"};
    if (!index) return refuse("index is NULL");
    return found->add_region(memory, *index);
  });
}

int32_t kvl_worker_add_group(kvl_handle worker, const kvl_layout* layout, kvl_error* error) {
  return call_on<Worker>(worker, error, [&](const std::shared_ptr<Worker>& found) -> Outcome {
    CardLayout group;
    if (Outcome outcome = take_layout(layout, group); !outcome.ok()) return outcome;
    return found->add_group(std::move(group));
  });
}

int32_t kvl_worker_start(kvl_handle worker, kvl_error* error) {
  return call_on<Worker>(worker, error, [](const auto& found) { return found->start(); });
}

int32_t kvl_worker_card(kvl_handle worker, void* out, uint64_t capacity, uint64_t* out_bytes,
                        kvl_error* error) {
  return call_started(worker, error, [&](const std::shared_ptr<Worker>& found) -> Outcome {
    Result<std::string> card = found->card();
    if (!card.ok()) return card.status();
    return give_bytes({out, capacity, out_bytes}, *card);
  });
}

int32_t kvl_answer(kvl_handle worker, uint64_t caller, const void* message, uint64_t message_bytes, void* out,
                   uint64_t capacity, uint64_t* out_bytes, kvl_error* error) {
  return call_started(worker, error, [&](const std::shared_ptr<Worker>& found) -> Outcome {
    std::string_view bytes;
    const Space space{out, capacity, out_bytes};
    if (Outcome outcome = take_bytes(message, message_bytes, bytes, "message"); !outcome.ok()) return outcome;
    if (Outcome outcome = space.check(); !outcome.ok()) return outcome;
    return found->answer_into(caller, bytes, space);
  });
}

int32_t kvl_worker_count(kvl_handle worker, kvl_worker_stats* stats, kvl_error* error) {
  return call_started(worker, error, [&](const std::shared_ptr<Worker>& found) -> Outcome {
    kvl_worker_stats counted{};
    if (Outcome outcome = found->count(counted); !outcome.ok()) return outcome;
    return give_struct(counted, stats, "kvl_worker_stats");
  });
}

int32_t kvl_event_fd(kvl_handle worker, int32_t* fd, kvl_error* error) {
  return call_on<Worker>(worker, error, [&](const std::shared_ptr<Worker>& found) -> Outcome {
    if (!fd) return refuse("fd is NULL");
    *fd = found->queue()->fd();
    return {};
  });
}

int32_t kvl_events(kvl_handle worker, kvl_event* events, uint32_t capacity, uint32_t* num_events,
                   kvl_error* error) {
  return call_started(worker, error, [&](const std::shared_ptr<Worker>& found) {
    return give_events(*found, events, capacity, num_events);
  });
}

int32_t kvl_peer_open(kvl_handle worker, const void* card, uint64_t card_bytes, uint64_t timeout_us,
                      kvl_handle* peer, kvl_error* error) {
  return call_on<Worker>(worker, error, [&](const std::shared_ptr<Worker>& found) -> Outcome {
    if (!peer) return refuse("peer is NULL");
    std::string_view bytes;
    int64_t timeout_ns = 0;
    if (Outcome outcome = take_bytes(card, card_bytes, bytes, "card"); !outcome.ok()) return outcome;
    if (Outcome outcome = take_time(timeout_us, kConnectUs, timeout_ns); !outcome.ok()) return outcome;
    Result<std::shared_ptr<Peer>> opened = Peer::open(found, bytes, timeout_ns);
    if (!opened.ok()) return opened.status();
    return Table::get().add(std::move(*opened), *peer);
  });
}

int32_t kvl_peer_step(kvl_handle peer, const void* answer, uint64_t answer_bytes, void* out,
                      uint64_t capacity, uint64_t* out_bytes, kvl_error* error) {
  return call_on<Peer>(peer, error, [&](const std::shared_ptr<Peer>& found) -> Outcome {
    std::string_view bytes;
    const Space space{out, capacity, out_bytes};
    if (Outcome outcome = take_bytes(answer, answer_bytes, bytes, "answer"); !outcome.ok()) return outcome;
    if (Outcome outcome = space.check(); !outcome.ok()) return outcome;
    return found->step(bytes, space);
  });
}

int32_t kvl_peer_connect(kvl_handle peer, uint64_t user, kvl_error* error) {
  return call_on<Peer>(peer, error,
                       [&](const std::shared_ptr<Peer>& found) { return Peer::connect(found, peer, user); });
}

int32_t kvl_peer_wait(kvl_handle peer, uint64_t timeout_us, kvl_error* error) {
  return call_on<Peer>(peer, error,
                       [&](const std::shared_ptr<Peer>& found) { return found->wait(wait_ns(timeout_us)); });
}

int32_t kvl_offer_open(kvl_handle worker, const kvl_offer_options* options, kvl_handle* offer,
                       kvl_error* error) {
  return call_on<Worker>(worker, error, [&](const std::shared_ptr<Worker>& found) -> Outcome {
    if (!offer) return refuse("offer is NULL");
    kvl_handle made;
    Outcome outcome = Offer::open(found, options, made);
    if (outcome.ok()) *offer = made;
    return outcome;
  });
}

int32_t kvl_offer_ticket(kvl_handle offer, void* out, uint64_t capacity, uint64_t* out_bytes,
                         kvl_error* error) {
  return call_on<Offer>(offer, error, [&](const auto& found) {
    return give_bytes({out, capacity, out_bytes}, found->ticket());
  });
}

int32_t kvl_offer_set_ready(kvl_handle offer, uint64_t ready, kvl_error* error) {
  return call_on_lease(offer, error, [&](Engine& engine) { return engine.set_ready(offer, ready); });
}

int32_t kvl_offer_extend(kvl_handle offer, uint64_t ttl_us, kvl_error* error) {
  if (ttl_us == 0 || ttl_us > kMostUs) {
    return call(error, [] { return refuse("ttl_us must be 1 to 86400000000, which is a day"); });
  }
  const auto ttl_ns = static_cast<int64_t>(ttl_us) * 1000;
  return call_on_lease(offer, error,
                       [&](Engine& engine) { return engine.leases().extend(offer, ttl_ns, now_ns()); });
}

int32_t kvl_offer_abort(kvl_handle offer, kvl_error* error) {
  return call_on_lease(offer, error, [&](Engine& engine) { return engine.leases().abort(offer); });
}

int32_t kvl_ticket_read(const void* ticket, uint64_t ticket_bytes, kvl_ticket_info* info, kvl_error* error) {
  return call(error, [&]() -> Outcome {
    std::string_view bytes;
    if (Outcome outcome = take_bytes(ticket, ticket_bytes, bytes, "ticket"); !outcome.ok()) return outcome;
    return tell_ticket(bytes, info);
  });
}

int32_t kvl_plan_make(const kvl_pull_options* options, kvl_handle* plan, kvl_error* error) {
  return call(error, [&]() -> Outcome {
    if (!plan) return refuse("plan is NULL");
    PullTerms terms;
    if (Outcome outcome = terms.take(options); !outcome.ok()) return outcome;
    std::shared_ptr<PlanObject> made;
    if (Outcome outcome = terms.prepare(made); !outcome.ok()) return outcome;
    return Table::get().add(std::move(made), *plan);
  });
}

int32_t kvl_pull_start(const kvl_pull_options* options, kvl_handle* pull, kvl_error* error) {
  return call(error, [&] { return start_pull(options, pull); });
}

int32_t kvl_pull_wait(kvl_handle pull, uint64_t timeout_us, kvl_error* error) {
  return call_on<PullObject>(pull, error, [&](const std::shared_ptr<PullObject>& found) {
    if (!found->pull().done()) found->pull().wait(wait_ns(timeout_us));
    return found->outcome();
  });
}

int32_t kvl_pull_cancel(kvl_handle pull, kvl_error* error) {
  return call_on<PullObject>(pull, error, [](const std::shared_ptr<PullObject>& found) -> Outcome {
    found->pull().cancel();
    return {};
  });
}

int32_t kvl_pull_count(kvl_handle pull, kvl_pull_stats* stats, kvl_error* error) {
  return call_on<PullObject>(pull, error, [&](const std::shared_ptr<PullObject>& found) -> Outcome {
    kvl_pull_stats counted{};
    if (Outcome outcome = found->count(counted); !outcome.ok()) return outcome;
    return give_struct(counted, stats, "kvl_pull_stats");
  });
}

int32_t kvl_release(const kvl_pull_options* options, kvl_error* error) {
  return call(error, [&]() -> Outcome {
    PullTerms terms;
    if (Outcome outcome = terms.take(options); !outcome.ok()) return outcome;
    return terms.release();
  });
}

int32_t kvl_explain(kvl_handle object, char* out, uint64_t capacity, uint64_t* out_bytes, kvl_error* error) {
  return call(error, [&]() -> Outcome {
    const std::shared_ptr<Object> found = Table::get().find(object);
    if (!found) return {KVL_HANDLE, "there is no object with this handle"};
    std::string text = found->explain();
    text.push_back('\0');
    return give_bytes({out, capacity, out_bytes}, text);
  });
}

int32_t kvl_close(kvl_handle object, kvl_error* error) {
  return call(error, [&]() -> Outcome {
    const std::shared_ptr<Object> found = Table::get().find(object);
    if (!found) return {KVL_HANDLE, "there is no object with this handle"};
    if (found->kind() == Kind::kOffer) found->worker()->forget_offer(object);
    Outcome outcome = found->close();
    if (outcome.ok()) Table::get().remove(object);
    return outcome;
  });
}

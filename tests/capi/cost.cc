// SPDX-License-Identifier: Apache-2.0
// kvlink_cost [ROUNDS [plain|prepared]]: what a pull of one block of 16 KiB costs through the interface for
// C, beside the same pull by the engine's own calls, both over loopback in this process, in turn. Prints the
// nanoseconds of each, and what C adds: medians of rounds, of which each has one of both.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "capi/kvlink.h"
#include "engine/engine.h"
#include "engine/prior_cost.h"
#include "engine/pull.h"
#include "memory/host_memory.h"

namespace kvlink {
namespace {

constexpr uint32_t kPlanes = 8, kTokens = 16, kRow = 128, kBlocks = 16;
constexpr uint64_t kPlaneBytes = uint64_t{kTokens} * kRow, kPoolBytes = kPlanes * kBlocks * kPlaneBytes;
constexpr int kPulls = 64;  // per round
// Pulls run on the calling thread, also where valgrind makes them slow, so that a count is that of the calls.
constexpr int64_t kInlineUs = 100'000'000;

[[noreturn]] void fail(const std::string& why) {
  std::printf("%s\n", why.c_str());
  std::exit(1);
}

template <typename T>
T need(Result<T> result) {
  if (!result.ok()) fail(result.status().sentence());
  return std::move(*result);
}

/// The engine's own calls.
class Own {
 public:
  Own() {
    EngineOptions options;
    options.epoch = 1;
    options.transports = {"loopback"};
    options.inline_ns = kInlineUs * 1000;
    engine_ = need(Engine::make(options));
    memory_ = need(HostMemory::allocate(kPoolBytes, false));
    need(engine_->add_pool_region(memory_->range()));
    if (!engine_->start().ok()) fail("the engine does not start");
    const TransportAccess access = engine_->access().front();
    connection_ = need(
        engine_->open("loopback", access.address, std::make_shared<PathStats>(prior_cost("loopback")), {}));
    const Accepted accepted = need(engine_->accept("loopback", connection_->hellos()));
    const auto regions = need(connection_->establish(accepted.connection_id, accepted.replies,
                                                     access.pool_keys, access.lease_keys, 1, 1'000'000'000));
    Layout layout{kBlocks, kTokens, 0, 1, kRow, kPlaneBytes, kRow, kRow, {}, {}};
    for (uint32_t plane = 0; plane < kPlanes; ++plane)
      layout.planes.push_back({0, plane / 2, plane * kBlocks * kPlaneBytes});
    planner_ = need(Planner::make(layout, layout, {memory_->range()}, {kPoolBytes}, regions, {0, 1}));
    PullRequest request = plain();
    prepared_ = need(connection_->prepare(request));
  }

  int64_t time(bool prepared) {
    std::array<LeaseSeat, kPulls> seats;
    for (int at = 0; at < kPulls; ++at) {
      seats[at] = need(engine_->grant(++lease_, 1, 1, 60'000'000'000)).front();
      seats[at].settle_nonce = 0;
    }
    const int64_t began = now_ns();
    for (const LeaseSeat& seat : seats) engine_pull(seat, prepared);
    const int64_t took = now_ns() - began;
    for (int at = 0; at < kPulls; ++at) engine_->leases().abort(lease_ - static_cast<uint64_t>(at));
    engine_->take_ended();
    return took / kPulls;
  }

  /// Tests count its instructions.
  [[gnu::noinline]] void engine_pull(const LeaseSeat& seat, bool prepared) {
    PullRequest request;
    if (prepared) {
      request.prepared = prepared_;
    } else {
      request = plain();
    }
    request.seat = seat;
    request.deadline_ns = now_ns() + 1'000'000'000;
    const std::shared_ptr<Pull> pull = Pull::started(connection_->pull(request), nullptr);
    if (!pull->done()) pull->wait(-1);
    if (pull->state() != PullState::kValid) fail("the engine's pull failed");
  }

 private:
  PullRequest plain() const {
    PullRequest request;
    static_cast<GroupRead&>(request) = {planner_, theirs_, ours_, {0, kTokens}, {0, kPlanes / 2}};
    return request;
  }

  std::unique_ptr<Engine> engine_;
  std::shared_ptr<HostMemory> memory_;
  std::shared_ptr<Connection> connection_;
  std::shared_ptr<const Planner> planner_;
  std::shared_ptr<const Plan> prepared_;
  const std::vector<uint32_t> theirs_{3}, ours_{7};
  uint64_t lease_ = 0;
};

/// The same through kvlink.h.
class FromC {
 public:
  FromC() {
    const kvl_worker_options options = [] {
      kvl_worker_options made{};
      made.size = sizeof made;
      made.worker_id = "cost";
      made.transports = "loopback";
      made.inline_us = kInlineUs;
      return made;
    }();
    void* base;
    kvl_handle region;
    uint32_t index;
    check(kvl_region_alloc(kPoolBytes, 0, &region, &base, &error_));
    check(kvl_worker_open(&options, &worker_, &error_));
    check(kvl_worker_add_region(worker_, region, &index, &error_));
    std::vector<kvl_plane> planes;
    for (uint32_t plane = 0; plane < kPlanes; ++plane)
      planes.push_back({index, plane / 2, plane * kBlocks * kPlaneBytes});
    kvl_layout layout{};
    layout.size = sizeof layout;
    layout.dtype = "float16";
    layout.num_blocks = kBlocks, layout.block_tokens = kTokens, layout.row_bytes = kRow;
    layout.total_heads = layout.num_heads = 1;
    layout.block_stride = kPlaneBytes, layout.token_stride = layout.head_stride = kRow;
    layout.planes = planes.data(), layout.num_planes = kPlanes;
    check(kvl_worker_add_group(worker_, &layout, &error_));
    check(kvl_worker_start(worker_, &error_));
    connect();
  }

  int64_t time(bool prepared) {
    std::vector<std::string> tickets;
    std::vector<kvl_handle> offers;
    const uint32_t theirs = 3, ours = 7;
    for (int at = 0; at < kPulls; ++at) {
      kvl_offer_options offer{};
      offer.size = sizeof offer;
      offer.request_id = "request-of-usual-length-0123";
      offer.blocks = &theirs, offer.num_blocks = 1, offer.num_tokens = kTokens;
      check(kvl_offer_open(worker_, &offer, &offers.emplace_back(), &error_));
      char ticket[512];
      uint64_t bytes;
      check(kvl_offer_ticket(offers.back(), ticket, sizeof ticket, &bytes, &error_));
      tickets.emplace_back(ticket, bytes);
    }
    kvl_pull_options pull{};
    pull.size = sizeof pull;
    pull.peer = peer_, pull.blocks = &ours, pull.num_blocks = 1;
    pull.flags = KVL_PULL_NO_SETTLE;
    pull.ticket = tickets[0].data(), pull.ticket_bytes = tickets[0].size();
    if (prepared && plan_ == 0) check(kvl_plan_make(&pull, &plan_, &error_));
    if (prepared) pull.plan = plan_;
    const int64_t began = now_ns();
    for (const std::string& ticket : tickets) {
      pull.ticket = ticket.data(), pull.ticket_bytes = ticket.size();
      check(kvl_pull_start(&pull, nullptr, nullptr));
    }
    const int64_t took = now_ns() - began;
    for (const kvl_handle offer : offers) {
      check(kvl_offer_abort(offer, &error_));
      check(kvl_close(offer, &error_));
    }
    return took / kPulls;
  }

 private:
  void check(int32_t code) {
    if (code != KVL_OK) fail(std::to_string(code) + ": " + error_.text);
  }
  void connect() {
    static char card[1 << 16], message[1 << 16], answer[1 << 16];
    uint64_t card_bytes, bytes, answered = 0;
    check(kvl_worker_card(worker_, card, sizeof card, &card_bytes, &error_));
    check(kvl_peer_open(worker_, card, card_bytes, 0, &peer_, &error_));
    for (;;) {
      check(kvl_peer_step(peer_, answer, answered, message, sizeof message, &bytes, &error_));
      if (bytes == 0) return;
      check(kvl_answer(worker_, 0, message, bytes, answer, sizeof answer, &answered, &error_));
    }
  }

  kvl_error error_{sizeof(kvl_error), 0, 0, {}};
  kvl_handle worker_ = 0, peer_ = 0, plan_ = 0;
};

int64_t median(std::vector<int64_t> times) {
  std::nth_element(times.begin(), times.begin() + static_cast<ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

}  // namespace
}  // namespace kvlink

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 500;
  const std::string_view only = argc > 2 ? argv[2] : "";
  kvlink::Own own;
  kvlink::FromC from_c;
  for (const bool prepared : {false, true}) {
    if (!only.empty() && (only == "prepared") != prepared) continue;
    std::vector<int64_t> engine, c, added;
    for (int round = 0; round < rounds; ++round) {
      const bool c_first = round % 2 != 0;
      if (c_first) c.push_back(from_c.time(prepared));
      engine.push_back(own.time(prepared));
      if (!c_first) c.push_back(from_c.time(prepared));
      added.push_back(c.back() - engine.back());
    }
    std::printf("{\"prepared\": %s, \"engine_ns\": %lld, \"c_ns\": %lld, \"added_ns\": %lld}\n",
                prepared ? "true" : "false", static_cast<long long>(kvlink::median(engine)),
                static_cast<long long>(kvlink::median(c)), static_cast<long long>(kvlink::median(added)));
  }
}

// SPDX-License-Identifier: Apache-2.0
// A reliable connected queue pair, from creation to its end. Not reused: what broke is destroyed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "transports/verbs/liveness.h"
#include "transports/verbs/nic.h"

namespace kvlink::verbs {

/// How patient a queue pair is; see ibv_modify_qp(3). A NIC may make four times as much of `timeout`, and
/// some never go below half a second: what bounds a pull is `silence_ns`.
struct LivenessTimeouts {
  uint8_t timeout = 14;  // 4.096 us * 2^14 = 67 ms until a packet counts as lost
  uint8_t retries = 6;   // then half a second until a silent peer counts as gone; soft-RoCE takes 7 for ever
  int64_t silence_ns = kSilenceNs;  // of a reader's queue pair
};

/// One completion queue, with a descriptor to sleep on if asked for.
class Cq {
 public:
  static Result<std::unique_ptr<Cq>> create(std::shared_ptr<Nic> nic, uint32_t entries, bool sleeps);

  ibv_cq* get() const { return cq_.get(); }
  int poll(ibv_wc* into, int most) const { return ::ibv_poll_cq(cq_.get(), most, into); }
  int wake_fd() const { return channel_ ? channel_->fd : -1; }
  /// wake_fd() becomes readable at the next completion. What completed before needs another poll().
  void arm();
  /// Takes back what wake_fd() had to say.
  void take_events();

 private:
  Cq(std::shared_ptr<Nic> nic, Owned<ibv_comp_channel> channel, Owned<ibv_cq> cq)
      : nic_(std::move(nic)), channel_(std::move(channel)), cq_(std::move(cq)) {}

  std::shared_ptr<Nic> nic_;
  Owned<ibv_comp_channel> channel_;
  Owned<ibv_cq> cq_;
};

/// Not thread safe but for fail() and failed().
class Qp {
 public:
  /// `cq` must outlive it. `max_wrs` of the send queue and `max_sge` each are asked of the device.
  static Result<std::unique_ptr<Qp>> create(std::shared_ptr<Nic> nic, const Cq& cq, uint32_t max_wrs,
                                            uint32_t max_sge);

  QpAddress address() const;
  /// Connects to the other end: both ends then use the smaller MTU and number of reads.
  Status connect(const QpAddress& peer, LivenessTimeouts timeouts);
  Status post(ibv_send_wr* first) const;
  /// One step of a connection that somebody else makes; tie() tells what came of it.
  Status modify(ibv_qp_attr& attributes, int mask, const char* to) const;
  /// `link` is what the connection lasts with. It ends with this queue pair, and before it.
  void tie(uint32_t peer_qpn, std::shared_ptr<void> link) {
    peer_qpn_ = peer_qpn;
    link_ = std::move(link);
  }
  /// Stores nothing at the other end, whose NIC answers; completes as `wr_id`.
  Status ask(uint64_t wr_id);
  /// Makes the other end's queue pair fail now instead of at its next timeout, by a store that nothing
  /// allows.
  void break_peer();
  /// Nothing is sent or answered any more; what was posted completes as flushed. False: the device is gone,
  /// and nothing completes.
  bool halt();

  ibv_qp* get() const { return qp_.get(); }
  uint32_t qpn() const { return qp_->qp_num; }
  const std::shared_ptr<Nic>& nic() const { return nic_; }
  /// "rxe0:1 qp 17 -> qp 23"
  std::string name() const;

  /// An asynchronous event ended it; any thread.
  void fail(ibv_event_type event) { failed_.store(event, std::memory_order_release); }
  /// The other end disconnected it; any thread.
  void hang_up() { failed_.store(kHungUp, std::memory_order_release); }
  bool failed() const { return failed_.load(std::memory_order_acquire) != kNoEvent; }
  Status why_failed() const;

 private:
  static constexpr int kNoEvent = -1, kHungUp = -2;

  explicit Qp(std::shared_ptr<Nic> nic) : nic_(std::move(nic)), qp_(nullptr, nic_->api().destroy_qp) {}

  std::shared_ptr<Nic> nic_;
  std::atomic<int> failed_{kNoEvent};
  uint32_t psn_ = 0;
  uint32_t peer_qpn_ = 0;
  Owned<ibv_qp> qp_;
  std::shared_ptr<void> link_;
};

/// What a completion with an error means, at which end, and what to do. `where` names the queue pair.
Status failure(const Api& api, const ibv_wc& completion, const std::string& where);

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
// A reliable connected queue pair. It is not reused: a broken one is destroyed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "transports/verbs/liveness.h"
#include "transports/verbs/nic.h"

namespace kvlink::verbs {

/// Timeouts of a queue pair; see ibv_modify_qp(3). A NIC may use up to four times `timeout`, and some never
/// go below half a second, so `silence_ns` bounds a pull.
struct LivenessTimeouts {
  uint8_t timeout = 14;  // 4.096 us * 2^14 = 67 ms until a packet counts as lost
  uint8_t retries = 6;   // then half a second until a silent peer counts as gone; soft-RoCE takes 7 for ever
  int64_t silence_ns = kSilenceNs;  // of a reader's queue pair

  /// Returns how long a NIC resends a packet, by the numbers of the specification.
  int64_t resend_ns() const { return (int64_t{4096} << timeout) * (retries + 1); }
};

/// One completion queue, with a descriptor to sleep on if requested.
class Cq {
 public:
  static Result<std::unique_ptr<Cq>> create(std::shared_ptr<Nic> nic, uint32_t entries, bool sleeps);

  ibv_cq* get() const { return cq_.get(); }
  int poll(ibv_wc* into, int most) const { return ::ibv_poll_cq(cq_.get(), most, into); }
  int wake_fd() const { return channel_ ? channel_->fd : -1; }
  /// Makes wake_fd() readable at the next completion. Earlier completions need another poll().
  void arm();
  /// Makes wake_fd() unreadable.
  void take_events();

 private:
  Cq(std::shared_ptr<Nic> nic, Owned<ibv_comp_channel> channel, Owned<ibv_cq> cq)
      : nic_(std::move(nic)), channel_(std::move(channel)), cq_(std::move(cq)) {}

  std::shared_ptr<Nic> nic_;
  Owned<ibv_comp_channel> channel_;
  Owned<ibv_cq> cq_;
};

/// Not thread safe, except for fail(), hang_up() and failed().
class Qp {
 public:
  /// `cq` must outlive it. The device must support a send queue of `max_wrs` with `max_sge` each.
  static Result<std::unique_ptr<Qp>> create(std::shared_ptr<Nic> nic, const Cq& cq, uint32_t max_wrs,
                                            uint32_t max_sge);

  /// Its ECE is an offer before connect(), and after it what both ends agreed on.
  QpAddress address() const;
  /// To be called before address(): packets are not larger than this.
  void set_most_mtu(ibv_mtu mtu) { most_mtu_ = mtu; }
  /// Returns the bytes of its packets, as far as this end knows.
  uint32_t packet_bytes() const { return 128u << path_mtu_; }
  /// Connects to the other end. Both ends use the smaller MTU and number of reads.
  Status connect(const QpAddress& peer, LivenessTimeouts timeouts);
  Status post(ibv_send_wr* first) const;
  /// Makes one step of a connection that the connection manager makes; tie() ends it.
  Status modify(ibv_qp_attr& attributes, int mask, const char* to) const;
  /// `link` keeps the connection. It ends with this queue pair, before it.
  void tie(uint32_t peer_qpn, std::shared_ptr<void> link) {
    peer_qpn_ = peer_qpn;
    link_ = std::move(link);
  }
  /// Stores nothing at the other end, whose NIC answers. Completes as `wr_id`.
  Status ask(uint64_t wr_id);
  /// Makes the other end's queue pair fail now instead of at its next timeout, by a store that no key allows.
  void break_peer();
  /// Ends sending and answering. Posted requests complete as flushed. Returns false if the device is gone,
  /// and nothing completes.
  bool halt();

  ibv_qp* get() const { return qp_.get(); }
  uint32_t qpn() const { return qp_->qp_num; }
  const std::shared_ptr<Nic>& nic() const { return nic_; }
  /// Returns a name such as "rxe0:1 qp 17 -> qp 23".
  std::string name() const;

  /// Records the asynchronous event that ended it. Any thread.
  void fail(ibv_event_type event) { failed_.store(event, std::memory_order_release); }
  /// Records that the other end disconnected. Any thread.
  void hang_up() { failed_.store(kHungUp, std::memory_order_release); }
  bool failed() const { return failed_.load(std::memory_order_acquire) != kNoEvent; }
  Status why_failed() const;

 private:
  Ece ece() const;
  void accept(const Ece& offered);

  static constexpr int kNoEvent = -1, kHungUp = -2;

  explicit Qp(std::shared_ptr<Nic> nic) : nic_(std::move(nic)), qp_(nullptr, nic_->api().destroy_qp) {}

  std::shared_ptr<Nic> nic_;
  std::atomic<int> failed_{kNoEvent};
  uint32_t psn_ = 0;
  ibv_mtu most_mtu_ = IBV_MTU_4096, path_mtu_ = IBV_MTU_4096;
  bool ece_refused_ = false;
  uint32_t peer_qpn_ = 0;
  Owned<ibv_qp> qp_;
  std::shared_ptr<void> link_;
};

/// Explains a completion with an error: its meaning, the end at fault, and the fix. `where` names the queue
/// pair.
Status failure(const Api& api, const ibv_wc& completion, const std::string& where);

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/queue_pair.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "base/sys.h"
#include "transports/verbs/gid.h"

namespace kvlink::verbs {
namespace {

constexpr uint32_t kInlineBytes = 8;  // a settle
constexpr uint8_t kRnrForever = 7;    // nothing here ever waits for a receive
constexpr uint8_t kMinRnrTimer = 12;  // 0.64 ms
constexpr uint8_t kHopLimit = 64;

uint32_t random_psn() { return std::random_device{}() & 0xff'ffff; }

ibv_ah_attr path(const Nic& nic, const QpAddress& peer) {
  ibv_ah_attr path{};
  path.port_num = nic.port();
  path.sl = nic.manner().service_level;
  // Within an InfiniBand subnet the LID is a complete address, unless the port shares it with others. To
  // another subnet a packet goes to the LID by which routers forward there.
  const bool elsewhere = !nic.ethernet() && !same_subnet(nic.address().gid, peer.gid);
  const uint16_t flid = elsewhere ? flid_of(peer.gid) : uint16_t{0};
  path.dlid = flid != 0 ? flid : static_cast<uint16_t>(peer.lid);
  path.is_global = nic.ethernet() || elsewhere || nic.needs_grh() ? 1 : 0;
  std::memcpy(path.grh.dgid.raw, peer.gid.data(), peer.gid.size());
  path.grh.sgid_index = nic.gid_index();
  path.grh.hop_limit = kHopLimit;
  path.grh.traffic_class = nic.manner().traffic_class;
  return path;
}

}  // namespace

Result<std::unique_ptr<Cq>> Cq::create(std::shared_ptr<Nic> nic, uint32_t entries, bool sleeps) {
  const Api& api = nic->api();
  Owned<ibv_comp_channel> channel(sleeps ? api.create_comp_channel(nic->context()) : nullptr,
                                  api.destroy_comp_channel);
  if (sleeps && !channel) {
    return sys::failed(Code::kTransportUnavailable, nic->name() + " gives no completion channel",
                       "ibv_create_comp_channel", errno);
  }
  if (channel && !sys::set_nonblocking(channel->fd)) {
    return sys::failed(Code::kTransportUnavailable, nic->name() + " gives no completion channel", "fcntl",
                       errno);
  }
  const int wanted = std::min(static_cast<int>(entries), nic->limits().max_cqes);
  Owned<ibv_cq> cq(
      api.create_cq(nic->context(), wanted, nullptr, channel.get(), sleeps ? nic->next_vector() : 0),
      api.destroy_cq);
  if (!cq) {
    return Status::Unavailable(nic->name() + " gives no completion queue: " + std::strerror(errno),
                               "raise ulimit -l, or close connections");
  }
  return std::unique_ptr<Cq>(new Cq(std::move(nic), std::move(channel), std::move(cq)));
}

void Cq::arm() {
  take_events();
  ::ibv_req_notify_cq(cq_.get(), 0);
}

void Cq::take_events() {
  ibv_cq* which;
  void* context;
  while (channel_ && nic_->api().get_cq_event(channel_.get(), &which, &context) == 0) {
    nic_->api().ack_cq_events(which, 1);
  }
}

Result<std::unique_ptr<Qp>> Qp::create(std::shared_ptr<Nic> nic, const Cq& cq, uint32_t max_wrs,
                                       uint32_t max_sge) {
  std::unique_ptr<Qp> made(new Qp(std::move(nic)));
  const Nic& at = *made->nic_;
  ibv_qp_init_attr wanted{};
  wanted.qp_context = made.get();
  wanted.send_cq = wanted.recv_cq = cq.get();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap = {.max_send_wr = max_wrs,
                .max_recv_wr = 0,
                .max_send_sge = max_sge,
                .max_recv_sge = 0,
                .max_inline_data = kInlineBytes};
  made->qp_.reset(at.api().create_qp(at.pd(), &wanted));
  if (!made->qp_) {
    return Status::Unavailable(at.name() + " gives no queue pair: " + std::strerror(errno),
                               "close connections, or raise the device's max_qp and ulimit -l");
  }
  made->psn_ = random_psn();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = at.port();
  attributes.pkey_index = at.pkey_index();
  attributes.qp_access_flags =
      IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;  // what keys allow is up to them
  const Status status =
      made->modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
  if (!status.ok()) return status;
  return made;
}

QpAddress Qp::address() const {
  const NicAddress at = nic_->address();
  const Nic::Limits& limits = nic_->limits();
  return {qpn(),
          psn_,
          at.lid,
          at.gid,
          static_cast<uint32_t>(std::min(nic_->mtu(), most_mtu_)),
          limits.reads_out,
          limits.reads_in,
          ece()};
}

Ece Qp::ece() const {
  ibv_ece ece{};
  if (ece_refused_ || !nic_->api().query_ece || nic_->api().query_ece(qp_.get(), &ece) != 0) return {};
  return {ece.vendor_id, ece.options, ece.comp_mask};
}

/// A connection without it is as good. So NICs that do not understand each other connect without it.
void Qp::accept(const Ece& offered) {
  ibv_ece ece{offered.vendor, offered.options, offered.mask};
  ece_refused_ = offered.vendor == 0 || !nic_->api().query_ece || nic_->api().set_ece(qp_.get(), &ece) != 0;
}

Status Qp::connect(const QpAddress& peer, LivenessTimeouts timeouts) {
  peer_qpn_ = peer.qpn;
  accept(peer.ece);
  const Nic::Limits& own = nic_->limits();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  path_mtu_ = std::min({nic_->mtu(), most_mtu_, static_cast<ibv_mtu>(peer.mtu)});
  attributes.path_mtu = path_mtu_;
  attributes.dest_qp_num = peer.qpn;
  attributes.rq_psn = peer.psn;
  attributes.max_dest_rd_atomic = static_cast<uint8_t>(std::min(own.reads_in, peer.reads_out));
  attributes.min_rnr_timer = kMinRnrTimer;
  attributes.ah_attr = path(*nic_, peer);
  const Status ready = modify(attributes,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                              "RTR");
  if (!ready.ok()) return ready;
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = timeouts.timeout;
  attributes.retry_cnt = timeouts.retries;
  attributes.rnr_retry = kRnrForever;
  attributes.sq_psn = psn_;
  attributes.max_rd_atomic = static_cast<uint8_t>(std::min(own.reads_out, peer.reads_in));
  return modify(attributes,
                IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                    IBV_QP_MAX_QP_RD_ATOMIC,
                "RTS");
}

Status Qp::modify(ibv_qp_attr& attributes, int mask, const char* to) const {
  const int error = nic_->api().modify_qp(qp_.get(), &attributes, mask);
  if (error == 0) return {};
  std::string what = name() + " cannot go to " + to + ": " + std::strerror(error);
  if (error == ETIMEDOUT || error == ENETUNREACH || error == EHOSTUNREACH) {
    what += "; there is no route to the other end's address, or it does not answer ARP";
  }
  return Status::Unreachable(what);
}

Status Qp::post(ibv_send_wr* first) const {
  ibv_send_wr* bad = nullptr;
  const int error = ::ibv_post_send(qp_.get(), first, &bad);
  if (error == 0) return {};
  return Status::Unreachable("posting to " + name() + ": " + std::strerror(error));
}

Status Qp::ask(uint64_t wr_id) {
  ibv_send_wr wr{};
  wr.wr_id = wr_id;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  return post(&wr);
}

void Qp::break_peer() {
  ibv_send_wr wr{};
  ibv_sge nothing{};
  uint64_t zero = 0;
  nothing.addr = reinterpret_cast<uintptr_t>(&zero);
  nothing.length = sizeof zero;
  wr.sg_list = &nothing;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
  static_cast<void>(post(&wr));  // to address 0 with key 0
}

bool Qp::halt() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  return modify(attributes, IBV_QP_STATE, "ERR").ok();
}

std::string Qp::name() const {
  return nic_->name() + " qp " + std::to_string(qpn()) + " -> qp " + std::to_string(peer_qpn_);
}

Status Qp::why_failed() const {
  const int event = failed_.load(std::memory_order_acquire);
  const std::string how =
      event == kHungUp ? "disconnected" : nic_->api().event_type_str(static_cast<ibv_event_type>(event));
  return Status::Unreachable(name() + " was cut by the other end or its NIC (" + how +
                             "): it closed or died, its device was removed, or a lease ran out");
}

Status failure(const Api& api, const ibv_wc& completion, const std::string& where) {
  const std::string what = where + ": " + api.wc_status_str(completion.status) + " (vendor error " +
                           std::to_string(completion.vendor_err) + "): ";
  switch (completion.status) {
    case IBV_WC_RETRY_EXC_ERR:
      return Status::Unreachable(
          what +
          "the other end does not answer; its host, process or link is gone, or packets "
          "are lost (check MTU and PFC)");
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_REM_ABORT_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
      return Status::Unreachable(what + "the other end's NIC could not serve");
    case IBV_WC_WR_FLUSH_ERR:
      return Status::Unreachable(what +
                                 "the connection was cut: the owner closed it, its device was "
                                 "removed, or a lease ran out");
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
      return Status::AccessDenied(what +
                                  "the owner's NIC refuses the key or the range; the owner restarted or "
                                  "revoked it: ask for a fresh ticket, the next pull reconnects");
    case IBV_WC_LOC_QP_OP_ERR:  // rxe's, when its link goes down under a request
      return Status::Unreachable(what +
                                 "this process's own NIC could not carry it out; its link may be down");
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
    case IBV_WC_MW_BIND_ERR:
      return Status::AccessDenied(what +
                                  "this process's own NIC refuses the local memory or the request; was the "
                                  "pool freed or remapped? restart the worker");
    default:
      return Status::Unreachable(what + "the queue pair failed; see dmesg and rdma statistic");
  }
}

}  // namespace kvlink::verbs

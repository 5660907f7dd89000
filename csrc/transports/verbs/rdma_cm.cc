// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/rdma_cm.h"

#include <endian.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/sys.h"
#include "transports/verbs/gid.h"
#include "transports/verbs/queue_pair.h"
#include "transports/verbs/rdma_cm_api.h"

namespace kvlink::verbs {
namespace {

constexpr int kBacklog = 1024;
constexpr uint8_t kRnrForever = 7;
constexpr uint8_t kMostRetries = 7;  // what the messages say; LivenessTimeouts is what the queue pairs do

using Channel = std::unique_ptr<rdma_event_channel, decltype(&::rdma_destroy_event_channel)>;
using Id = Owned<rdma_cm_id>;

int ms(int64_t ns) { return static_cast<int>(std::clamp<int64_t>(ns / 1'000'000, 1, INT32_MAX)); }

std::string text(const CmReply& at) { return ip_text(at.ip) + " port " + std::to_string(at.port); }

Result<Channel> open_channel(const CmApi& api) {
  Channel channel(api.create_event_channel(), api.destroy_event_channel);
  if (!channel) {
    return Status::Unavailable(
        std::string("opening the RDMA connection manager: ") + std::strerror(errno),
        "modprobe rdma_ucm, and make /dev/infiniband/rdma_cm readable and writable for this user");
  }
  if (!sys::set_nonblocking(channel->fd)) {
    return sys::transport_failed("opening the RDMA connection manager", "fcntl", errno);
  }
  return channel;
}

class RdmaCmPort final : public CmPort, public std::enable_shared_from_this<RdmaCmPort> {
 public:
  RdmaCmPort(const CmApi& api, std::shared_ptr<Nic> nic, Channel channel)
      : api_(api), nic_(std::move(nic)), channel_(std::move(channel)), listener_(nullptr, api.destroy_id) {}

  Status listen();
  CmReply address() const override { return address_; }
  int events_fd() const override { return channel_->fd; }
  void take_events(const Arrived& arrived) override;
  Status accept(CmCaller caller, Qp& qp, LivenessTimeouts timeouts) override;
  Status connect(Qp& qp, const CmReply& to, LivenessTimeouts timeouts, const Patience& patience) override;
  void stop_listening() override { listener_.reset(); }

 private:
  /// Keeps the channel as long as the connection.
  struct Link {
    std::shared_ptr<RdmaCmPort> port;
    Id id;
  };

  struct ConnectEvent {
    rdma_cm_event_type what;
    uint32_t qpn, reads_in, reads_out;  // of an answer to connect()
  };

  Id make_id(rdma_event_channel* channel, Qp* qp) const;
  bool leads_here(const rdma_cm_id& id) const;
  CmCaller caller(const rdma_cm_event& event) const;
  /// Waits for one of two events.
  Result<ConnectEvent> await(rdma_event_channel* channel, rdma_cm_event_type wanted,
                             rdma_cm_event_type or_this, const Patience& patience) const;
  Status resolve(rdma_event_channel* channel, rdma_cm_id* id, const CmReply& to,
                 const Patience& patience) const;
  /// Returns the reads that this end answers and starts at a time, limited by those of the other end.
  rdma_conn_param terms(const Qp& qp, uint32_t reads_in, uint32_t reads_out) const;
  Status ready(rdma_cm_id* id, Qp& qp, const rdma_conn_param& terms, LivenessTimeouts timeouts) const;
  void keep(Qp& qp, uint32_t peer_qpn, Id id);
  Status failed(const std::string& what, int error) const {
    return Status::Unreachable(nic_->name() + ": " + what + ": " + std::strerror(error));
  }

  const CmApi& api_;
  const std::shared_ptr<Nic> nic_;
  const Channel channel_;
  CmReply address_;
  Id listener_;
};

Id RdmaCmPort::make_id(rdma_event_channel* channel, Qp* qp) const {
  rdma_cm_id* made = nullptr;
  if (api_.create_id(channel, &made, qp, RDMA_PS_TCP) != 0) made = nullptr;
  Id id(made, api_.destroy_id);
  uint8_t tos = nic_->manner().traffic_class;
  if (!id || tos == 0) return id;
  return api_.set_option(id.get(), RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof tos) == 0
             ? std::move(id)
             : Id(nullptr, api_.destroy_id);
}

bool RdmaCmPort::leads_here(const rdma_cm_id& id) const {
  if (!id.verbs) return false;
  const std::string device = nic_->api().get_device_name(id.verbs->device);
  return device + ":" + std::to_string(id.port_num) == nic_->name();
}

/// Only the manager knows for every kind of NIC which address leads to a port.
Status RdmaCmPort::listen() {
  std::vector<LocalIp> ips = local_ips();
  const Gid known = nic_->address().gid;  // with RoCE one of them
  std::stable_partition(ips.begin(), ips.end(), [&](const LocalIp& each) { return each.ip == known; });
  for (const auto& [ip, _] : ips) {
    Id id = make_id(channel_.get(), nullptr);
    if (!id) return failed("getting an identifier of the connection manager", errno);
    if (api_.bind_addr(id.get(), SocketAddress(ip, 0).get()) != 0 || !leads_here(*id)) continue;
    if (api_.listen(id.get(), kBacklog) != 0) return failed("listening at " + ip_text(ip), errno);
    address_.ip = ip;
    address_.port = be16toh(api_.get_src_port(id.get()));
    listener_ = std::move(id);
    return {};
  }
  return Status::Unavailable("no IP address of this machine leads to RDMA port " + nic_->name(),
                             "give its network interface an IP address and bring it up");
}

CmCaller RdmaCmPort::caller(const rdma_cm_event& event) const {
  const rdma_conn_param& wish = event.param.conn;
  CmCaller caller{
      Id(event.id, api_.destroy_id), {}, wish.qp_num, wish.responder_resources, wish.initiator_depth};
  // InfiniBand's message has a fixed size, padded with zeros.
  if (wish.private_data && wish.private_data_len >= caller.secret.size()) {
    std::memcpy(caller.secret.data(), wish.private_data, caller.secret.size());
  }
  return caller;
}

void RdmaCmPort::take_events(const Arrived& arrived) {
  rdma_cm_event* event = nullptr;
  while (api_.get_cm_event(channel_.get(), &event) == 0) {
    switch (event->event) {
      case RDMA_CM_EVENT_CONNECT_REQUEST: {
        CmCaller who = caller(*event);
        api_.ack_cm_event(event);
        arrived(std::move(who));
        continue;
      }
      case RDMA_CM_EVENT_DEVICE_REMOVAL:
        nic_->remove();
        [[fallthrough]];
      case RDMA_CM_EVENT_DISCONNECTED:
      case RDMA_CM_EVENT_CONNECT_ERROR:
      case RDMA_CM_EVENT_UNREACHABLE:
      case RDMA_CM_EVENT_REJECTED:
        // It is alive, because destroying an identifier waits until its events are acknowledged.
        if (auto* const qp = static_cast<Qp*>(event->id->context)) qp->hang_up();
        break;
      default:
        break;
    }
    api_.ack_cm_event(event);
  }
}

rdma_conn_param RdmaCmPort::terms(const Qp& qp, uint32_t reads_in, uint32_t reads_out) const {
  rdma_conn_param terms{};
  terms.qp_num = qp.qpn();
  terms.responder_resources = static_cast<uint8_t>(std::min(nic_->limits().reads_in, reads_in));
  terms.initiator_depth = static_cast<uint8_t>(std::min(nic_->limits().reads_out, reads_out));
  terms.retry_count = kMostRetries;
  terms.rnr_retry_count = kRnrForever;
  return terms;
}

/// Moves the queue pair to RTS, through INIT again, because the manager knows the partition.
Status RdmaCmPort::ready(rdma_cm_id* id, Qp& qp, const rdma_conn_param& terms,
                         LivenessTimeouts timeouts) const {
  static constexpr std::pair<ibv_qp_state, const char*> kWay[] = {
      {IBV_QPS_INIT, "INIT"}, {IBV_QPS_RTR, "RTR"}, {IBV_QPS_RTS, "RTS"}};
  for (const auto& [state, name] : kWay) {
    ibv_qp_attr attributes{};
    int mask = 0;
    attributes.qp_state = state;
    if (api_.init_qp_attr(id, &attributes, &mask) != 0) {
      return failed(std::string("asking the connection manager how to go to ") + name, errno);
    }
    attributes.max_dest_rd_atomic = terms.responder_resources;
    attributes.max_rd_atomic = terms.initiator_depth;
    attributes.timeout = timeouts.timeout;
    attributes.retry_cnt = timeouts.retries;
    attributes.rnr_retry = kRnrForever;
    if (Status status = qp.modify(attributes, mask, name); !status.ok()) return status;
  }
  return {};
}

void RdmaCmPort::keep(Qp& qp, uint32_t peer_qpn, Id id) {
  qp.tie(peer_qpn, std::shared_ptr<Link>(new Link{shared_from_this(), std::move(id)}));
}

Status RdmaCmPort::accept(CmCaller caller, Qp& qp, LivenessTimeouts timeouts) {
  rdma_conn_param answer = terms(qp, caller.reads_in, caller.reads_out);
  if (Status status = ready(caller.id.get(), qp, answer, timeouts); !status.ok()) return status;
  if (api_.accept(caller.id.get(), &answer) != 0) return failed("accepting a reader", errno);
  caller.id->context = &qp;  // events are taken by this thread, so none came yet
  keep(qp, caller.qpn, std::move(caller.id));
  return {};
}

Result<RdmaCmPort::ConnectEvent> RdmaCmPort::await(rdma_event_channel* channel, rdma_cm_event_type wanted,
                                                   rdma_cm_event_type or_this,
                                                   const Patience& patience) const {
  rdma_cm_event* event = nullptr;
  while (api_.get_cm_event(channel, &event) != 0) {
    if (errno != EAGAIN && errno != EINTR) return failed("receiving from the connection manager", errno);
    if (patience.over()) {
      return patience.why_over(
          Status::Unreachable(nic_->name() + ": the connection manager got no answer in time"));
    }
    pollfd readable{channel->fd, POLLIN, 0};
    ::poll(&readable, 1, ms(patience.piece_ns()));
  }
  const rdma_conn_param& answer = event->param.conn;
  const ConnectEvent got{event->event, answer.qp_num, answer.responder_resources, answer.initiator_depth};
  const int status = event->status;
  api_.ack_cm_event(event);
  if (got.what == wanted || got.what == or_this) return got;
  if (got.what == RDMA_CM_EVENT_REJECTED) {
    return Status::Unreachable(nic_->name() + ": the owner refused the connection (reason " +
                               std::to_string(status) +
                               "): it closed, restarted, or does not know the secret");
  }
  return failed(api_.event_str(got.what), -status);
}

Status RdmaCmPort::resolve(rdma_event_channel* channel, rdma_cm_id* id, const CmReply& to,
                           const Patience& patience) const {
  SocketAddress from(address_.ip, 0);
  SocketAddress there(to.ip, static_cast<uint16_t>(to.port));
  if (api_.resolve_addr(id, from.get(), there.get(), ms(patience.left_ns())) != 0) {
    return failed("resolving " + text(to), errno);
  }
  const auto resolved = await(channel, RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ADDR_RESOLVED, patience);
  if (!resolved.ok()) return resolved.status();
  if (!leads_here(*id)) {
    return Status::Unreachable("the way to " + text(to) + " does not lead through " + nic_->name());
  }
  if (api_.resolve_route(id, ms(patience.left_ns())) != 0) {
    return failed("finding the route to " + text(to), errno);
  }
  return await(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_CM_EVENT_ROUTE_RESOLVED, patience).status();
}

Status RdmaCmPort::connect(Qp& qp, const CmReply& to, LivenessTimeouts timeouts, const Patience& patience) {
  const Result<Channel> opened = open_channel(api_);  // no other thread receives what is awaited here
  if (!opened.ok()) return opened.status();
  rdma_event_channel* const channel = (*opened).get();
  Id id = make_id(channel, &qp);
  if (!id) return failed("getting an identifier of the connection manager", errno);
  if (Status status = resolve(channel, id.get(), to, patience); !status.ok()) return status;

  rdma_conn_param wish = terms(qp, UINT8_MAX, UINT8_MAX);
  wish.private_data = to.secret.data();
  wish.private_data_len = static_cast<uint8_t>(to.secret.size());
  if (api_.connect(id.get(), &wish) != 0) return failed("connecting to " + text(to), errno);
  const auto got = await(channel, RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_ESTABLISHED, patience);
  if (!got.ok()) return got.status();
  const ConnectEvent& answer = *got;
  if (answer.what == RDMA_CM_EVENT_CONNECT_RESPONSE) {  // iWARP's driver has connected the queue pair itself
    const rdma_conn_param agreed = terms(qp, answer.reads_in, answer.reads_out);
    if (Status status = ready(id.get(), qp, agreed, timeouts); !status.ok()) return status;
    if (api_.establish(id.get()) != 0) return failed("establishing the connection to " + text(to), errno);
  }
  if (api_.migrate_id(id.get(), channel_.get()) != 0) return failed("keeping the connection", errno);
  keep(qp, answer.qpn, std::move(id));
  return {};
}

}  // namespace

Status cm_usable() { return cm_api().status(); }

Result<std::shared_ptr<CmPort>> open_cm_port(const std::shared_ptr<Nic>& nic) {
  const Result<const CmApi*> api = cm_api();
  if (!api.ok()) return api.status();
  Result<Channel> channel = open_channel(**api);
  if (!channel.ok()) return channel.status();
  const auto port = std::make_shared<RdmaCmPort>(**api, nic, std::move(*channel));
  if (Status status = port->listen(); !status.ok()) return status;
  return std::shared_ptr<CmPort>(port);
}

}  // namespace kvlink::verbs

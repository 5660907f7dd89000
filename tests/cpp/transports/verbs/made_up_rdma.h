// SPDX-License-Identifier: Apache-2.0
// A made-up libibverbs with one device, which writes down what it is asked and answers or is silent. One at a
// time: the library's functions carry no object.
#pragma once

#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cpp/transports/verbs/made_up_channels.h"
#include "transports/verbs/nic.h"

namespace kvlink::verbs::testing {

struct Asked {
  std::string what;  // "tell", "ask", "read", "halt"; and what was freed
  uint32_t qpn = 0;
  uint64_t bytes = 0;
  bool signaled = false, fenced = false;
};

struct Device {
  std::mutex mutex;  // guards what follows
  bool answers = true;
  ibv_wc_status fails_with = IBV_WC_SUCCESS;  // of reads
  std::vector<Asked> asked;
  std::map<uint32_t, std::vector<uint64_t>> unanswered;  // work requests by queue pair
  std::deque<ibv_wc> completions;
  bool closed = false;
  std::atomic<uint32_t> next_qpn = 17;
  /// The kernel's search for the address of the other end, whose queue pair it is given.
  std::function<int(uint32_t)> on_rtr = [](uint32_t) { return 0; };
  std::function<void()> on_destroy = [] {};  // of a queue pair

  std::vector<Asked> all(const std::string& what) {
    std::lock_guard lock(mutex);
    std::vector<Asked> found;
    std::copy_if(asked.begin(), asked.end(), std::back_inserter(found),
                 [&](const Asked& one) { return one.what == what; });
    return found;
  }
  std::vector<std::string> order() {
    std::lock_guard lock(mutex);
    std::vector<std::string> order;
    for (const Asked& one : asked) order.push_back(one.what);
    return order;
  }
  bool is_closed() {
    std::lock_guard lock(mutex);
    return closed;
  }
};
inline Device* device = nullptr;

inline void note(const Asked& asked) {
  std::lock_guard lock(device->mutex);
  device->asked.push_back(asked);
}

inline void complete(uint32_t qpn, uint64_t wr_id, ibv_wc_status status) {
  ibv_wc completion{};
  completion.wr_id = wr_id;
  completion.qp_num = qpn;
  completion.status = status;
  device->completions.push_back(completion);
}

inline Asked seen(const ibv_qp& qp, const ibv_send_wr& wr) {
  Asked asked{"read", qp.qp_num, 0, (wr.send_flags & IBV_SEND_SIGNALED) != 0,
              (wr.send_flags & IBV_SEND_FENCE) != 0};
  for (int i = 0; i < wr.num_sge; ++i) asked.bytes += wr.sg_list[i].length;
  if (wr.opcode == IBV_WR_RDMA_WRITE) asked.what = wr.num_sge == 0 ? "ask" : "tell";
  return asked;
}

inline int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr**) {
  std::lock_guard lock(device->mutex);
  for (; wr; wr = wr->next) {
    const Asked asked = seen(*qp, *wr);
    device->asked.push_back(asked);
    const bool refused = asked.what == "tell";
    const ibv_wc_status status = refused                ? IBV_WC_REM_ACCESS_ERR
                                 : asked.what == "read" ? device->fails_with
                                                        : IBV_WC_SUCCESS;
    if (!device->answers) {
      device->unanswered[qp->qp_num].push_back(wr->wr_id);
    } else if (asked.signaled || status != IBV_WC_SUCCESS) {
      complete(qp->qp_num, wr->wr_id, status);
    }
  }
  return 0;
}

inline int poll_cq(ibv_cq*, int most, ibv_wc* into) {
  std::lock_guard lock(device->mutex);
  int count = 0;
  for (; count < most && !device->completions.empty(); ++count) {
    into[count] = device->completions.front();
    device->completions.pop_front();
  }
  return count;
}

inline int modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int) {
  if (attributes->qp_state == IBV_QPS_RTR) return device->on_rtr(attributes->dest_qp_num);
  if (attributes->qp_state != IBV_QPS_ERR) return 0;
  note({"halt", qp->qp_num});
  std::lock_guard lock(device->mutex);
  for (const uint64_t wr_id : device->unanswered[qp->qp_num])
    complete(qp->qp_num, wr_id, IBV_WC_WR_FLUSH_ERR);
  device->unanswered.erase(qp->qp_num);
  return 0;
}

inline const Api& made_up() {
  static const Api api = [] {
    Api api{};
    api.close_device = [](ibv_context* context) {
      note({"close"});
      std::lock_guard lock(device->mutex);
      device->closed = true;
      delete context;
      return 0;
    };
    api.dealloc_pd = [](ibv_pd*) { return 0; };
    api.query_port = [](ibv_context*, uint8_t, ibv_port_attr* port) {
      *port = {};
      port->state = IBV_PORT_ACTIVE;
      port->active_mtu = IBV_MTU_1024;
      return 0;
    };
    api.create_cq = [](ibv_context* context, int, void*, ibv_comp_channel*, int) {
      auto* const cq = new ibv_cq{};
      cq->context = context;
      return cq;
    };
    api.destroy_cq = [](ibv_cq* cq) {
      note({"destroy cq"});
      delete cq;
      return 0;
    };
    make_up_channels(api);
    api.get_cq_event = [](ibv_comp_channel*, ibv_cq**, void**) { return -1; };
    api.create_qp = [](ibv_pd* pd, ibv_qp_init_attr* wanted) {
      auto* const qp = new ibv_qp{};
      qp->context = pd->context;
      qp->qp_context = wanted->qp_context;
      qp->qp_num = device->next_qpn++;
      return qp;
    };
    api.modify_qp = modify_qp;
    api.destroy_qp = [](ibv_qp* qp) {
      device->on_destroy();
      note({"destroy qp", qp->qp_num});
      delete qp;
      return 0;
    };
    api.reg_mr_iova2 = [](ibv_pd*, void*, size_t, uint64_t, unsigned) { return new ibv_mr{}; };
    api.dereg_mr = [](ibv_mr* mr) {
      note({"deregister"});
      delete mr;
      return 0;
    };
    api.get_async_event = [](ibv_context*, ibv_async_event*) { return -1; };
    api.wc_status_str = [](ibv_wc_status) { return "a status"; };
    api.event_type_str = [](ibv_event_type) { return "an event"; };
    return api;
  }();
  return api;
}

/// `node` in sysfs is how its removal is found out.
inline std::shared_ptr<Nic> open_nic(ibv_pd& pd, const DeviceNode& node = {}) {
  auto* const context = new ibv_context{};
  context->ops.post_send = post_send;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = [](ibv_cq*, int) { return 0; };
  context->async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  pd.context = context;
  return std::make_shared<Nic>(made_up(), Owned<ibv_context>(context, made_up().close_device),
                               Owned<ibv_pd>(&pd, made_up().dealloc_pd), NicPlace{"made_up", 1, 100'000},
                               Manner{}, node);
}

}  // namespace kvlink::verbs::testing

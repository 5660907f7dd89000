// SPDX-License-Identifier: Apache-2.0
// The functions of libibverbs, loaded at run time. Functions that its header inlines (posting, polling,
// arming) need no entry.
#pragma once

#include <infiniband/verbs.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "transports/verbs/gid.h"
#include "transports/verbs/mlx5_api.h"

namespace kvlink::verbs {

/// Names without `ibv_`. reg_mr_iova2 drops optional access flags that the device lacks.
// clang-format off
#define KVLINK_IBVERBS(F) \
  F(get_device_list) F(free_device_list) F(get_device_name) F(open_device) F(close_device) F(query_device) \
  F(query_gid) F(query_pkey) F(alloc_pd) F(dealloc_pd) F(reg_mr_iova2) F(dereg_mr) F(create_comp_channel) \
  F(destroy_comp_channel) F(create_cq) F(destroy_cq) F(get_cq_event) F(ack_cq_events) F(create_qp) \
  F(modify_qp) F(destroy_qp) F(get_async_event) F(ack_async_event) F(wc_status_str) F(event_type_str)
// clang-format on

struct Api {
#define KVLINK_DECLARE(name) decltype(&::ibv_##name) name;
  KVLINK_IBVERBS(KVLINK_DECLARE)
#undef KVLINK_DECLARE
  int (*query_port)(ibv_context*, uint8_t, ibv_port_attr*);  // a macro in the header
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr;              // null before rdma-core 34
  decltype(&::ibv_query_ece) query_ece;                      // null before rdma-core 30
  decltype(&::ibv_set_ece) set_ece;
  const Mlx5Api* mlx5 = nullptr;                 // null: the library is absent or old
  std::string sysfs = "/sys/class/infiniband/";  // a folder for each device
  std::string nodes = "/dev/infiniband/";
  std::vector<LocalIp> (*local_ips)() = nullptr;  // of this network namespace; null: they cannot be told
};

/// Opens the library once. Returns kTransportUnavailable and the command that installs it if it is absent.
Result<const Api*> api();

/// An object of libibverbs, destroyed by its own function.
template <typename T>
using Owned = std::unique_ptr<T, int (*)(T*)>;

}  // namespace kvlink::verbs

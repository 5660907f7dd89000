// SPDX-License-Identifier: Apache-2.0
// libibverbs as it is found at run time. What its header inlines (posting, polling, arming) needs no entry
// here.
#pragma once

#include <infiniband/verbs.h>

#include <memory>

#include "base/status.h"

namespace kvlink::verbs {

/// Each is `ibv_` and this name. reg_mr_iova2 drops what the device lacks of the optional access flags.
// clang-format off
#define KVLINK_IBVERBS(F) \
  F(get_device_list) F(free_device_list) F(get_device_name) F(open_device) F(close_device) F(query_device) \
  F(query_gid) F(alloc_pd) F(dealloc_pd) F(reg_mr_iova2) F(dereg_mr) F(create_comp_channel) \
  F(destroy_comp_channel) F(create_cq) F(destroy_cq) F(get_cq_event) F(ack_cq_events) F(create_qp) \
  F(modify_qp) F(destroy_qp) F(get_async_event) F(ack_async_event) F(wc_status_str) F(event_type_str)
// clang-format on

struct Api {
#define KVLINK_DECLARE(name) decltype(&::ibv_##name) name;
  KVLINK_IBVERBS(KVLINK_DECLARE)
#undef KVLINK_DECLARE
  int (*query_port)(ibv_context*, uint8_t, ibv_port_attr*);  // a macro in the header
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr;              // null before rdma-core 34
};

/// Opens the library once. kTransportUnavailable, with the command that installs it, when it is absent.
Result<const Api*> api();

/// What libibverbs makes, destroyed by the function that belongs to it.
template <typename T>
using Owned = std::unique_ptr<T, int (*)(T*)>;

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
// The functions of librdmacm, loaded at run time.
#pragma once

#include <rdma/rdma_cma.h>

#include "base/status.h"

namespace kvlink::verbs {

/// Names without `rdma_`.
// clang-format off
#define KVLINK_RDMACM(F) \
  F(create_event_channel) F(destroy_event_channel) F(create_id) F(destroy_id) F(migrate_id) F(set_option) \
  F(bind_addr) F(listen) F(get_src_port) F(resolve_addr) F(resolve_route) F(connect) F(establish) \
  F(accept) F(init_qp_attr) F(get_cm_event) F(ack_cm_event) F(event_str)
// clang-format on

struct CmApi {
#define KVLINK_DECLARE(name) decltype(&::rdma_##name) name;
  KVLINK_RDMACM(KVLINK_DECLARE)
#undef KVLINK_DECLARE
};

/// Opens the library once. Returns kTransportUnavailable and the command that installs it if it is absent.
Result<const CmApi*> cm_api();

}  // namespace kvlink::verbs

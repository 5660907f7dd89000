// SPDX-License-Identifier: Apache-2.0
// librdmacm as it is found at run time.
#pragma once

#include <rdma/rdma_cma.h>

#include "base/status.h"

namespace kvlink::verbs {

struct CmApi {
  decltype(&::rdma_create_event_channel) create_event_channel;
  decltype(&::rdma_destroy_event_channel) destroy_event_channel;
  decltype(&::rdma_create_id) create_id;
  decltype(&::rdma_destroy_id) destroy_id;
  decltype(&::rdma_migrate_id) migrate_id;
  decltype(&::rdma_set_option) set_option;
  decltype(&::rdma_bind_addr) bind_addr;
  decltype(&::rdma_listen) listen;
  decltype(&::rdma_get_src_port) get_src_port;
  decltype(&::rdma_resolve_addr) resolve_addr;
  decltype(&::rdma_resolve_route) resolve_route;
  decltype(&::rdma_connect) connect;
  decltype(&::rdma_establish) establish;
  decltype(&::rdma_accept) accept;
  decltype(&::rdma_init_qp_attr) init_qp_attr;
  decltype(&::rdma_get_cm_event) get_cm_event;
  decltype(&::rdma_ack_cm_event) ack_cm_event;
  decltype(&::rdma_event_str) event_str;
};

/// Opens the library once. kTransportUnavailable, with the command that installs it, when it is absent.
Result<const CmApi*> cm_api();

}  // namespace kvlink::verbs

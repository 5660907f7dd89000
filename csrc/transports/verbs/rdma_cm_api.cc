// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/rdma_cm_api.h"

#include "base/dynamic_library.h"

namespace kvlink::verbs {
namespace {

Result<CmApi> load() {
  Result<Library> opened =
      Library::open({"librdmacm.so.1"},
                    "install it: apt-get install librdmacm1 (or dnf install librdmacm); NICs other than "
                    "iWARP's do without it (KVLINK_RDMA_CONNECT=direct)");
  if (!opened.ok()) return opened.status();
  Library& library = *opened;
  CmApi api{};
  const bool complete =
      library.load(api.create_event_channel, "rdma_create_event_channel") &&
      library.load(api.destroy_event_channel, "rdma_destroy_event_channel") &&
      library.load(api.create_id, "rdma_create_id") && library.load(api.destroy_id, "rdma_destroy_id") &&
      library.load(api.migrate_id, "rdma_migrate_id") && library.load(api.set_option, "rdma_set_option") &&
      library.load(api.bind_addr, "rdma_bind_addr") && library.load(api.listen, "rdma_listen") &&
      library.load(api.get_src_port, "rdma_get_src_port") &&
      library.load(api.resolve_addr, "rdma_resolve_addr") &&
      library.load(api.resolve_route, "rdma_resolve_route") && library.load(api.connect, "rdma_connect") &&
      library.load(api.establish, "rdma_establish") && library.load(api.accept, "rdma_accept") &&
      library.load(api.init_qp_attr, "rdma_init_qp_attr") &&
      library.load(api.get_cm_event, "rdma_get_cm_event") &&
      library.load(api.ack_cm_event, "rdma_ack_cm_event") && library.load(api.event_str, "rdma_event_str");
  if (complete) return api;
  return Status::Unavailable(library.name() + " has no " + library.missing() + ": it is too old",
                             "upgrade rdma-core");
}

}  // namespace

Result<const CmApi*> cm_api() {
  static const Result<CmApi> loaded = load();
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

}  // namespace kvlink::verbs

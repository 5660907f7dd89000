// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/ibverbs_api.h"

#include "base/dynamic_library.h"

namespace kvlink::verbs {
namespace {

const char* const kInstall =
    "install it: apt-get install rdma-core ibverbs-providers (or dnf install libibverbs)";

Result<Api> load() {
  Result<Library> opened = Library::open({"libibverbs.so.1"}, kInstall);
  if (!opened.ok()) return opened.status();
  Library& library = *opened;
  Api api{};
  const bool complete =
      library.load(api.get_device_list, "ibv_get_device_list") &&
      library.load(api.free_device_list, "ibv_free_device_list") &&
      library.load(api.get_device_name, "ibv_get_device_name") &&
      library.load(api.open_device, "ibv_open_device") &&
      library.load(api.close_device, "ibv_close_device") &&
      library.load(api.query_device, "ibv_query_device") && library.load(api.query_port, "ibv_query_port") &&
      library.load(api.query_gid, "ibv_query_gid") && library.load(api.alloc_pd, "ibv_alloc_pd") &&
      library.load(api.dealloc_pd, "ibv_dealloc_pd") && library.load(api.reg_mr_iova2, "ibv_reg_mr_iova2") &&
      library.load(api.dereg_mr, "ibv_dereg_mr") &&
      library.load(api.create_comp_channel, "ibv_create_comp_channel") &&
      library.load(api.destroy_comp_channel, "ibv_destroy_comp_channel") &&
      library.load(api.create_cq, "ibv_create_cq") && library.load(api.destroy_cq, "ibv_destroy_cq") &&
      library.load(api.get_cq_event, "ibv_get_cq_event") &&
      library.load(api.ack_cq_events, "ibv_ack_cq_events") && library.load(api.create_qp, "ibv_create_qp") &&
      library.load(api.modify_qp, "ibv_modify_qp") && library.load(api.destroy_qp, "ibv_destroy_qp") &&
      library.load(api.get_async_event, "ibv_get_async_event") &&
      library.load(api.ack_async_event, "ibv_ack_async_event") &&
      library.load(api.wc_status_str, "ibv_wc_status_str") &&
      library.load(api.event_type_str, "ibv_event_type_str");
  if (!complete) {
    return Status::Unavailable(
        library.name() + " has no " + library.missing() + ": it is older than rdma-core 28",
        "upgrade rdma-core");
  }
  // Before Linux 5.12 a forked child would take pages away from the NIC; since then this does nothing.
  decltype(&::ibv_fork_init) fork_init;
  if (library.load(fork_init, "ibv_fork_init")) static_cast<void>(fork_init());
  library.load(api.reg_dmabuf_mr, "ibv_reg_dmabuf_mr");  // from rdma-core 34 on; null before
  return api;
}

}  // namespace

Result<const Api*> api() {
  static const Result<Api> loaded = load();
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

}  // namespace kvlink::verbs

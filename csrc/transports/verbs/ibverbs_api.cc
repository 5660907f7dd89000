// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/ibverbs_api.h"

#include "base/dynamic_library.h"
#include "transports/verbs/gid.h"

namespace kvlink::verbs {
namespace {

const char* const kInstall =
    "install it: apt-get install rdma-core ibverbs-providers (or dnf install libibverbs)";

Result<Api> load() {
  Result<Library> opened = Library::open({"libibverbs.so.1"}, kInstall);
  if (!opened.ok()) return opened.status();
  Library& library = *opened;
  Api api{};
#define KVLINK_LOAD(name) &&library.load(api.name, "ibv_" #name)
  const bool complete = library.load(api.query_port, "ibv_query_port") KVLINK_IBVERBS(KVLINK_LOAD);
#undef KVLINK_LOAD
  if (!complete) {
    return Status::Unavailable(
        library.name() + " has no " + library.missing() + ": it is older than rdma-core 28",
        "upgrade rdma-core");
  }
  // Before Linux 5.12 a forked child would take pages away from the NIC. Since then this call does nothing.
  decltype(&::ibv_fork_init) fork_init;
  if (library.load(fork_init, "ibv_fork_init")) static_cast<void>(fork_init());
  library.load(api.reg_dmabuf_mr, "ibv_reg_dmabuf_mr");
  if (!library.load(api.query_ece, "ibv_query_ece") || !library.load(api.set_ece, "ibv_set_ece")) {
    api.query_ece = nullptr;
  }
  api.mlx5 = mlx5_api();
  api.local_ips = local_ips;
  return api;
}

}  // namespace

Result<const Api*> api() {
  static const Result<Api> loaded = load();
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

}  // namespace kvlink::verbs

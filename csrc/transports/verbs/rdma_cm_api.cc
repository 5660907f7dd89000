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
#define KVLINK_LOAD(name) &&library.load(api.name, "rdma_" #name)
  const bool complete = true KVLINK_RDMACM(KVLINK_LOAD);
#undef KVLINK_LOAD
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

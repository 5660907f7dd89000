// SPDX-License-Identifier: Apache-2.0
// Compares the declarations of integrations/nixl/nixl_api.h with NIXL's own headers, whose folder is given to
// the compiler: tests/nixl/test_layouts.py. Compiled and run; prints what differs.
#include <cstdio>
#include <cstring>

#include "nixl_api.h"

#define private public
#define protected public
#include "backend/backend_engine.h"
#include "backend/backend_plugin.h"
#undef private
#undef protected

namespace api = kvlink::nixl::api;

namespace kvlink::nixl::api {
struct Layouts {
  static constexpr size_t kFailed = offsetof(Backend, failed_), kAgent = offsetof(Backend, agent_),
                          kParams = offsetof(Backend, params_), kType = offsetof(Backend, type_),
                          kEvents = offsetof(Backend, events_);
};
}  // namespace kvlink::nixl::api

#define SAME(ours, theirs) static_assert((ours) == (theirs))
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
SAME(sizeof(api::InitParams), sizeof(nixlBackendInitParams));
SAME(offsetof(api::InitParams, params), offsetof(nixlBackendInitParams, customParams));
SAME(offsetof(api::InitParams, telemetry), offsetof(nixlBackendInitParams, enableTelemetry_));
SAME(sizeof(api::Options), sizeof(nixlBackendOptionalArgs));
SAME(offsetof(api::Options, notifies), offsetof(nixlBackendOptionalArgs, hasNotif));
SAME(sizeof(api::Descriptor), sizeof(nixlBasicDesc));
SAME(offsetof(api::Descriptor, bytes), offsetof(nixlBasicDesc, len));
SAME(sizeof(api::BlobDescriptor), sizeof(nixlBlobDesc));
SAME(offsetof(api::BlobDescriptor, blob), offsetof(nixlBlobDesc, metaInfo));
SAME(sizeof(api::MetaDescriptor), sizeof(nixlMetaDesc));
SAME(offsetof(api::MetaDescriptor, metadata), offsetof(nixlMetaDesc, metadataP));
SAME(sizeof(api::MetaList), sizeof(nixl_meta_dlist_t));
SAME(offsetof(api::MetaList, descriptors), offsetof(nixl_meta_dlist_t, descs));
SAME(offsetof(api::MetaList, kind), offsetof(nixl_meta_dlist_t, type));
SAME(sizeof(api::Backend), sizeof(nixlBackendEngine));
SAME(api::Layouts::kType, offsetof(nixlBackendEngine, backendType));
SAME(api::Layouts::kParams, offsetof(nixlBackendEngine, customParams));
SAME(api::Layouts::kEvents, offsetof(nixlBackendEngine, telemetryEvents_));
SAME(api::Layouts::kFailed, offsetof(nixlBackendEngine, initErr));
SAME(api::Layouts::kAgent, offsetof(nixlBackendEngine, localAgent));
SAME(sizeof(api::Metadata), sizeof(nixlBackendMD));
SAME(sizeof(api::Request), sizeof(nixlBackendReqH));
SAME(sizeof(api::Plugin), sizeof(nixlBackendPlugin));
SAME(offsetof(api::Plugin, memory_kinds), offsetof(nixlBackendPlugin, get_backend_mems));
SAME(api::kPluginVersion, NIXL_PLUGIN_API_VERSION);
SAME(static_cast<int>(api::Memory::kFile), FILE_SEG);
SAME(static_cast<int>(api::Operation::kWrite), NIXL_WRITE);
SAME(static_cast<int>(api::State::kInProgress), NIXL_IN_PROG);
SAME(static_cast<int>(api::State::kRemoteDisconnect), NIXL_ERR_REMOTE_DISCONNECT);
SAME(static_cast<int>(api::State::kCanceled), NIXL_ERR_CANCELED);
SAME(sizeof(api::Memory), sizeof(nixl_mem_t));
SAME(sizeof(api::State), sizeof(nixl_status_t));

/// Returns the place of a virtual function in its table, by the Itanium ABI.
template <typename Member>
size_t place(Member member) {
  size_t word;
  static_assert(sizeof member >= sizeof word);
  std::memcpy(&word, &member, sizeof word);
  return (word - 1) / sizeof(void*);
}

int main() {
  using Ours = api::Backend;
  using Theirs = nixlBackendEngine;
  using RemoteView = nixl_status_t (Theirs::*)(const nixl_remote_meta_dlist_t&, nixlMemViewH&,
                                               const nixl_opt_b_args_t*) const;
  using LocalView =
      nixl_status_t (Theirs::*)(const nixl_meta_dlist_t&, nixlMemViewH&, const nixl_opt_b_args_t*) const;
  const struct {
    const char* name;
    size_t ours, theirs;
  } kFunctions[] = {
#define FUNCTION(ours, theirs) {#ours, place(&Ours::ours), place(&Theirs::theirs)}
      FUNCTION(supports_remote, supportsRemote),
      FUNCTION(supports_local, supportsLocal),
      FUNCTION(supports_notifications, supportsNotif),
      FUNCTION(memory_kinds, getSupportedMems),
      FUNCTION(register_memory, registerMem),
      FUNCTION(deregister_memory, deregisterMem),
      FUNCTION(connect, connect),
      FUNCTION(disconnect, disconnect),
      FUNCTION(unload_metadata, unloadMD),
      FUNCTION(prepare, prepXfer),
      FUNCTION(post, postXfer),
      FUNCTION(check, checkXfer),
      FUNCTION(release, releaseReqH),
      {"prepare_remote_view", place(&Ours::prepare_remote_view),
       place(static_cast<RemoteView>(&Theirs::prepMemView))},
      {"prepare_local_view", place(&Ours::prepare_local_view),
       place(static_cast<LocalView>(&Theirs::prepMemView))},
      FUNCTION(release_view, releaseMemView),
      FUNCTION(public_data, getPublicData),
      FUNCTION(connection_info, getConnInfo),
      FUNCTION(load_connection_info, loadRemoteConnInfo),
      FUNCTION(load_remote, loadRemoteMD),
      FUNCTION(load_local, loadLocalMD),
      FUNCTION(take_notifications, getNotifs),
      FUNCTION(notify, genNotif),
      FUNCTION(query_memory, queryMem),
      FUNCTION(estimate, estimateXferCost),
  };
  size_t differ = 0;
  for (const auto& each : kFunctions) {
    if (each.ours == each.theirs) continue;
    std::printf("%s is at %zu, and NIXL's at %zu\n", each.name, each.ours, each.theirs);
    ++differ;
  }
  std::printf("%zu functions compared\n", sizeof kFunctions / sizeof *kFunctions);
  return differ == 0 ? 0 : 1;
}

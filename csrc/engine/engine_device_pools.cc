// SPDX-License-Identifier: Apache-2.0
// The engine's part for pools in device memory: which transports stage their reads.
#include <utility>

#include "device/cuda_copier.h"
#include "engine/engine.h"

namespace kvlink {
namespace {

Status cannot_stage(const std::string& transport, const Status& why) {
  return Status::Unavailable(transport +
                                 " reaches host memory, and the pool is GPU memory; it cannot be staged (" +
                                 why.sentence() + ")",
                             "use verbs (KVLINK_TRANSPORTS) or a pool in host memory");
}

}  // namespace

void Engine::bounce(const std::string& transport, const std::string& why) {
  if (TransportState* const state = find(transport)) state->bounce_why = why;
}

Result<std::shared_ptr<DeviceCopier>> Engine::make_copier(const std::byte* memory) const {
  if (options_.make_copier) return options_.make_copier(memory);
  return make_cuda_copier(memory, options_.transport.cuda_kernel, options_.transport.gpu_blocks);
}

/// Transports that do not reach the pool's device bounce if they can. The others use the staging buffer if
/// requested.
void Engine::wrap_for_device_pool() {
  std::shared_ptr<Bounce> bounced;
  std::shared_ptr<StagingBuffer> staging;
  for (TransportState& state : transports_) {
    if (!state.transport) continue;
    if (state.transport->capabilities().reaches_device_memory && state.bounce_why.empty()) {
      if (staging_.memory.base) add_staging(state, staging);
      continue;
    }
    const Status wrapped = wrap_in_bounce(state, bounced);
    state.access.bounces = wrapped.ok();
    if (wrapped.ok()) continue;
    state.access.refused = cannot_stage(state.name, wrapped).sentence();
    close_transport(state);
  }
}

Status Engine::wrap_in_bounce(TransportState& state, std::shared_ptr<Bounce>& shared) {
  if (options_.bounce_bytes == 0) {
    return Status::Unavailable("bounce is not allowed", "add it to KVLINK_GPUDIRECT");
  }
  if (!shared) {
    auto made = Bounce::make(pool_.front().base, options_.bounce_bytes,
                             [this](auto... of) { return make_copier(of...); });
    if (!made.ok()) return made.status();
    shared = std::move(*made);
  }
  const auto num_regions = static_cast<uint32_t>(pool_.size());
  auto wrapped = bounce_wrap(std::move(state.transport), shared, num_regions, state.bounce_why);
  if (!wrapped.ok()) return wrapped.status();
  state.transport = std::move(*wrapped);
  return {};
}

/// Without the staging buffer the transport works as well, only slower between unlike layouts.
void Engine::add_staging(TransportState& state, std::shared_ptr<StagingBuffer>& shared) {
  if (!shared) {
    auto made = make_staging(staging_.memory, [this](auto... of) { return make_copier(of...); });
    if (!made.ok()) {
      staging_refused_ = made.status().sentence();
      return;
    }
    shared = std::move(*made);
  }
  const std::string plain = state.name.substr(state.name.find('+') + 1);
  // It is registered after the pool and the scratch memory, so that those keep their numbers.
  state.staging.emplace(shared, plain, staging_.always, static_cast<uint32_t>(pool_.size() + 1));
}

}  // namespace kvlink

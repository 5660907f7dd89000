// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

#include "base/host_identity.h"
#include "device/cuda_device.h"

namespace kvlink::nixl {
namespace {

constexpr uint32_t kSeats = 64;    // of which a pool uses one at a time
constexpr uint32_t kTurn[] = {0};  // what the seat covers, as everything

/// Transports that are of no use for memory of this kind are left out.
std::vector<std::string> transports_for(const std::vector<std::string>& all, bool device) {
  std::vector<std::string> chosen;
  for (const std::string& name : all) {
    if (name != "cuda" || device) chosen.push_back(name);
  }
  return chosen;
}

}  // namespace

uint32_t RegisteredMemory::pool_of(const std::byte* memory) {
  // A process that has not loaded the driver has no GPU memory, and need not load it.
  void* const loaded = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!loaded) return kHostPool;
  ::dlclose(loaded);
  const Result<const cuda::Api*> api = cuda::api();
  if (!api.ok()) return kHostPool;
  int type = 0, ordinal = 0;
  const cuda::Address at = cuda::address_of(memory);
  if ((*api)->pointer_get_attribute(&type, cuda::kMemoryType, at) != cuda::kSuccess ||
      type != cuda::kDeviceMemory ||
      (*api)->pointer_get_attribute(&ordinal, cuda::kDeviceOrdinal, at) != cuda::kSuccess) {
    return kHostPool;
  }
  return static_cast<uint32_t>(ordinal) + 1;
}

RegisteredMemory::Pool* RegisteredMemory::find(uint32_t pool) const {
  const auto found = pools_.find(pool);
  return found == pools_.end() ? nullptr : found->second.get();
}

Engine* RegisteredMemory::engine(uint32_t pool) const {
  const std::lock_guard lock(mutex_);
  Pool* const found = find(pool);
  return found ? found->engine.get() : nullptr;
}

/// REQUIRES mutex_. Opens a pool with its first region; it stays until the agent closes.
Result<RegisteredMemory::Pool*> RegisteredMemory::open(uint32_t number, const MemoryRange& like) {
  if (closed_) return Status::Config("the agent is closed");
  if (Pool* const pool = find(number)) return pool;
  auto pool = std::make_unique<Pool>();
  pool->epoch = random_u64();
  EngineOptions options;
  options.epoch = pool->epoch;
  options.transports = transports_for(settings_.transports, like.device);
  options.transport.host = settings_.host;
  options.transport.advertise = settings_.advertise;
  options.transport.self = {pool_name(number), pool->epoch};
  options.num_lease_slots = kSeats;
  options.bounce_bytes = settings_.bounce_bytes;
  Result<std::unique_ptr<Engine>> engine = Engine::make(options);
  if (!engine.ok()) return engine.status();
  (*engine)->expect_regions(like);
  if (Status status = (*engine)->start(); !status.ok()) return status;
  const Result<LeaseSeat> seat = (*engine)->grant_soft(kTurn, 0, kNoExpiryNs);
  if (!seat.ok()) return seat.status();
  pool->engine = std::move(*engine);
  pool->seat = *seat;
  return (pools_[number] = std::move(pool)).get();
}

Result<std::shared_ptr<OwnRegion>> RegisteredMemory::add(std::byte* base, uint64_t bytes) {
  const uint32_t number = pool_of(base);
  const MemoryRange range{.base = base, .bytes = bytes, .device = number != kHostPool};
  Pool* pool = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const Result<Pool*> opened = open(number, range);
    if (!opened.ok()) return opened.status();
    pool = *opened;
  }
  const Result<uint32_t> added = pool->engine->add_region(range);
  if (!added.ok()) return added.status();
  auto region = std::make_shared<OwnRegion>();
  region->pool = number;
  region->number = *added;
  region->base = base;
  region->bytes = bytes;
  return region;
}

void RegisteredMemory::drop(const OwnRegion& region) {
  Pool* pool = nullptr;
  {
    const std::lock_guard lock(mutex_);
    pool = find(region.pool);
  }
  if (!pool) return;
  const std::lock_guard turn(pool->turn);
  // Reads by peers do not validate from now on, and nothing is sent for them on return.
  pool->engine->revoke(kTurn);
  pool->engine->drop_region(region.number);
  const Result<LeaseSeat> next = pool->engine->grant_soft(kTurn, 0, kNoExpiryNs);
  const std::lock_guard lock(mutex_);
  pool->seat = next.ok() ? *next : LeaseSeat{};
}

AgentCard RegisteredMemory::card() const {
  AgentCard card;
  const std::lock_guard lock(mutex_);
  for (const auto& [number, pool] : pools_) {
    card.push_back({number, pool->epoch, pool->seat, pool->engine->access(), pool->engine->late_regions()});
  }
  return card;
}

Result<Accepted> RegisteredMemory::accept(const ConnectRequest& request, uint64_t caller) const {
  Engine* asked = nullptr;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, pool] : pools_) {
      if (request.worker_id == pool_name(number) && request.epoch == pool->epoch) asked = pool->engine.get();
    }
  }
  if (!asked) return Status::Config("this agent has no " + request.worker_id + " of that epoch");
  return asked->accept(request.transport, request.hellos, request.takes_keys, caller);
}

void RegisteredMemory::close() {
  std::vector<Engine*> engines;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (const auto& [number, pool] : pools_) engines.push_back(pool->engine.get());
  }
  for (Engine* const engine : engines) engine->close();
}

}  // namespace kvlink::nixl

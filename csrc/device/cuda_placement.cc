// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_placement.h"

#include <algorithm>
#include <cstdio>

namespace kvlink::cuda {
namespace {

/// Returns 0 for memory that was mapped, of which some drivers tell no number.
unsigned long long buffer_id(const Api& api, Address at) {
  unsigned long long id = 0;
  return api.pointer_get_attribute(&id, kBufferId, at) == kSuccess ? id : 0;
}

/// Returns 0 for memory that was not mapped from an allocation. The caller releases it.
Allocation retain(const Api& api, Address at) {
  Allocation allocation = 0;
  return api.allocation_retain(&allocation, reinterpret_cast<void*>(at)) == kSuccess ? allocation : 0;
}

}  // namespace

std::shared_ptr<const Placement> Placement::of(std::span<const MemoryRange> pool) {
  if (pool.empty()) return nullptr;
  const auto device = Device::of(pool.front().base);
  if (!device.ok()) return nullptr;
  std::shared_ptr<Placement> made(new Placement(*device));
  for (const MemoryRange& range : pool) made->add(range);
  return made->parts_.empty() ? nullptr : made;
}

Placement::~Placement() {
  if (device_->process.inherited()) return;
  const RelaxedCapture relaxed(device_->api);
  for (const Part& part : parts_) {
    if (part.allocation != 0) device_->api.allocation_release(part.allocation);
  }
}

void Placement::add(const MemoryRange& range) {
  const Current current(*device_);
  const Api& api = device_->api;
  const Address end = address_of(range.base) + range.bytes;
  for (Address at = address_of(range.base); at < end;) {
    Address base = 0;
    size_t bytes = 0;
    if (api.get_address_range(&base, &bytes, at) != kSuccess || base + bytes <= at) return;
    parts_.push_back({at, buffer_id(api, at), retain(api, at)});
    at = base + bytes;
  }
}

bool Placement::is_same(const Part& part) const {
  const Api& api = device_->api;
  if (part.allocation == 0) return buffer_id(api, part.at) == part.id;
  const Allocation now = retain(api, part.at);
  if (now != 0) api.allocation_release(now);
  return now == part.allocation;
}

Status Placement::check() const {
  const RelaxedCapture relaxed(device_->api);
  const size_t count = std::min(parts_.size(), kPartsALook);
  const size_t first = next_.fetch_add(count, std::memory_order_relaxed);
  for (size_t i = 0; i < count; ++i) {
    const Part& part = parts_[(first + i) % parts_.size()];
    if (is_same(part)) continue;
    char at[32];
    std::snprintf(at, sizeof at, "0x%llx", part.at);
    return Status{Code::kConfig,
                  std::string("other GPU memory than this worker registered, or none, is at ") + at +
                      ": its engine slept, used a memory saver, or freed or moved tensors of the pool, and "
                      "peers would read and write the old memory",
                  "close this Worker before the memory goes, and make one over the pool when it is back"};
  }
  return {};
}

}  // namespace kvlink::cuda

// SPDX-License-Identifier: Apache-2.0
#include "staging/device_staging.h"

#include <string>

namespace kvlink {
namespace {

// The bytes of 80 ns of a NIC's time, at 49 GB/s.
constexpr uint32_t kGapBytes = 4 << 10;

// Assumed for 400 Gb/s until pulls from a peer refine it: 12 million operations a second, and a scatter entry
// costs a quarter of one. Two round trips of 5 us and 6 us of this process; a launch and its event, 15 us.
constexpr StagingCosts kByNic = {.direct = {16, 80, 20, 45.6}, .staged = {31, 80, 2, 45.6}};
// Assumed for copies by a GPU over NVLink. A table entry costs the CPU that writes it.
constexpr StagingCosts kByGpu = {.direct = {15, 0, 2, 300}, .staged = {30, 0, 4, 300}};

}  // namespace

const StagingCosts& prior_costs(std::string_view transport) { return transport == "cuda" ? kByGpu : kByNic; }

Result<std::shared_ptr<StagingBuffer>> make_staging(const MemoryRange& memory,
                                                    const MakeDeviceCopier& make_copier) {
  if (memory.bytes < SlotRing::kSlotBytes) {
    return Status::Config("a staging buffer needs " + std::to_string(SlotRing::kSlotBytes) + " bytes");
  }
  Result<std::shared_ptr<DeviceCopier>> copier = make_copier(memory.base);
  if (!copier.ok()) return copier.status();
  return std::make_shared<StagingBuffer>(memory, std::move(*copier));
}

DeviceStaging::DeviceStaging(std::shared_ptr<StagingBuffer> staging, std::string_view transport, bool always,
                             uint32_t slot_region)
    : staging_(std::move(staging)), costs_(prior_costs(transport)), slot_region_(slot_region) {
  costs_.always = always;
}

Result<std::unique_ptr<StageableEndpoint>> DeviceStaging::wrap(std::unique_ptr<Endpoint> inner) const {
  return stage_endpoint(std::move(inner), staging_, {.gap_bytes = kGapBytes}, slot_region_);
}

std::shared_ptr<StagingPolicy> DeviceStaging::make_policy() const {
  return std::make_shared<StagingPolicy>(costs_, kGapBytes);
}

}  // namespace kvlink

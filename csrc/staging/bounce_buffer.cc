// SPDX-License-Identifier: Apache-2.0
#include "staging/bounce_buffer.h"

namespace kvlink {
namespace {

MemoryRange part_of(const HostMemory& memory, uint64_t offset, uint64_t bytes) {
  return {.base = memory.range().base + offset, .bytes = bytes};
}

}  // namespace

Bounce::Bounce(const std::shared_ptr<HostMemory>& memory, std::shared_ptr<DeviceCopier> copier, uint64_t half)
    : landing_(std::make_shared<Landing>(part_of(*memory, 0, half), std::move(copier), memory)),
      sending_(part_of(*memory, half, half)) {}

Result<std::shared_ptr<Bounce>> Bounce::make(const std::byte* memory, uint64_t bytes,
                                             const MakeDeviceCopier& make_copier) {
  if (bytes < kLeastBytes) {
    return Status::Config("a bounce buffer needs " + std::to_string(kLeastBytes) + " bytes");
  }
  const auto num_slots =
      static_cast<uint32_t>(bytes / 2 / (SlotRing::kSlotBytes + DeviceCopier::kTableBytes));
  Result<std::shared_ptr<DeviceCopier>> copier = make_copier(memory, 2 * num_slots);
  if (!copier.ok()) return copier.status();
  const uint64_t half = uint64_t{num_slots} * SlotRing::kSlotBytes;
  Result<std::shared_ptr<HostMemory>> pinned = HostMemory::allocate(2 * half, true);
  if (!pinned.ok()) return pinned.status();
  if (Status status = (*copier)->pin((*pinned)->range().base, 2 * half); !status.ok()) return status;
  return std::shared_ptr<Bounce>(new Bounce(*pinned, std::move(*copier), half));
}

Result<std::unique_ptr<Transport>> bounce_wrap(std::unique_ptr<Transport> inner,
                                               std::shared_ptr<Bounce> bounce, uint32_t num_regions,
                                               const std::string& why_not) {
  Status lends = inner->lend_through(bounce);
  if (!lends.ok() && !why_not.empty()) lends = Status::Unavailable(why_not, {});
  auto wrapped =
      land_through(std::move(inner), bounce->landing(), {.num_out_of_reach = num_regions}, std::move(lends));
  Status status = wrapped->register_scratch(bounce->landing()->memory());
  return status.ok() ? Result<std::unique_ptr<Transport>>(std::move(wrapped)) : status;
}

}  // namespace kvlink

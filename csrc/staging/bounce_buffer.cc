// SPDX-License-Identifier: Apache-2.0
#include "staging/bounce_buffer.h"

namespace kvlink {
namespace {

MemoryRange part_of(const HostMemory& memory, uint64_t offset, uint64_t bytes) {
  return {.base = memory.range().base + offset, .bytes = bytes};
}

class BounceTransport final : public WrappedTransport {
 public:
  BounceTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Bounce> bounce, uint32_t num_regions,
                  uint32_t late_from, const std::string& why_not)
      : WrappedTransport(std::move(inner)),
        bounce_(std::move(bounce)),
        rules_{.num_out_of_reach = num_regions, .late_out_of_reach = late_from},
        not_exported_(why_not.empty()
                          ? Status::Unavailable("peers would have to reach into GPU memory by themselves",
                                                "allow tcp, which sends from it (KVLINK_TRANSPORTS)")
                          : Status::Unavailable(why_not, {})),
        capabilities_(inner_->capabilities()) {
    capabilities_.reaches_device_memory = true;
  }
  ~BounceTransport() override { inner_.reset(); }  // it registered the buffer's memory

  const Capabilities& capabilities() const override { return capabilities_; }
  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>&) override {
    if (!range.device) return inner_->register_memory(range, access);
    if (!capabilities_.exports_through_bounce) return not_exported_;
    return inner_->register_memory(range, access, bounce_);
  }

 protected:
  Result<std::unique_ptr<Endpoint>> wrap(std::unique_ptr<Endpoint> inner) override {
    auto wrapped = stage_endpoint(std::move(inner), bounce_->receiving(), rules_, kSlotRegion);
    if (!wrapped.ok()) return wrapped.status();
    return std::unique_ptr<Endpoint>(std::move(*wrapped));
  }

 private:
  static constexpr uint32_t kSlotRegion = 0;  // as `inner` numbers it: bounce_wrap() registers it first

  const std::shared_ptr<Bounce> bounce_;
  const StagingRules rules_;
  const Status not_exported_;
  Capabilities capabilities_;
};

}  // namespace

Bounce::Bounce(const std::shared_ptr<HostMemory>& memory, std::shared_ptr<DeviceCopier> copier, uint64_t half)
    : receiving_(std::make_shared<StagingBuffer>(part_of(*memory, 0, half), std::move(copier), memory)),
      sending_(part_of(*memory, half, half)) {}

Result<std::shared_ptr<Bounce>> Bounce::make(const std::byte* memory, uint64_t bytes,
                                             const MakeDeviceCopier& make_copier) {
  if (bytes < kLeastBytes) {
    return Status::Config("a bounce buffer needs " + std::to_string(kLeastBytes) + " bytes");
  }
  Result<std::shared_ptr<DeviceCopier>> copier = make_copier(memory);
  if (!copier.ok()) return copier.status();
  const uint64_t half = bytes / 2 / SlotRing::kSlotBytes * SlotRing::kSlotBytes;
  Result<std::shared_ptr<HostMemory>> pinned = HostMemory::allocate(2 * half, true);
  if (!pinned.ok()) return pinned.status();
  if (Status status = (*copier)->pin((*pinned)->range().base, 2 * half); !status.ok()) return status;
  return std::shared_ptr<Bounce>(new Bounce(*pinned, std::move(*copier), half));
}

Result<std::unique_ptr<Transport>> bounce_wrap(std::unique_ptr<Transport> inner,
                                               std::shared_ptr<Bounce> bounce, uint32_t num_regions,
                                               const std::string& why_not, uint32_t late_from) {
  const auto registered = inner->register_memory(bounce->receiving()->memory(), Access::kLocal);
  if (!registered.ok()) return registered.status();
  return std::make_unique<BounceTransport>(std::move(inner), std::move(bounce), num_regions, late_from,
                                           why_not);
}

}  // namespace kvlink

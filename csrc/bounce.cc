// SPDX-License-Identifier: Apache-2.0
#include "bounce.h"

namespace kvlink {
namespace {

MemoryRange part_of(const HostMemory& memory, uint64_t offset, uint64_t bytes) {
  return {.base = memory.range().base + offset, .bytes = bytes};
}

class BounceTransport final : public Transport {
 public:
  BounceTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Bounce> bounce, uint32_t num_regions,
                  Status lends)
      : bounce_(std::move(bounce)),
        inner_(std::move(inner)),
        num_regions_(num_regions),
        lends_(std::move(lends)) {}

  std::string address() const override { return inner_->address(); }
  std::vector<PortState> ports() const override { return inner_->ports(); }
  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access) override {
    if (range.device && !lends_.ok()) return lends_;
    return inner_->register_memory(range, access);
  }
  bool reaches_devices() const override { return true; }
  bool lands_in_registered_only() const override { return inner_->lands_in_registered_only(); }
  Status register_scratch(const MemoryRange& range) override { return inner_->register_scratch(range); }
  uint32_t lanes_to(std::string_view owner_address) const override { return inner_->lanes_to(owner_address); }
  Result<std::unique_ptr<Endpoint>> open(std::string_view owner_address, uint32_t lane) override {
    Result<std::unique_ptr<Endpoint>> inner = inner_->open(owner_address, lane);
    return inner.ok() ? bounce_endpoint(std::move(*inner), bounce_, num_regions_) : std::move(inner);
  }
  Result<std::string> accept(uint64_t connection_id, std::string_view hello) override {
    return inner_->accept(connection_id, hello);
  }
  bool can_fence() const override { return inner_->can_fence(); }
  bool fence(uint64_t connection_id) override { return inner_->fence(connection_id); }
  int serve_fd() const override { return inner_->serve_fd(); }
  void serve() override { inner_->serve(); }
  void close() override { inner_->close(); }

 private:
  const std::shared_ptr<Bounce> bounce_;
  const std::unique_ptr<Transport> inner_;
  const uint32_t num_regions_;
  const Status lends_;
};

}  // namespace

BounceRing::BounceRing(const MemoryRange& memory) {
  for (uint64_t end = memory.bytes; end >= kSlotBytes; end -= kSlotBytes) {
    free_.push_back(memory.base + end - kSlotBytes);
  }
}

BounceRing::Slot BounceRing::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) return {nullptr, {this}};
  std::byte* const slot = free_.back();  // the one last used: its lines may still be in the cache
  free_.pop_back();
  return {slot, {this}};
}

void BounceRing::give_back(std::byte* slot) {
  std::lock_guard lock(mutex_);
  free_.push_back(slot);
}

Bounce::Bounce(std::shared_ptr<HostMemory> memory, std::shared_ptr<DeviceCopier> copier, uint64_t half)
    : memory_(std::move(memory)),
      copier_(std::move(copier)),
      landing_memory_(part_of(*memory_, 0, half)),
      landing_(landing_memory_),
      sending_(part_of(*memory_, half, half)) {}

Result<std::shared_ptr<Bounce>> Bounce::make(const std::byte* memory, uint64_t bytes,
                                             const MakeDeviceCopier& make_copier) {
  if (bytes < kLeastBytes) {
    return Status::Config("a bounce buffer needs " + std::to_string(kLeastBytes) + " bytes");
  }
  const uint64_t half = bytes / 2 / BounceRing::kSlotBytes * BounceRing::kSlotBytes;
  Result<std::shared_ptr<DeviceCopier>> copier = make_copier(memory);
  if (!copier.ok()) return copier.status();
  Result<std::shared_ptr<HostMemory>> pinned = HostMemory::allocate(2 * half, true);
  if (!pinned.ok()) return pinned.status();
  if (Status status = (*copier)->pin((*pinned)->range().base, 2 * half); !status.ok()) return status;
  return std::shared_ptr<Bounce>(new Bounce(std::move(*pinned), std::move(*copier), half));
}

Result<std::unique_ptr<Transport>> bounce_wrap(std::unique_ptr<Transport> inner,
                                               std::shared_ptr<Bounce> bounce, uint32_t num_regions,
                                               const std::string& why_not) {
  if (Status status = inner->register_scratch(bounce->landing_memory()); !status.ok()) return status;
  Status lends = inner->lend_through(bounce);
  if (!lends.ok() && !why_not.empty()) lends = Status::Unavailable(why_not, {});
  return std::unique_ptr<Transport>(
      std::make_unique<BounceTransport>(std::move(inner), std::move(bounce), num_regions, std::move(lends)));
}

}  // namespace kvlink

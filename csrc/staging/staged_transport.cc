// SPDX-License-Identifier: Apache-2.0
#include "staging/staged_transport.h"

#include <optional>

#include "transport_api/forwarding.h"

namespace kvlink {
namespace {

class LandingTransport final : public WrappedTransport {
 public:
  LandingTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Landing> landing, LandingRules rules,
                   Status lends)
      : WrappedTransport(std::move(inner)),
        landing_(std::move(landing)),
        rules_(std::move(rules)),
        lends_(std::move(lends)) {}
  ~LandingTransport() override { inner_.reset(); }  // it registered the landing's memory

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access) override {
    if (range.device && !lends_.ok()) return lends_;
    ++num_regions_;  // whether or not it can be lent
    return inner_->register_memory(range, access);
  }
  bool reaches_devices() const override { return true; }
  Status register_scratch(const MemoryRange& range) override {
    Status status = inner_->register_scratch(range);
    if (status.ok() && range.base == landing_->memory().base) slot_region_ = num_regions_;
    ++num_regions_;
    return status;
  }
  Result<std::unique_ptr<Endpoint>> open(std::string_view owner_address, uint32_t lane) override {
    Result<std::unique_ptr<Endpoint>> inner = inner_->open(owner_address, lane);
    if (!inner.ok() || !slot_region_) return inner;
    return landing_endpoint(std::move(*inner), landing_, rules_, *slot_region_);
  }

 private:
  const std::shared_ptr<Landing> landing_;
  const LandingRules rules_;
  const Status lends_;
  uint32_t num_regions_ = 0;  // these two by one thread, before the first open()
  std::optional<uint32_t> slot_region_;
};

}  // namespace

std::unique_ptr<Transport> land_through(std::unique_ptr<Transport> inner, std::shared_ptr<Landing> landing,
                                        const LandingRules& rules, Status lends) {
  return std::make_unique<LandingTransport>(std::move(inner), std::move(landing), rules, std::move(lends));
}

}  // namespace kvlink

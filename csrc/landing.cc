// SPDX-License-Identifier: Apache-2.0
#include "landing.h"

#include <optional>

namespace kvlink {
namespace {

class LandingTransport final : public Transport {
 public:
  LandingTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Landing> landing, LandingRules rules,
                   Status lends)
      : landing_(std::move(landing)),
        inner_(std::move(inner)),
        rules_(std::move(rules)),
        lends_(std::move(lends)) {}

  std::string address() const override { return inner_->address(); }
  std::vector<PortState> ports() const override { return inner_->ports(); }
  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access) override {
    if (range.device && !lends_.ok()) return lends_;
    ++num_regions_;  // whether or not it can be lent
    return inner_->register_memory(range, access);
  }
  bool reaches_devices() const override { return true; }
  bool lands_in_registered_only() const override { return inner_->lands_in_registered_only(); }
  Status register_scratch(const MemoryRange& range) override {
    Status status = inner_->register_scratch(range);
    if (status.ok() && range.base == landing_->memory().base) slot_region_ = num_regions_;
    ++num_regions_;
    return status;
  }
  uint32_t lanes_to(std::string_view owner_address) const override { return inner_->lanes_to(owner_address); }
  Result<std::unique_ptr<Endpoint>> open(std::string_view owner_address, uint32_t lane) override {
    Result<std::unique_ptr<Endpoint>> inner = inner_->open(owner_address, lane);
    if (!inner.ok() || !slot_region_) return inner;
    return landing_endpoint(std::move(*inner), landing_, rules_, *slot_region_);
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
  const std::shared_ptr<Landing> landing_;
  const std::unique_ptr<Transport> inner_;
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

// SPDX-License-Identifier: Apache-2.0
// What stands in front of another transport: whatever it does not change passes through.
#pragma once

#include "transport_api/transport.h"

namespace kvlink {

/// Whether chunks may be staged or repeated, and whether posts are launches, is for each wrapper to say.
class WrappedEndpoint : public Endpoint {
 public:
  explicit WrappedEndpoint(std::unique_ptr<Endpoint> inner) : inner_(std::move(inner)) {}

  std::string hello() const override { return inner_->hello(); }
  Status establish(std::string_view reply, int64_t timeout_ns) override {
    return inner_->establish(reply, timeout_ns);
  }
  Result<uint32_t> import_region(std::string_view remote_key) override {
    return inner_->import_region(remote_key);
  }
  std::string path() const override { return inner_->path(); }
  Window window() const override { return inner_->window(); }
  bool ordered() const override { return inner_->ordered(); }
  bool order_stalls() const override { return inner_->order_stalls(); }
  bool stand_by(int64_t now_ns) override { return inner_->stand_by(now_ns); }
  int64_t look_at_ns() const override { return inner_->look_at_ns(); }
  bool copies_in_poll() const override { return inner_->copies_in_poll(); }

 protected:
  const std::unique_ptr<Endpoint> inner_;
};

class WrappedTransport : public Transport {
 public:
  explicit WrappedTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  std::string address() const override { return inner_->address(); }
  std::vector<PortState> ports() const override { return inner_->ports(); }
  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access) override {
    return inner_->register_memory(range, access);
  }
  bool reaches_devices() const override { return inner_->reaches_devices(); }
  bool lands_in_registered_only() const override { return inner_->lands_in_registered_only(); }
  Status lend_through(std::shared_ptr<Bounce> bounce) override {
    return inner_->lend_through(std::move(bounce));
  }
  Status register_scratch(const MemoryRange& range) override { return inner_->register_scratch(range); }
  uint32_t lanes_to(std::string_view owner_address) const override { return inner_->lanes_to(owner_address); }
  Result<std::string> accept(ReaderId reader, std::string_view hello) override {
    return inner_->accept(reader, hello);
  }
  bool guards() const override { return inner_->guards(); }
  void enforce_guards() override { inner_->enforce_guards(); }
  bool can_fence() const override { return inner_->can_fence(); }
  bool fence(uint64_t connection_id) override { return inner_->fence(connection_id); }
  int serve_fd() const override { return inner_->serve_fd(); }
  void serve() override { inner_->serve(); }
  void close() override { inner_->close(); }

 protected:
  std::unique_ptr<Transport> inner_;
};

}  // namespace kvlink

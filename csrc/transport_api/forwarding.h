// SPDX-License-Identifier: Apache-2.0
// Wrappers around another endpoint or transport. They forward what they do not change.
#pragma once

#include "transport_api/transport.h"

namespace kvlink {

/// Each wrapper defines its own traits(), because it decides whether chunks may be repeated and whether posts
/// are launches.
class WrappedEndpoint : public Endpoint {
 public:
  explicit WrappedEndpoint(std::unique_ptr<Endpoint> inner) : inner_(std::move(inner)) {}

  std::string hello() const override { return inner_->hello(); }
  Status establish(std::string_view reply, const Patience& patience) override {
    return inner_->establish(reply, patience);
  }
  Result<uint32_t> import_region(std::string_view remote_key) override {
    return inner_->import_region(remote_key);
  }

 protected:
  const std::unique_ptr<Endpoint> inner_;
};

class WrappedTransport : public Transport {
 public:
  explicit WrappedTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  std::string address() const override { return inner_->address(); }
  const Capabilities& capabilities() const override { return inner_->capabilities(); }
  std::vector<PortState> ports() const override { return inner_->ports(); }
  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>& through) override {
    return inner_->register_memory(range, access, through);
  }
  /// Opens the endpoints of `inner_` and wraps each by wrap().
  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes,
                         const WorkerRun& owner) override {
    return wrap_lanes(inner_->open(owner_address, num_lanes, owner),
                      [this](uint32_t, std::unique_ptr<Endpoint> inner) { return wrap(std::move(inner)); });
  }
  std::vector<Result<std::string>> accept(ReaderId reader, Hellos hellos) override {
    return inner_->accept(reader, hellos);
  }
  bool fence(uint64_t connection_id) override { return inner_->fence(connection_id); }
  void serve() override { inner_->serve(); }
  void close() override { inner_->close(); }

 protected:
  virtual Result<std::unique_ptr<Endpoint>> wrap(std::unique_ptr<Endpoint> inner) = 0;

  std::unique_ptr<Transport> inner_;
};

}  // namespace kvlink

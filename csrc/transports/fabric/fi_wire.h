// SPDX-License-Identifier: Apache-2.0
// Operations of one endpoint of libfabric towards one peer.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transports/fabric/domain.h"
#include "transports/fabric/post_queue.h"

namespace kvlink::fabric {

class FiWire final : public Wire {
 public:
  static Result<std::unique_ptr<FiWire>> open(std::shared_ptr<const Domain> domain, const std::string& peer);
  ~FiWire() override { close(); }
  FiWire(const FiWire&) = delete;
  FiWire& operator=(const FiWire&) = delete;

  Taken read(uint32_t op, const RemoteRegion& from, uint64_t offset,
             std::span<const Segment> pieces) override;
  Taken write(uint32_t op, const RemoteRegion& to, uint64_t offset, uint64_t value) override;
  Status poll(std::vector<uint32_t>& ended) override;
  Status why() const override { return why_; }

  int wait_fd() const { return port_.wait_fd; }
  /// Returns false if poll() has work.
  bool may_sleep() const;
  const std::vector<LocalRegion>& locals() const { return locals_; }
  const Domain& domain() const { return *domain_; }
  /// A registered word, and the region that a segment names it by.
  uint64_t& own_word() { return words_.back(); }
  static constexpr uint32_t kOwnWord = UINT32_MAX;
  /// On return no byte lands.
  void close();

 private:
  FiWire(std::shared_ptr<const Domain> domain, const OpLimits& limits);
  void* desc_of(uint32_t region) const;
  Taken taken(ssize_t error);
  Status failure() const;
  void drain();

  const std::shared_ptr<const Domain> domain_;
  // Providers use a context, and the source of a store, until the operation has ended.
  std::vector<fi_context2> contexts_;
  std::vector<uint64_t> words_;
  const std::vector<LocalRegion> locals_;
  Owned<fid_mr> words_region_;
  Port port_;
  fi_addr_t peer_ = FI_ADDR_UNSPEC;
  uint32_t under_way_ = 0;
  Status why_;
};

}  // namespace kvlink::fabric

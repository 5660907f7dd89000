// SPDX-License-Identifier: Apache-2.0
// One provider of libfabric on this machine, and the memory registered with it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory/memory_range.h"
#include "transport_api/options.h"
#include "transports/fabric/fabric_api.h"
#include "transports/fabric/protocol.h"

namespace kvlink::fabric {

inline constexpr size_t kMostPieces = 8;  // of a read

/// A local range that reads may land in. `desc` is null if the provider needs none.
struct LocalRegion {
  const std::byte* base = nullptr;
  uint64_t bytes = 0;
  void* desc = nullptr;
};

/// An endpoint with its queue and the addresses of its peers. They belong together and end in this order.
struct Port {
  Owned<fid_cq> cq;
  Owned<fid_av> av;
  Owned<fid_ep> ep;  // destroyed first
  int wait_fd = -1;  // of the queue; -1: the provider has none

  void close() {
    ep.reset();
    av.reset();
    cq.reset();
  }
};

/// A provider of this machine and what decides how it serves.
struct ProviderState {
  std::string name, facts;
  Status why_not;
};

/// Any thread.
class Domain {
 public:
  /// Opens the provider that `options` names, or the first of libfabric's that kvlink may use.
  static Result<std::shared_ptr<Domain>> open(const TransportOptions& options);

  /// Tries every provider of this machine that reads remote memory.
  static Result<std::vector<ProviderState>> list(const TransportOptions& options);

  const Api& api() const { return api_; }
  const std::string& provider() const { return provider_; }
  /// Reads and stores make no progress unless somebody polls the queue.
  bool manual() const { return info_->domain_attr->data_progress != FI_PROGRESS_AUTO; }
  bool needs_local() const { return (info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0; }
  /// Closing an endpoint of this version of the provider amid a read ends the process.
  bool crashes_amid_reads() const { return crashes_amid_reads_; }
  OpLimits limits() const;
  fid_fabric* fabric() const { return fabric_.get(); }

  Result<Port> open_port(size_t num_ops) const;
  /// Returns the name that peers insert.
  Result<std::string> name_of(const Port& port) const;

  /// Lets peers reach a range by `port`. `region` gets the numbers that they need.
  Result<Owned<fid_mr>> export_memory(const MemoryRange& range, Access access, const Port& port,
                                      RemoteRegion& region) const;
  /// Counts the next local region, which segments name by its number.
  Status add_local(const MemoryRange& range);
  std::vector<LocalRegion> locals() const;
  /// Registers memory that stores are sent from and reads land in, if the provider needs it.
  Result<Owned<fid_mr>> register_own(const void* base, size_t bytes) const;

 private:
  Domain(const Api& api, OwnedInfo info);
  static Result<std::shared_ptr<Domain>> open_one(const Api& api, const fi_info& found,
                                                  const TransportOptions& options);
  Status open_objects();
  std::string facts() const;
  Result<Owned<fid_mr>> register_memory(const void* base, size_t bytes, uint64_t access) const;

  const Api& api_;
  const OwnedInfo info_;
  const std::string provider_;
  const bool crashes_amid_reads_;
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  mutable std::mutex mutex_;  // guards the rest
  std::vector<LocalRegion> locals_;
  std::vector<Owned<fid_mr>> registered_;  // destroyed before domain_
};

}  // namespace kvlink::fabric

// SPDX-License-Identifier: Apache-2.0
// The reader's side of shared GPU memory: maps an owner's region into this process.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "device/cuda_device.h"
#include "transports/cuda/protocol.h"
#include "transports/same_host/fd_client.h"

namespace kvlink {

/// A mapping for reading by one GPU of this process, unmapped once. Memory from physical allocations stays
/// valid even if the owner frees it or ends.
class CudaMapping {
 public:
  /// Refuses (kTransportUnavailable, reason and fix) an owner's GPU that `reader` does not reach. The owner's
  /// GPU need not be visible to this process: then the driver alone decides.
  static Result<std::unique_ptr<CudaMapping>> make(std::shared_ptr<const cuda::Device> reader,
                                                   const CudaKey& key, FdClient& client);
  ~CudaMapping();
  CudaMapping(const CudaMapping&) = delete;
  CudaMapping& operator=(const CudaMapping&) = delete;

  cuda::Address address() const { return address_; }
  bool same_gpu() const { return same_gpu_; }
  /// Returns whether the memory is the owner's to free. A process that touches it afterwards may lose the
  /// GPU.
  bool ends_with_owner() const { return by_owner_; }

 private:
  CudaMapping(std::shared_ptr<const cuda::Device> reader, const cuda::Uuid& owner)
      : reader_(std::move(reader)), same_gpu_(reader_->uuid == owner) {}
  Status map_parts(const CudaKey& key, FdClient& client);
  Status map_part(const FdOffer& part, int fd, CudaKey::Kind kind, cuda::Address at);
  Status open_ipc(const CudaKey& key, const FdClient& client);

  const std::shared_ptr<const cuda::Device> reader_;
  const bool same_gpu_;
  cuda::Address address_ = 0;  // of the region
  cuda::Address start_ = 0;    // of what is reserved
  uint64_t reserved_ = 0;
  std::vector<uint64_t> mapped_;  // sizes, from start_ on
  cuda::Address ipc_ = 0;
  bool by_owner_ = false;
};

}  // namespace kvlink

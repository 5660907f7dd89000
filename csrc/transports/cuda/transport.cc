// SPDX-License-Identifier: Apache-2.0
// cuda: the reader's GPU maps the owner's pool in GPU memory. A read is one launch that gathers the blocks
// over NVLink, PCIe or inside one GPU, without the owner. The lease table is in host memory, as with shm. A
// mapping cannot be revoked, so there is no fencing, and readers rely on lease validation.
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transports/cuda/endpoint.h"
#include "transports/cuda/export.h"
#include "transports/factories.h"
#include "transports/same_host/fd_server.h"
#include "transports/same_host/shared_mapping.h"

namespace kvlink {
namespace {

constexpr uint32_t kTablePieces = 1 << 16, kNumTables = 4;  // 1.5 MiB each

class CudaRegion : public MemoryRegion {
 public:
  CudaRegion(std::shared_ptr<FdServer> server, CudaKey key)
      : server_(std::move(server)), key_(std::move(key)) {}
  ~CudaRegion() override {
    for (const FdOffer& part : key_.parts) server_->revoke(part.id);
    server_->revoke(key_.deed);
  }
  std::string remote_key() const override { return key_.blob(); }

 private:
  const std::shared_ptr<FdServer> server_;
  const CudaKey key_;
};

Status not_exportable(const Status& why) {
  return Status::Unavailable("cuda cannot export this memory: " + why.what(), why.fix());
}

class CudaTransport : public Transport {
 public:
  CudaTransport(std::shared_ptr<FdServer> server, const TransportOptions& options)
      : kernel_(options.cuda_kernel), most_blocks_(options.gpu_blocks), server_(std::move(server)) {}
  ~CudaTransport() override { close(); }

  std::string address() const override { return server_->address(); }
  const Capabilities& capabilities() const override { return capabilities_; }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>&) override {
    {
      const std::lock_guard lock(mutex_);
      on_device_.push_back(range.device);
    }
    if (access == Access::kLocal) return nullptr;
    Result<CudaKey> key = range.device ? share_device(range) : share_host(range, access);
    // Not in the first pull, whose caller would wait. open() tries again and returns the error.
    if (range.device) static_cast<void>(prepare());
    if (!key.ok()) return not_exportable(key.status());
    return std::make_unique<CudaRegion>(server_, std::move(*key));
  }

  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes, const WorkerRun&) override {
    return open_lanes(num_lanes, [&](uint32_t) { return open_one(owner_address); });
  }

  std::vector<Result<std::string>> accept(ReaderId reader, Hellos hellos) override {
    return accept_each(hellos, [&](std::string_view hello) -> Result<std::string> {
      return server_->accept(reader.caller, hello);
    });
  }
  bool fence(uint64_t) override { return false; }
  void serve() override { server_->serve(); }
  void close() override { server_->close(); }

 private:
  Result<std::unique_ptr<Endpoint>> open_one(std::string_view owner_address) {
    Result<FdClient> client = FdClient::of(kCudaMagic, owner_address);
    if (!client.ok()) return client.status();
    if (Status status = prepare(); !status.ok()) return status;
    const std::lock_guard lock(mutex_);
    return std::make_unique<CudaEndpoint>(std::move(*client), gather_, tables_, on_device_);
  }

  /// Sets the device too: a reader copies with the GPU of its own pool, whether or not the pool can be
  /// exported.
  Result<CudaKey> share_device(const MemoryRange& range) {
    std::shared_ptr<const cuda::Device> device;
    {
      const std::lock_guard lock(mutex_);
      device = device_;
    }
    if (!device) {
      Result<std::shared_ptr<const cuda::Device>> found = cuda::Device::of(range.base);
      if (!found.ok()) return found.status();
      device = std::move(*found);
      const std::lock_guard lock(mutex_);
      device_ = device;
    }
    return export_cuda(*device, *server_, range);
  }

  Result<CudaKey> share_host(const MemoryRange& range, Access access) {
    if (access == Access::kRead)
      return Status::Unavailable("the pool is in host memory", "use shm, cma or tcp");
    const Result<FdOffer> offer = export_memfd(*server_, range, access);
    if (!offer.ok()) return offer.status();
    CudaKey key;
    key.bytes = range.bytes;
    key.parts = {*offer};
    return key;
  }

  /// Measures the kernel and allocates tables, once.
  Status prepare() {
    std::lock_guard lock(mutex_);
    if (tables_) return {};
    if (!device_)
      return Status::Unavailable("this worker's pool is not in GPU memory", "use shm, cma or tcp");
    auto gather = std::make_shared<CudaGather>(device_, kernel_, most_blocks_);
    gather->measure();
    Result<std::shared_ptr<CudaTables>> tables = CudaTables::make(device_, kNumTables, kTablePieces);
    if (!tables.ok()) return tables.status();
    gather_ = std::move(gather);
    tables_ = *tables;
    return {};
  }

  const std::shared_ptr<const GatherKernel> kernel_;
  const uint32_t most_blocks_;
  const std::shared_ptr<FdServer> server_;
  const Capabilities capabilities_{.reaches_device_memory = true, .serve_fd = server_->serve_fd()};

  std::mutex mutex_;  // guards everything below
  std::shared_ptr<const cuda::Device> device_;
  std::vector<bool> on_device_;  // by region, in order of registration
  std::shared_ptr<CudaGather> gather_;
  std::shared_ptr<CudaTables> tables_;
};

}  // namespace

Status cuda_probe() { return cuda::library().status(); }

Result<std::unique_ptr<Transport>> cuda_make(const TransportOptions& options) {
  if (Status status = cuda_probe(); !status.ok()) return status;
  Result<std::shared_ptr<FdServer>> server = FdServer::listen(kCudaMagic);
  if (!server.ok()) return server.status();
  return std::make_unique<CudaTransport>(std::move(*server), options);
}

}  // namespace kvlink

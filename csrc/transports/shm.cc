// SPDX-License-Identifier: Apache-2.0
// shm: the reader maps the pool, which is in a memfd, so a read is a copy in user space without any thread of
// the owner. Readers get pools as read-only descriptors, so that no bug of theirs can write to one. A mapping
// cannot be revoked, so there is no fencing, and readers rely on lease validation.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transports/factories.h"
#include "transports/same_host/copy_endpoint.h"
#include "transports/same_host/fd_client.h"
#include "transports/same_host/fd_server.h"
#include "transports/same_host/shared_mapping.h"

namespace kvlink {
namespace {

constexpr uint32_t kShmMagic = 0x316d'6873;  // "shm1"

class ShmEndpoint : public MappedEndpoint {
 public:
  ShmEndpoint(FdClient client, std::shared_ptr<CopyHelper> helper)
      : MappedEndpoint(std::move(helper)), client_(std::move(client)) {}
  ~ShmEndpoint() override { close(); }

  std::string hello() const override { return client_.hello(); }
  Status establish(std::string_view reply, const Patience& patience) override {
    Status status = client_.establish(reply, patience);
    set_wake_fd(client_.wake_fd());
    return status;
  }

  Result<uint32_t> import_region(std::string_view remote_key) override {
    BlobReader from(remote_key, kShmMagic);
    FdOffer wanted;
    if (!wanted.read(from) || !from.done()) return Status::AccessDenied("not a key of a shm region");
    Result<MemfdMapping> mapping = MemfdMapping::make(client_, wanted);
    if (!mapping.ok()) return mapping.status();
    mappings_.push_back(std::move(*mapping));
    return add_remote({mappings_.back().address(), wanted.bytes, wanted.access});
  }

  void close() override {
    break_down(Status::Unreachable("this shm endpoint was closed"));
    client_.close();
    mappings_.clear();
  }

 protected:
  Status check_owner() override { return client_.check_owner(); }

 private:
  FdClient client_;
  std::vector<MemfdMapping> mappings_;
};

class ShmRegion : public MemoryRegion {
 public:
  ShmRegion(std::shared_ptr<FdServer> server, const FdOffer& offer)
      : server_(std::move(server)), offer_(offer) {}
  ~ShmRegion() override { server_->revoke(offer_.id); }

  std::string remote_key() const override {
    BlobWriter key;
    key.u32(kShmMagic);
    offer_.write(key);
    return key.take();
  }

 private:
  std::shared_ptr<FdServer> server_;
  FdOffer offer_;
};

class ShmTransport : public Transport {
 public:
  explicit ShmTransport(std::shared_ptr<FdServer> server) : server_(std::move(server)) {}
  ~ShmTransport() override { close(); }

  std::string address() const override { return server_->address(); }
  const Capabilities& capabilities() const override { return capabilities_; }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>&) override {
    if (access == Access::kLocal) return nullptr;
    const Result<FdOffer> offer = export_memfd(*server_, range, access);
    if (!offer.ok()) {
      const Status why = offer.status();
      return Status{why.code(), "shm cannot export this memory: " + why.what(),
                    why.fix().empty() ? "allocate the pool with BlockPool.allocate(...), or use cma or tcp"
                                      : why.fix()};
    }
    return std::make_unique<ShmRegion>(server_, *offer);
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
  void close() override {
    server_->close();
    helper_->stop();
  }

 private:
  Result<std::unique_ptr<Endpoint>> open_one(std::string_view owner_address) const {
    Result<FdClient> client = FdClient::of(kShmMagic, owner_address);
    if (!client.ok()) return client.status();
    return std::make_unique<ShmEndpoint>(std::move(*client), helper_);
  }

  const std::shared_ptr<FdServer> server_;
  const std::shared_ptr<CopyHelper> helper_ = std::make_shared<CopyHelper>();
  const Capabilities capabilities_{.serve_fd = server_->serve_fd()};
};

}  // namespace

Status shm_probe() {
  const UniqueFd memfd(::memfd_create("kvlink-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memfd && ::access(("/proc/self/fd/" + std::to_string(memfd.get())).c_str(), R_OK) == 0) return {};
  return Status::Unavailable(
      memfd ? "/proc is not mounted" : std::string("memfd_create: ") + std::strerror(errno),
      "run on Linux with /proc mounted and memfd_create allowed by the seccomp profile");
}

Result<std::unique_ptr<Transport>> shm_make(const TransportOptions&) {
  Result<std::shared_ptr<FdServer>> server = FdServer::listen(kShmMagic);
  if (!server.ok()) return server.status();
  return std::make_unique<ShmTransport>(std::move(*server));
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// shm: the pool lies in a memfd that the reader maps too, so a read is a copy in user space and the owner's
// threads take no part. Readers get pools as read-only descriptors, so that no bug of theirs writes to one. A
// mapping cannot be taken back: there is no fencing, and readers rely on lease validation.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "host.h"
#include "queued_endpoint.h"
#include "shm_owner.h"
#include "shm_reader.h"
#include "transports.h"

namespace kvlink {
namespace {

// Page tables of larger mappings are filled on first use: doing it at once would hold up the first pull.
constexpr uint64_t kPopulateBytes = uint64_t{1} << 30;

/// A mapped piece of a memfd that need not start on a page.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : start_(std::exchange(other.start_, nullptr)), bytes_(other.bytes_), skip_(other.skip_) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (start_) ::munmap(start_, bytes_);
  }

  static Result<Mapping> make(int memfd, const ShmOffer& offer) {
    Mapping mapping;
    mapping.skip_ = offer.offset % static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    mapping.bytes_ = offer.bytes + mapping.skip_;
    const int protection = offer.access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
    const int flags = MAP_SHARED | (offer.bytes <= kPopulateBytes ? MAP_POPULATE : 0);
    void* const start = ::mmap(nullptr, mapping.bytes_, protection, flags, memfd,
                               static_cast<off_t>(offer.offset - mapping.skip_));
    if (start == MAP_FAILED) {
      return Status::Unreachable("cannot map " + std::to_string(offer.bytes) +
                                 " bytes of the owner's memory: " + std::strerror(errno));
    }
    mapping.start_ = start;
    return mapping;
  }

  uint64_t address() const { return reinterpret_cast<uint64_t>(start_) + skip_; }

 private:
  void* start_ = nullptr;
  uint64_t bytes_ = 0, skip_ = 0;
};

class ShmEndpoint : public MappedEndpoint {
 public:
  explicit ShmEndpoint(std::string socket_name) : socket_name_(std::move(socket_name)) {}
  ~ShmEndpoint() override { close(); }

  std::string hello() const override { return BlobWriter().u32(kShmMagic).take(); }

  Status establish(std::string_view reply, int64_t timeout_ns) override {
    BlobReader from(reply);
    const bool ours = from.u32() == kShmMagic;
    const std::string_view secret = from.bytes(kShmSecretBytes);
    if (!from.done() || !ours || secret.size() != kShmSecretBytes) {
      return Status::AccessDenied("not a reply of a shm owner");
    }
    return reader_.connect(socket_name_, secret, timeout_ns);
  }

  Result<uint32_t> import_region(std::string_view remote_key) override {
    BlobReader from(remote_key);
    const bool ours = from.u32() == kShmMagic;
    ShmOffer wanted;
    if (!wanted.read(from) || !from.done() || !ours) return Status::AccessDenied("not a key of a shm region");
    const Result<UniqueFd> memfd = reader_.take(wanted);
    if (!memfd.ok()) return memfd.status();
    Result<Mapping> mapping = Mapping::make((*memfd).get(), wanted);
    if (!mapping.ok()) return mapping.status();
    mappings_.push_back(std::move(*mapping));
    return add_remote({mappings_.back().address(), wanted.bytes, wanted.access});
  }

  int wake_fd() const override { return reader_.wake_fd(); }

  void close() override {
    break_down(Status::Unreachable("this shm endpoint was closed"));
    reader_.close();
    mappings_.clear();
  }

 protected:
  Status check_owner() override { return reader_.check_owner(); }

 private:
  const std::string socket_name_;
  ShmReader reader_;
  std::vector<Mapping> mappings_;
};

class ShmRegion : public MemoryRegion {
 public:
  ShmRegion(std::shared_ptr<ShmOwner> owner, const ShmOffer& offer)
      : owner_(std::move(owner)), offer_(offer) {}
  ~ShmRegion() override { owner_->revoke(offer_.id); }

  std::string remote_key() const override {
    BlobWriter key;
    key.u32(kShmMagic);
    offer_.write(key);
    return key.take();
  }

 private:
  std::shared_ptr<ShmOwner> owner_;
  ShmOffer offer_;
};

Status not_lendable(std::string why) {
  return Status::Unavailable("shm cannot lend this memory: " + std::move(why),
                             "allocate the pool with BlockPool.allocate(...), or use cma or tcp");
}

class ShmTransport : public Transport {
 public:
  explicit ShmTransport(std::shared_ptr<ShmOwner> owner) : owner_(std::move(owner)) {}
  ~ShmTransport() override { close(); }

  std::string address() const override {
    return ShmAddress{boot_id(), namespace_inode("net"), owner_->socket_name()}.blob();
  }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access) override {
    if (range.memfd < 0) return not_lendable("the pool was not allocated by kvlink");
    const int seals = ::fcntl(range.memfd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
      return not_lendable("its memfd is not sealed against shrinking");
    const std::string path = "/proc/self/fd/" + std::to_string(range.memfd);
    UniqueFd memfd(access == Access::kRead ? ::open(path.c_str(), O_RDONLY | O_CLOEXEC)
                                           : ::fcntl(range.memfd, F_DUPFD_CLOEXEC, 0));
    if (!memfd) return not_lendable(std::string("opening it again: ") + std::strerror(errno));
    const ShmOffer offer = owner_->lend(std::move(memfd), {0, range.memfd_offset, range.bytes, access});
    return std::unique_ptr<MemoryRegion>(std::make_unique<ShmRegion>(owner_, offer));
  }

  Result<std::unique_ptr<Endpoint>> open(std::string_view owner_address, uint32_t) override {
    Result<ShmAddress> parsed = ShmAddress::parse(owner_address);
    if (!parsed.ok()) return parsed.status();
    if (parsed->boot_id != boot_id()) {
      return Status::Unavailable("the owner is on another machine",
                                 "enable a transport between machines (tcp)");
    }
    if (parsed->net_namespace != namespace_inode("net")) {
      return Status::Unavailable(
          "the owner is in another network namespace, where its Unix socket is not visible",
          "share one (docker run --network, one pod in Kubernetes), or use cma or tcp");
    }
    return std::unique_ptr<Endpoint>(std::make_unique<ShmEndpoint>(std::move(parsed->socket)));
  }

  Result<std::string> accept(uint64_t, std::string_view hello) override {
    BlobReader from(hello);
    const bool ours = from.u32() == kShmMagic;
    if (!from.done() || !ours) return Status::AccessDenied("not the hello of a shm endpoint");
    return BlobWriter().u32(kShmMagic).bytes(owner_->invite()).take();
  }

  bool fence(uint64_t) override { return false; }
  int serve_fd() const override { return owner_->serve_fd(); }
  void serve() override { owner_->serve(); }
  void close() override { owner_->close(); }

 private:
  const std::shared_ptr<ShmOwner> owner_;
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
  Result<std::shared_ptr<ShmOwner>> owner = ShmOwner::listen();
  if (!owner.ok()) return owner.status();
  return std::unique_ptr<Transport>(std::make_unique<ShmTransport>(std::move(*owner)));
}

}  // namespace kvlink

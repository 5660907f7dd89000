// SPDX-License-Identifier: Apache-2.0
// loopback: reads inside this process by plain copies. It is the reference for every transport, revocation
// and fencing included.
#include <unistd.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "base/blob.h"
#include "base/host_identity.h"
#include "lease/stale.h"
#include "transports/factories.h"
#include "transports/same_host/copy_endpoint.h"

namespace kvlink {
namespace {

constexpr uint32_t kMagic = 0x3170'6f6c;  // "lop1"

struct ExportedRegion {
  MemoryRange range;
  Access access;
  bool revoked = false;
};

/// State of one connection that the endpoint and the owner share.
struct Link {
  uint64_t connection = 0;
  bool admitted = false, cut = false;
};

/// The owner's state. `mutex` is held shared while bytes are copied and exclusively while anything is
/// removed, so nothing is read after it was revoked, cut or closed.
struct Owner {
  const uint64_t id = random_u64();
  std::shared_mutex mutex;
  bool closed = false;
  std::unordered_map<uint64_t, std::shared_ptr<ExportedRegion>> regions;
  std::unordered_map<uint64_t, std::shared_ptr<Link>> links;
  uint64_t last_number = 0;
};

/// The owners of this process by id.
class Directory {
 public:
  static Directory& instance() {
    static auto* const directory = new Directory;  // never destroyed: threads may outlive main()
    return *directory;
  }
  void add(const std::shared_ptr<Owner>& owner) {
    std::lock_guard lock(mutex_);
    owners_[owner->id] = owner;
  }
  void remove(uint64_t id) {
    std::lock_guard lock(mutex_);
    owners_.erase(id);
  }
  std::shared_ptr<Owner> find(uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto found = owners_.find(id);
    return found == owners_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::weak_ptr<Owner>> owners_;
};

class LoopbackRegion : public MemoryRegion {
 public:
  LoopbackRegion(std::shared_ptr<Owner> owner, const MemoryRange& range, Access access)
      : owner_(std::move(owner)), exported_(std::make_shared<ExportedRegion>(ExportedRegion{range, access})) {
    std::unique_lock lock(owner_->mutex);
    number_ = ++owner_->last_number;
    owner_->regions[number_] = exported_;
  }
  ~LoopbackRegion() override {
    std::unique_lock lock(owner_->mutex);
    exported_->revoked = true;
    owner_->regions.erase(number_);
  }
  std::string remote_key() const override { return BlobWriter().u32(kMagic).u64(number_).take(); }

 private:
  std::shared_ptr<Owner> owner_;
  std::shared_ptr<ExportedRegion> exported_;
  uint64_t number_ = 0;
};

class LoopbackEndpoint : public MappedEndpoint {
 public:
  explicit LoopbackEndpoint(std::shared_ptr<Owner> owner)
      : MappedEndpoint(nullptr), owner_(std::move(owner)), link_(std::make_shared<Link>()) {
    std::unique_lock lock(owner_->mutex);
    number_ = ++owner_->last_number;
    owner_->links[number_] = link_;
  }
  ~LoopbackEndpoint() override { close(); }

  std::string hello() const override { return BlobWriter().u32(kMagic).u64(number_).take(); }

  Status establish(std::string_view reply, const Patience&) override {
    BlobReader from(reply, kMagic);
    if (from.u64() != number_ || !from.done())
      return Status::AccessDenied("not a reply of this loopback owner");
    return check_owner();
  }

  Result<uint32_t> import_region(std::string_view remote_key) override {
    BlobReader from(remote_key, kMagic);
    const uint64_t number = from.u64();
    if (!from.done()) return Status::AccessDenied("not a key of a loopback region");
    std::shared_lock lock(owner_->mutex);
    const auto found = owner_->regions.find(number);
    if (found == owner_->regions.end()) return revoked();
    regions_.push_back(found->second);
    const ExportedRegion& region = *found->second;
    return add_remote({reinterpret_cast<uint64_t>(region.range.base), region.range.bytes, region.access});
  }

  void close() override {
    break_down(Status::Unreachable("this loopback endpoint was closed"));
    std::unique_lock lock(owner_->mutex);
    owner_->links.erase(number_);
  }

 protected:
  Status check_owner() override {
    std::shared_lock lock(owner_->mutex);
    return linked();
  }

  Status read_some(Read& read, Read* behind, size_t budget) override {
    std::shared_lock lock(owner_->mutex);
    if (Status status = linked(); !status.ok()) return status;
    for (const ReadOp& op : read.chunk.ops) {
      if (regions_[op.region]->revoked) return revoked();
    }
    if (Status status = check(read.chunk.guard); !status.ok()) return status;
    return MappedEndpoint::read_some(read, behind, budget);
  }

  Status write_word(uint32_t region, uint64_t offset, uint64_t value) override {
    std::shared_lock lock(owner_->mutex);
    if (Status status = linked(); !status.ok()) return status;
    if (regions_[region]->revoked) return revoked();
    return MappedEndpoint::write_word(region, offset, value);
  }

 private:
  static Status revoked() { return Status::AccessDenied("the owner no longer exports this loopback region"); }

  // REQUIRES the owner's mutex.
  Status check(const Guard& guard) const {
    if (guard.value == 0) return {};
    uint64_t word = 0;
    if (guard.region >= regions_.size()) return Status::AccessDenied("the guard's region is not known");
    const ExportedRegion& region = *regions_[guard.region];
    if (region.revoked) return revoked();
    if (guard.offset % sizeof word != 0 || guard.offset >= region.range.bytes / sizeof word * sizeof word) {
      return Status::AccessDenied("the guard is not aligned or leaves its region");
    }
    load_words(reinterpret_cast<std::byte*>(&word), region.range.base + guard.offset, sizeof word);
    return word == guard.value ? Status{} : stale_blocks(word);
  }

  // REQUIRES the owner's mutex.
  Status linked() const {
    if (owner_->closed) return Status::Unreachable("the loopback owner was closed");
    if (link_->cut) return Status::Unreachable("the loopback owner cut this connection off");
    if (!link_->admitted) return Status::AccessDenied("the loopback owner has not accepted this endpoint");
    return {};
  }

  std::shared_ptr<Owner> owner_;
  std::shared_ptr<Link> link_;
  uint64_t number_ = 0;
  std::vector<std::shared_ptr<ExportedRegion>> regions_;
};

class LoopbackTransport : public Transport {
 public:
  LoopbackTransport() { Directory::instance().add(owner_); }
  ~LoopbackTransport() override { close(); }

  std::string address() const override { return BlobWriter().u32(kMagic).u64(pid_).u64(owner_->id).take(); }
  const Capabilities& capabilities() const override { return capabilities_; }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>&) override {
    if (access == Access::kLocal) return nullptr;
    return std::make_unique<LoopbackRegion>(owner_, range, access);
  }

  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes, const WorkerRun&) override {
    return open_lanes(num_lanes, [&](uint32_t) { return open_one(owner_address); });
  }

  std::vector<Result<std::string>> accept(ReaderId reader, Hellos hellos) override {
    return accept_each(hellos, [&](std::string_view hello) -> Result<std::string> {
      BlobReader from(hello, kMagic);
      const uint64_t number = from.u64();
      std::unique_lock lock(owner_->mutex);
      const auto found = owner_->links.find(number);
      if (!from.done() || owner_->closed || found == owner_->links.end()) {
        return Status::AccessDenied("not the hello of a loopback endpoint of this owner");
      }
      found->second->connection = reader.connection_id;
      found->second->admitted = true;
      return BlobWriter().u32(kMagic).u64(number).take();
    });
  }

  bool fence(uint64_t connection_id) override {
    std::unique_lock lock(owner_->mutex);  // what is being copied ends first: its guard was checked under it
    bool found = false;
    for (const auto& [number, link] : owner_->links) {
      if (!link->admitted || link->connection != connection_id) continue;
      link->cut = true;
      found = true;
    }
    return found;
  }

  void close() override {
    Directory::instance().remove(owner_->id);
    std::unique_lock lock(owner_->mutex);
    owner_->closed = true;
  }

 private:
  Result<std::unique_ptr<Endpoint>> open_one(std::string_view owner_address) {
    BlobReader from(owner_address, kMagic);
    const uint64_t pid = from.u64();
    const uint64_t id = from.u64();
    if (!from.done()) {
      return Status::Unavailable("not a loopback address", "let both ends run the same version of kvlink");
    }
    auto owner = pid == static_cast<uint64_t>(::getpid()) ? Directory::instance().find(id) : nullptr;
    if (!owner) {
      return Status::Unavailable("loopback reaches only owners inside this process",
                                 "enable shm, cma or tcp on both ends");
    }
    return std::make_unique<LoopbackEndpoint>(std::move(owner));
  }

  const Capabilities capabilities_{.guards = true, .can_fence = true};
  const uint64_t pid_ = static_cast<uint64_t>(::getpid());
  const std::shared_ptr<Owner> owner_ = std::make_shared<Owner>();
};

}  // namespace

Status loopback_probe() { return {}; }

Result<std::unique_ptr<Transport>> loopback_make(const TransportOptions&) {
  return std::make_unique<LoopbackTransport>();
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// toy: reads another process's memory through /proc/PID/mem. The owner takes no part, so it can neither
// revoke a key nor cut a reader off: readers rely on lease validation.
#include "cpp/transports/toy_transport.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <utility>

#include "base/blob.h"
#include "base/host_identity.h"
#include "base/unique_fd.h"
#include "transports/same_host/copy_endpoint.h"

namespace kvlink::testing {
namespace {

constexpr uint32_t kMagic = 0x3179'6f74;  // "toy1"
constexpr size_t kCookieBytes = 16;

std::string greeting() { return BlobWriter().u32(kMagic).take(); }

/// An open /proc/PID/mem, and the cookie by which its process is known.
struct Process {
  UniqueFd memory, pidfd;
  uint64_t cookie_address = 0;
  std::string cookie;

  bool read(uint64_t from, void* to, size_t bytes) const {
    return ::pread(memory.get(), to, bytes, static_cast<off_t>(from)) == static_cast<ssize_t>(bytes);
  }
  Status check() const {
    std::string found(kCookieBytes, '\0');
    if (read(cookie_address, found.data(), found.size()) && same_secret(found, cookie)) return {};
    return Status::Unreachable("the owner has closed or ended");
  }
};

class ToyEndpoint final : public QueuedEndpoint {
 public:
  explicit ToyEndpoint(Process owner) : owner_(std::move(owner)) {}

  std::string hello() const override { return greeting(); }
  Status establish(std::string_view reply, const Patience&) override {
    if (reply != greeting()) return Status::AccessDenied("not a reply of a toy owner");
    set_wake_fd(owner_.pidfd.get());
    return owner_.check();
  }
  Result<uint32_t> import_region(std::string_view remote_key) override {
    BlobReader from(remote_key);
    const bool ours = from.u32() == kMagic;
    const uint64_t address = from.u64(), bytes = from.u64();
    const uint32_t access = from.u32();
    if (!from.done() || !ours || access > kLastAccess || bytes > INT64_MAX || address > INT64_MAX - bytes) {
      return Status::AccessDenied("not a key of a toy region");
    }
    return add_remote({address, bytes, static_cast<Access>(access)});
  }
  void close() override {
    break_down(Status::Unreachable("this toy endpoint was closed"));
    owner_ = {};
  }

 protected:
  Status check_owner() override { return owner_.check(); }

  Status read_some(Read& read, Read*, size_t budget) override {
    load_fence();
    bool good = true;
    walk(read.chunk, read.at, budget,
         [&](const ReadOp& op, uint32_t in_op, std::byte* local, uint32_t bytes) {
           return good = copy(remote(op.region), op.offset + in_op, local, bytes);
         });
    const Status there = good ? Status{} : owner_.check();
    return good || !there.ok() ? there : Status::AccessDenied("the owner no longer has that memory");
  }
  Status write_word(uint32_t region, uint64_t offset, uint64_t value) override {
    const auto at = static_cast<off_t>(remote(region).address + offset);
    const ssize_t written = ::pwrite(owner_.memory.get(), &value, sizeof value, at);
    return written == sizeof value ? Status{} : Status::Unreachable("the owner's memory cannot be written");
  }

 private:
  /// The kernel may copy a word in pieces: of two equal copies of a slot, none fell into a store.
  bool copy(const Remote& from, uint64_t offset, std::byte* to, uint32_t bytes) const {
    const uint64_t address = from.address + offset;
    if (from.access != Access::kReadWords || bytes > kMaxWordsBytes) return owner_.read(address, to, bytes);
    std::array<std::byte, kMaxWordsBytes> again;
    do {
      if (!owner_.read(address, to, bytes) || !owner_.read(address, again.data(), bytes)) return false;
    } while (std::memcmp(to, again.data(), bytes) != 0);
    return true;
  }

  Process owner_;
};

struct ToyRegion final : MemoryRegion {
  explicit ToyRegion(std::string blob) : key(std::move(blob)) {}
  std::string remote_key() const override { return key; }
  const std::string key;
};

class ToyTransport final : public Transport {
 public:
  ~ToyTransport() override { close(); }
  std::string address() const override {
    const auto pid = static_cast<uint32_t>(::getpid());
    const auto at = reinterpret_cast<uint64_t>(cookie_.data());
    return BlobWriter().u32(kMagic).u32(pid).u64(at).bytes({cookie_.data(), kCookieBytes}).take();
  }
  const Capabilities& capabilities() const override { return capabilities_; }
  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>&) override {
    if (access == Access::kLocal) return std::unique_ptr<MemoryRegion>();
    BlobWriter key;
    key.u32(kMagic).u64(reinterpret_cast<uint64_t>(range.base)).u64(range.bytes);
    return std::unique_ptr<MemoryRegion>(new ToyRegion(key.u32(static_cast<uint32_t>(access)).take()));
  }
  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes, const WorkerRun&) override {
    BlobReader from(owner_address);
    const bool ours = from.u32() == kMagic;
    const auto pid = static_cast<pid_t>(from.u32());
    const uint64_t at = from.u64();
    const std::string cookie(from.bytes(kCookieBytes));
    if (!from.done() || !ours || cookie.size() != kCookieBytes || pid <= 0) {
      return Status::Unavailable("not a toy address", "let both ends run the same version of kvlink");
    }
    return open_lanes(num_lanes, [&](uint32_t) -> Result<std::unique_ptr<Endpoint>> {
      Process owner{UniqueFd(::open(("/proc/" + std::to_string(pid) + "/mem").c_str(), O_RDWR | O_CLOEXEC)),
                    UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))), at, cookie};
      if (!owner.memory)
        return Status::Unavailable("this process may not read the owner's memory", "use shm");
      if (Status status = owner.check(); !status.ok()) return status;
      return std::unique_ptr<Endpoint>(new ToyEndpoint(std::move(owner)));
    });
  }
  std::vector<Result<std::string>> accept(ReaderId, Hellos hellos) override {
    return accept_each(hellos, [&](std::string_view hello) -> Result<std::string> {
      return hello == greeting() ? Result(greeting())
                                 : Status::AccessDenied("not the hello of a toy endpoint");
    });
  }
  bool fence(uint64_t) override { return false; }
  void close() override { std::memset(cookie_.data(), 0, cookie_.size()); }

 private:
  const Capabilities capabilities_{};
  std::string cookie_ = random_bytes(kCookieBytes);
};

Result<std::unique_ptr<Transport>> toy_make(const TransportOptions&) {
  return std::unique_ptr<Transport>(new ToyTransport);
}
Status toy_probe() { return {}; }

}  // namespace

const TransportInfo kToy{"toy", "pread of /proc/PID/mem", 1, toy_probe, toy_make};

}  // namespace kvlink::testing

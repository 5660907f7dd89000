// SPDX-License-Identifier: Apache-2.0
// cma: the reader lets the kernel copy out of the owner's memory (process_vm_readv). It needs only permission
// to trace the owner: no thread, no socket, any memory. So the owner can neither revoke a key nor cut a
// reader off, and readers rely on lease validation.
//
// A random cookie in the owner's memory proves that the process behind a pid is the right one.
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/blob.h"
#include "base/host_identity.h"
#include "base/unique_fd.h"
#include "memory/streaming_copy.h"
#include "transports/cma_permission.h"
#include "transports/factories.h"
#include "transports/same_host/copy_endpoint.h"
#include "transports/same_host/shared_mapping.h"

namespace kvlink {
namespace {

constexpr uint32_t kMagic = 0x3161'6d63;  // "cma1"
constexpr size_t kCookieBytes = 16;
constexpr size_t kMaxBootIdBytes = 64;
constexpr size_t kMaxPieces = 1024;                // UIO_MAXIOV
constexpr size_t kMaxDataPieces = kMaxPieces - 2;  // the rest is for a slot

using Cookie = std::array<char, kCookieBytes>;

struct CmaAddress {
  std::string boot_id;
  uint64_t pid_namespace = 0, pid = 0, uid = 0;
  uint64_t cookie_address = 0;
  Cookie cookie{};

  std::string blob() const {
    BlobWriter to;
    to.u32(kMagic).bytes(boot_id).u64(pid_namespace).u64(pid).u64(uid);
    return to.u64(cookie_address).bytes(cookie).take();
  }
  static Result<CmaAddress> parse(std::string_view blob) {
    BlobReader from(blob, kMagic);
    CmaAddress parsed;
    parsed.boot_id = from.bytes(kMaxBootIdBytes);
    from.fields(parsed.pid_namespace, parsed.pid, parsed.uid, parsed.cookie_address, parsed.cookie);
    if (!from.done() || parsed.pid == 0 || parsed.pid > INT32_MAX) {
      return Status::Unavailable("not a cma address", "let both ends run the same version of kvlink");
    }
    return parsed;
  }
};

uint64_t inode_of(int fd) {
  struct stat found{};
  return ::fstat(fd, &found) == 0 ? found.st_ino : 0;
}

/// Maps peer words from the owner's descriptors, so that a settle is a store instead of a system call (0.1
/// against 2 us). They are never read, because only the process itself shows whether its memory still exists.
std::optional<MemfdMapping> map_words(pid_t pid, uint64_t memfd, uint64_t inode, const FdOffer& words) {
  const UniqueFd fd(
      ::open(("/proc/" + std::to_string(pid) + "/fd/" + std::to_string(memfd)).c_str(), O_RDWR | O_CLOEXEC));
  if (!fd || inode_of(fd.get()) != inode) return {};  // closed meanwhile, and its number reused
  Result<MemfdMapping> mapping = MemfdMapping::make(fd.get(), words);
  return mapping.ok() ? std::optional(std::move(*mapping)) : std::nullopt;
}

iovec piece(uint64_t address, size_t bytes) { return {reinterpret_cast<void*>(address), bytes}; }

/// Another process's memory.
class Process {
 public:
  explicit Process(CmaAddress address)
      : address_(std::move(address)), pid_(static_cast<pid_t>(address_.pid)) {
    // Without pidfds (before Linux 5.3) the cookie shows that the owner is gone.
    pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  }

  int pidfd() const { return pidfd_.get(); }
  void forget() { pidfd_.reset(); }

  Status check() const {
    pollfd exit{pidfd_.get(), POLLIN, 0};
    if (::poll(&exit, 1, 0) > 0) return gone();
    Cookie found;
    const iovec local{found.data(), kCookieBytes}, remote = piece(address_.cookie_address, kCookieBytes);
    const ssize_t got = ::process_vm_readv(pid_, &local, 1, &remote, 1, 0);
    if (got < 0 && errno != EFAULT) return failed(errno);
    if (got != kCookieBytes ||
        !same_secret({found.data(), kCookieBytes}, {address_.cookie.data(), kCookieBytes}))
      return replaced();
    return {};
  }

  /// Returns the meaning of the kernel's refusal to copy.
  Status failed(int error) const {
    if (error == EFAULT)
      return Status::AccessDenied(name() + " no longer has that memory, or this process does not");
    if (error == ESRCH) return gone();
    if (error == EPERM) return why_cma_refused(pid_, static_cast<uid_t>(address_.uid));
    return Status::Unreachable("process_vm_readv from " + name() + ": " + std::strerror(error));
  }

  pid_t pid() const { return pid_; }

 private:
  std::string name() const { return "process " + std::to_string(pid_); }
  Status gone() const { return Status::Unreachable("the owner, " + name() + ", has ended"); }
  Status replaced() const {
    return Status::Unreachable("the owner has closed, or " + name() + " is another program by now");
  }

  CmaAddress address_;
  pid_t pid_;
  UniqueFd pidfd_;
};

class CmaEndpoint : public QueuedEndpoint {
 public:
  explicit CmaEndpoint(Process owner) : owner_(std::move(owner)) {}

  std::string hello() const override { return BlobWriter().u32(kMagic).take(); }

  Status establish(std::string_view reply, int64_t) override {
    BlobReader from(reply, kMagic);
    if (!from.done()) return Status::AccessDenied("not a reply of a cma owner");
    set_wake_fd(owner_.pidfd());
    return owner_.check();
  }

  Result<uint32_t> import_region(std::string_view remote_key) override {
    BlobReader from(remote_key, kMagic);
    uint64_t address = 0, bytes = 0, memfd = 0, memfd_inode = 0, memfd_offset = 0;
    uint32_t access = 0;
    from.fields(address, bytes, access, memfd, memfd_inode, memfd_offset);
    if (!from.done() || access > kLastAccess || bytes > UINT64_MAX - address) {
      return Status::AccessDenied("not a key of a cma region");
    }
    const bool mappable = static_cast<Access>(access) == Access::kWriteWords && memfd <= INT32_MAX;
    const FdOffer words{0, memfd_offset, bytes, Access::kWriteWords};
    mappings_.push_back(mappable ? map_words(owner_.pid(), memfd, memfd_inode, words) : std::nullopt);
    return add_remote({address, bytes, static_cast<Access>(access)});
  }

  void close() override {
    break_down(Status::Unreachable("this cma endpoint was closed"));
    mappings_.clear();
    owner_.forget();
  }

 protected:
  Status check_owner() override { return owner_.check(); }

  Status read_some(Read& read, Read* behind, size_t budget) override {
    num_local_ = num_remote_ = 0;
    Read* slot = is_one_slot(read) ? &read : nullptr;
    CountingCursor to = read.at;
    if (!slot) {
      gather(read.chunk, to, budget);
      if (kCopiesInOrder && behind && to.moved == read.bytes && is_one_slot(*behind)) slot = behind;
    }
    if (slot) gather_slot(*slot);
    load_fence();
    const ssize_t got = copy();
    if (got <= 0) return owner_.failed(got == 0 ? EFAULT : errno);
    const size_t data_bytes = to.moved - read.at.moved;
    const size_t slot_bytes = static_cast<size_t>(got) - std::min<size_t>(got, data_bytes);
    skip(read.chunk, read.at, static_cast<size_t>(got) - slot_bytes);
    if (slot && slot_bytes == copies_of(*slot) * slot->bytes)
      take_slot(*slot);
    else if (slot == &read)
      return owner_.failed(EFAULT);
    return {};
  }

  Status write_word(uint32_t region, uint64_t offset, uint64_t value) override {
    if (const auto& mapping = mappings_[region]) {
      store_word(reinterpret_cast<std::byte*>(mapping->address() + offset), value);
      return {};
    }
    const iovec local{&value, sizeof value};
    const iovec to = piece(remote(region).address + offset, sizeof value);
    return ::process_vm_writev(owner_.pid(), &local, 1, &to, 1, 0) == sizeof value ? Status{}
                                                                                   : owner_.failed(errno);
  }

 private:
  // Whether process_vm_readv loads its pieces in order. If so, the call that reads the end of a chunk can
  // also read the slot that validates it.
#if defined(__x86_64__)
  static constexpr bool kCopiesInOrder = true;
#else
  static constexpr bool kCopiesInOrder = false;
#endif

  bool is_one_slot(const Read& read) const {
    const ReadOp& op = read.chunk.ops.front();
    return read.chunk.ops.size() == 1 && op.num_segments == 1 &&
           is_words(remote(op.region).address + op.offset, op.bytes);
  }

  // The kernel may copy words in pieces. If two copies, the second begun after the first had ended, are
  // equal, the first did not overlap a store; if they differ, a later poll tries again. For one word a single
  // copy is enough (a piece costs 0.3 to 0.6 us), because it is only compared with its old value: it looks
  // unchanged only if every byte that a store changes was loaded before that store.
  static size_t copies_of(const Read& slot) { return slot.bytes == sizeof(uint64_t) ? 1 : 2; }

  void gather_slot(const Read& slot) {
    const ReadOp& op = slot.chunk.ops.front();
    const size_t copies = copies_of(slot);
    local_[num_local_++] = {slot_copies_.data(), copies * op.bytes};
    const iovec words = piece(remote(op.region).address + op.offset, op.bytes);
    for (size_t copy = 0; copy < copies; ++copy) remote_[num_remote_++] = words;
  }

  void take_slot(Read& slot) {
    const std::byte* const last = slot_copies_.data() + (copies_of(slot) - 1) * slot.bytes;
    if (std::memcmp(slot_copies_.data(), last, slot.bytes) != 0) return;
    std::memcpy(slot.chunk.segments[slot.chunk.ops.front().first_segment].local, last, slot.bytes);
    skip(slot.chunk, slot.at, slot.bytes);
  }

  void gather(const Chunk& chunk, CountingCursor& at, size_t budget) {
    walk(chunk, at, budget, [&](const ReadOp& op, uint32_t in_op, std::byte* to, uint32_t bytes) {
      if (num_local_ == kMaxDataPieces) return false;
      local_[num_local_++] = {to, bytes};
      const uint64_t from = remote(op.region).address + op.offset + in_op;
      if (num_remote_ > 0 && end_of(remote_[num_remote_ - 1]) == from) {
        remote_[num_remote_ - 1].iov_len += bytes;
      } else {
        remote_[num_remote_++] = piece(from, bytes);
      }
      return true;
    });
  }

  ssize_t copy() const {
    return ::process_vm_readv(owner_.pid(), local_.data(), num_local_, remote_.data(), num_remote_, 0);
  }

  static uint64_t end_of(const iovec& piece) {
    return reinterpret_cast<uint64_t>(piece.iov_base) + piece.iov_len;
  }

  Process owner_;
  std::vector<std::optional<MemfdMapping>> mappings_;  // by region
  size_t num_local_ = 0, num_remote_ = 0;
  std::array<iovec, kMaxPieces> local_, remote_;
  std::array<std::byte, 2 * kMaxWordsBytes> slot_copies_;
};

class CmaRegion : public MemoryRegion {
 public:
  CmaRegion(const MemoryRange& range, Access access) : range_(range), access_(access) {}
  std::string remote_key() const override {
    return BlobWriter()
        .u32(kMagic)
        .u64(reinterpret_cast<uint64_t>(range_.base))
        .u64(range_.bytes)
        .u32(static_cast<uint32_t>(access_))
        .u64(range_.memfd < 0 ? UINT64_MAX : static_cast<uint64_t>(range_.memfd))
        .u64(inode_of(range_.memfd))
        .u64(range_.memfd_offset)
        .take();
  }

 private:
  MemoryRange range_;
  Access access_;
};

class CmaTransport : public Transport {
 public:
  CmaTransport() {
    const std::string cookie = random_bytes(kCookieBytes);
    std::memcpy(cookie_.data(), cookie.data(), kCookieBytes);
    address_ = CmaAddress{boot_id(),
                          namespace_inode("pid"),
                          static_cast<uint64_t>(::getpid()),
                          ::geteuid(),
                          reinterpret_cast<uint64_t>(cookie_.data()),
                          cookie_}
                   .blob();
  }
  ~CmaTransport() override { close(); }

  std::string address() const override { return address_; }
  const Capabilities& capabilities() const override { return capabilities_; }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>&) override {
    if (access == Access::kLocal) return nullptr;
    return std::make_unique<CmaRegion>(range, access);
  }

  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes) override {
    return open_lanes(num_lanes, [&](uint32_t) { return open_one(owner_address); });
  }

  Result<std::string> accept(ReaderId, std::string_view hello) override {
    BlobReader from(hello, kMagic);
    if (!from.done()) return Status::AccessDenied("not the hello of a cma endpoint");
    return BlobWriter().u32(kMagic).take();
  }

  bool fence(uint64_t) override { return false; }
  void close() override {
    for (char& byte : cookie_) *static_cast<volatile char*>(&byte) = 0;
  }

 private:
  static Result<std::unique_ptr<Endpoint>> open_one(std::string_view owner_address) {
    Result<CmaAddress> parsed = CmaAddress::parse(owner_address);
    if (!parsed.ok()) return parsed.status();
    if (!is_this_boot(parsed->boot_id)) {
      return Status::Unavailable("the owner is on another machine",
                                 "enable a transport between machines (tcp)");
    }
    if (!is_own_namespace("pid", parsed->pid_namespace)) {
      return Status::Unavailable(
          "the owner is in another pid namespace",
          "share one (docker run --pid, shareProcessNamespace in Kubernetes), or use shm or tcp");
    }
    Process owner(std::move(*parsed));
    if (Status status = owner.check(); !status.ok()) return status;
    return std::make_unique<CmaEndpoint>(std::move(owner));
  }

  const Capabilities capabilities_{};
  Cookie cookie_;
  std::string address_;
};

}  // namespace

Status cma_probe() {
  const Cookie from{1};
  Cookie to{};
  const iovec local{to.data(), to.size()},
      remote = piece(reinterpret_cast<uint64_t>(from.data()), from.size());
  if (::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) == static_cast<ssize_t>(from.size()) &&
      to == from) {
    return {};
  }
  return Status::Unavailable(
      std::string("process_vm_readv: ") + std::strerror(errno),
      "allow the system calls process_vm_readv and process_vm_writev in the seccomp profile "
      "(docker run --cap-add SYS_PTRACE), in a kernel with CONFIG_CROSS_MEMORY_ATTACH");
}

Result<std::unique_ptr<Transport>> cma_make(const TransportOptions&) {
  return std::make_unique<CmaTransport>();
}

}  // namespace kvlink

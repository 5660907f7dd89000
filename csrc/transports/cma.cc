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
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/blob.h"
#include "base/host_identity.h"
#include "base/unique_fd.h"
#include "memory/streaming_copy.h"
#include "transports/cma_permission.h"
#include "transports/cma_process.h"
#include "transports/factories.h"
#include "transports/same_host/copy_endpoint.h"
#include "transports/same_host/copy_helper.h"
#include "transports/same_host/shared_mapping.h"

namespace kvlink {
namespace {

using cma::CmaAddress, cma::Cookie, cma::kCookieBytes, cma::kMagic, cma::piece, cma::Process;

constexpr size_t kMaxPieces = 1024;                // UIO_MAXIOV
constexpr size_t kMaxDataPieces = kMaxPieces - 2;  // the rest is for a slot

constexpr uint32_t kPartBytes = 128 << 10;  // at least, of what one of two threads copies at a time
constexpr uint32_t kMostPieceBytes = 256 << 10;
constexpr size_t kSharedBytes = 512 << 10;                 // from here on two threads copy
constexpr size_t kMostParts = (4 << 20) / kPartBytes + 1;  // of a slice

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

class CmaEndpoint : public QueuedEndpoint {
 public:
  CmaEndpoint(Process owner, std::shared_ptr<CopyHelper> helper)
      : owner_(std::move(owner)), helper_(std::move(helper)) {}

  std::string hello() const override { return BlobWriter().u32(kMagic).take(); }

  Status establish(std::string_view reply, const Patience&) override {
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
    num_local_ = num_remote_ = num_parts_ = 0;
    Read* slot = is_one_slot(read) ? &read : nullptr;
    CountingCursor to = read.at;
    if (!slot) {
      gather(read.chunk, to, budget);
      if (kCopiesInOrder && behind && to.moved == read.bytes && is_one_slot(*behind)) slot = behind;
    }
    const size_t num_bytes = to.moved - read.at.moved;
    if (num_bytes >= kSharedBytes) {
      if (Status status = copy_parts(read); !status.ok() || read.at.moved < to.moved) return status;
      if (!slot) return {};
      num_local_ = num_remote_ = 0;
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
      if (num_local_ + bytes / kMostPieceBytes >= kMaxDataPieces) return false;
      const uint64_t from = remote(op.region).address + op.offset + in_op;
      for (uint32_t cut, done = 0; done < bytes; done += cut) {
        cut = std::min(bytes - done, kMostPieceBytes);
        add_piece(to + done, from + done, cut);
      }
      return true;
    });
  }

  /// Parts begin with a piece of their own at both ends.
  void add_piece(std::byte* to, uint64_t from, uint32_t bytes) {
    const bool begins =
        num_parts_ == 0 || (parts_[num_parts_ - 1].bytes >= kPartBytes && num_parts_ < kMostParts);
    if (begins) parts_[num_parts_++] = {num_local_, num_remote_};
    local_[num_local_++] = {to, bytes};
    if (!begins && end_of(remote_[num_remote_ - 1]) == from) {
      remote_[num_remote_ - 1].iov_len += bytes;
    } else {
      remote_[num_remote_++] = piece(from, bytes);
    }
    parts_[num_parts_ - 1].bytes += bytes;
  }

  /// Copies what gather() has listed by up to two threads, and counts what has come without a gap.
  Status copy_parts(Read& read) {
    helper_->run([](void* self, uint32_t part) { static_cast<CmaEndpoint*>(self)->copy_part(part); }, this,
                 static_cast<uint32_t>(num_parts_));
    size_t came = 0;
    for (size_t i = 0; i < num_parts_; ++i) {
      const Part& part = parts_[i];
      if (part.got > 0) came += static_cast<size_t>(part.got);
      if (part.got == static_cast<ssize_t>(part.bytes)) continue;
      if (came == 0) return owner_.failed(part.got == 0 ? EFAULT : part.error);
      break;
    }
    skip(read.chunk, read.at, came);
    return {};
  }

  void copy_part(uint32_t number) {
    Part& part = parts_[number];
    const bool last = number + 1 == num_parts_;
    const size_t local_end = last ? num_local_ : parts_[number + 1].first_local;
    const size_t remote_end = last ? num_remote_ : parts_[number + 1].first_remote;
    load_fence();
    part.got = ::process_vm_readv(owner_.pid(), &local_[part.first_local], local_end - part.first_local,
                                  &remote_[part.first_remote], remote_end - part.first_remote, 0);
    part.error = part.got < 0 ? errno : 0;
  }

  ssize_t copy() const {
    return ::process_vm_readv(owner_.pid(), local_.data(), num_local_, remote_.data(), num_remote_, 0);
  }

  static uint64_t end_of(const iovec& piece) {
    return reinterpret_cast<uint64_t>(piece.iov_base) + piece.iov_len;
  }

  struct Part {
    size_t first_local = 0, first_remote = 0;
    size_t bytes = 0;
    ssize_t got = 0;
    int error = 0;
  };

  Process owner_;
  const std::shared_ptr<CopyHelper> helper_;           // of the transport
  std::vector<std::optional<MemfdMapping>> mappings_;  // by region
  size_t num_local_ = 0, num_remote_ = 0, num_parts_ = 0;
  std::array<Part, kMostParts> parts_;
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
    helper_->stop();
  }

 private:
  Result<std::unique_ptr<Endpoint>> open_one(std::string_view owner_address) const {
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
    return std::make_unique<CmaEndpoint>(std::move(owner), helper_);
  }

  const Capabilities capabilities_{};
  const std::shared_ptr<CopyHelper> helper_ = std::make_shared<CopyHelper>();
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

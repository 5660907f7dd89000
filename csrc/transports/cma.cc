// SPDX-License-Identifier: Apache-2.0
// cma: the reader lets the kernel copy out of the owner's memory (process_vm_readv). It needs only permission
// to trace the owner: no thread, no socket, any memory. So the owner can neither revoke a key nor cut a
// reader off, and readers rely on lease validation. Before it reads anything, the reader makes sure that the
// process consents: see cma_consent.h.
#include <sys/stat.h>
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
#include "memory/streaming_copy.h"
#include "transports/cma_consent.h"
#include "transports/cma_process.h"
#include "transports/factories.h"
#include "transports/same_host/copy_endpoint.h"
#include "transports/same_host/copy_helper.h"
#include "transports/same_host/shared_mapping.h"

namespace kvlink {
namespace {

using cma::Challenge, cma::CmaAddress, cma::Consent, cma::kMagic, cma::piece, cma::Process, cma::Region;

constexpr size_t kMaxPieces = 1024;                // UIO_MAXIOV
constexpr size_t kMaxDataPieces = kMaxPieces - 2;  // the rest is for a slot

constexpr uint32_t kMostPieceBytes = 256 << 10;

// Work is counted in bytes. The kernel pins the pages of a piece, which takes as long as copying 4 KiB: 0.7
// us on EPYC. From kSharedWork on two threads copy, in parts of at least kPartWork.
constexpr size_t kPieceWork = 4 << 10;
constexpr size_t kSharedWork = 1 << 20;
constexpr size_t kPartWork = 256 << 10;
constexpr int64_t kWorkPerUs = 5'800;  // of one thread

uint64_t inode_of(int fd) {
  struct stat found{};
  return ::fstat(fd, &found) == 0 ? found.st_ino : 0;
}

class CmaEndpoint : public QueuedEndpoint {
 public:
  CmaEndpoint(Process owner, std::shared_ptr<CopyHelper> helper)
      : owner_(std::move(owner)), helper_(std::move(helper)) {
    random_bytes(challenge_.size()).copy(challenge_.data(), challenge_.size());
  }

  std::string hello() const override { return BlobWriter().u32(kMagic).bytes(challenge_).take(); }

  Status establish(std::string_view reply, const Patience&) override {
    BlobReader from(reply, kMagic);
    const uint32_t place = from.u32();
    if (!from.done()) return Status::AccessDenied("not a reply of a cma owner");
    set_wake_fd(owner_.pidfd());
    Status status = owner_.believe(challenge_, place);
    consents_ = status.ok();
    return status;
  }

  Result<uint32_t> import_region(std::string_view remote_key) override {
    const Result<Region> region = Region::parse(remote_key);
    if (!region.ok()) return region.status();
    if (!consents_ || !owner_.has(*region)) {
      return Status::AccessDenied("the owner's process does not export the region of this key");
    }
    const auto access = static_cast<Access>(region->access);
    std::optional<MemfdMapping>& mapping = mappings_.emplace_back();
    if (access == Access::kWriteWords) {
      Result<MemfdMapping> words = owner_.map_words(*region);
      if (!words.ok()) return words.status();
      mapping.emplace(std::move(*words));
    }
    return add_remote({region->address, region->bytes, access});
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
    if (const size_t work = to.moved - read.at.moved + num_local_ * kPieceWork; work >= kSharedWork) {
      if (Status status = copy_parts(read, work); !status.ok() || read.at.moved < to.moved) return status;
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
    store_word(reinterpret_cast<std::byte*>(mappings_[region]->address() + offset), value);
    return {};
  }

 private:
  // Whether process_vm_readv loads its pieces in order. If so, the call that reads the end of a chunk can
  // also read the slot that validates it.
#if defined(__x86_64__)
  static constexpr bool kCopiesInOrder = true;
#else
  static constexpr bool kCopiesInOrder = false;
#endif

  static constexpr size_t kMostParts = (kSliceBytes + kMaxPieces * kPieceWork) / kPartWork + 1;  // of a slice

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
    const bool begins = num_parts_ == 0 || (last_work() >= kPartWork && num_parts_ < kMostParts);
    if (begins) parts_[num_parts_++] = {num_local_, num_remote_};
    local_[num_local_++] = {to, bytes};
    if (!begins && end_of(remote_[num_remote_ - 1]) == from) {
      remote_[num_remote_ - 1].iov_len += bytes;
    } else {
      remote_[num_remote_++] = piece(from, bytes);
    }
    parts_[num_parts_ - 1].bytes += bytes;
  }

  size_t last_work() const {
    const Part& last = parts_[num_parts_ - 1];
    return last.bytes + (num_local_ - last.first_local) * kPieceWork;
  }

  /// Copies what gather() has listed by up to two threads, and counts what has come without a gap.
  Status copy_parts(Read& read, size_t work) {
    helper_->run([](void* self, uint32_t part) { static_cast<CmaEndpoint*>(self)->copy_part(part); }, this,
                 static_cast<uint32_t>(num_parts_), static_cast<int64_t>(work) * 1000 / kWorkPerUs);
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
  Challenge challenge_;
  bool consents_ = false;
  const std::shared_ptr<CopyHelper> helper_;           // of the transport
  std::vector<std::optional<MemfdMapping>> mappings_;  // by region; only of words
  size_t num_local_ = 0, num_remote_ = 0, num_parts_ = 0;
  std::array<Part, kMostParts> parts_;
  std::array<iovec, kMaxPieces> local_, remote_;
  std::array<std::byte, 2 * kMaxWordsBytes> slot_copies_;
};

class CmaRegion : public MemoryRegion {
 public:
  CmaRegion(std::shared_ptr<Consent> consent, const Region& region)
      : consent_(std::move(consent)), region_(region) {}
  ~CmaRegion() override { consent_->remove(region_); }
  std::string remote_key() const override { return region_.key(); }

 private:
  const std::shared_ptr<Consent> consent_;
  const Region region_;
};

class CmaTransport : public Transport {
 public:
  explicit CmaTransport(std::shared_ptr<Consent> consent)
      : consent_(std::move(consent)),
        address_(CmaAddress{boot_id(), namespace_inode("pid"), static_cast<uint64_t>(::getpid()), ::geteuid(),
                            consent_->address()}
                     .blob()) {}
  ~CmaTransport() override { close(); }

  std::string address() const override { return address_; }
  const Capabilities& capabilities() const override { return capabilities_; }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>&) override {
    if (access == Access::kLocal) return nullptr;
    const Region region{.address = reinterpret_cast<uint64_t>(range.base),
                        .bytes = range.bytes,
                        .access = static_cast<uint64_t>(access),
                        .memfd = range.memfd < 0 ? UINT64_MAX : static_cast<uint64_t>(range.memfd),
                        .memfd_inode = inode_of(range.memfd),
                        .memfd_offset = range.memfd_offset};
    if (Status status = consent_->add(region); !status.ok()) return status;
    return std::make_unique<CmaRegion>(consent_, region);
  }

  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes,
                         const WorkerRun& owner) override {
    return open_lanes(num_lanes, [&](uint32_t) { return open_one(owner_address, owner); });
  }

  std::vector<Result<std::string>> accept(ReaderId reader, Hellos hellos) override {
    return accept_each(hellos, [&](std::string_view hello) -> Result<std::string> {
      BlobReader from(hello, kMagic);
      Challenge challenge;
      if (!from.fields(challenge).done()) return Status::AccessDenied("not the hello of a cma endpoint");
      return BlobWriter().u32(kMagic).u32(consent_->admit(reader.caller, challenge)).take();
    });
  }

  bool fence(uint64_t) override { return false; }
  void close() override {
    consent_->withdraw();
    helper_->stop();
  }

 private:
  Result<std::unique_ptr<Endpoint>> open_one(std::string_view owner_address, const WorkerRun& run) const {
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
    Result<Process> owner = Process::of(std::move(*parsed), run);
    if (!owner.ok()) return owner.status();
    if (Status status = owner->permitted(); !status.ok()) return status;
    return std::make_unique<CmaEndpoint>(std::move(*owner), helper_);
  }

  const Capabilities capabilities_{};
  const std::shared_ptr<CopyHelper> helper_ = std::make_shared<CopyHelper>();
  const std::shared_ptr<Consent> consent_;
  const std::string address_;
};

}  // namespace

Status cma_probe() {
  const std::array<char, 16> from{1};
  std::array<char, 16> to{};
  const iovec local{to.data(), to.size()},
      remote = piece(reinterpret_cast<uint64_t>(from.data()), from.size());
  if (::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) == static_cast<ssize_t>(from.size()) &&
      to == from) {
    return {};
  }
  return Status::Unavailable(
      std::string("process_vm_readv: ") + std::strerror(errno),
      "allow the system call process_vm_readv in the seccomp profile "
      "(docker run --cap-add SYS_PTRACE), in a kernel with CONFIG_CROSS_MEMORY_ATTACH");
}

Result<std::unique_ptr<Transport>> cma_make(const TransportOptions& options) {
  Result<std::shared_ptr<Consent>> consent = Consent::make(options.self);
  if (!consent.ok()) return consent.status();
  return std::make_unique<CmaTransport>(std::move(*consent));
}

}  // namespace kvlink

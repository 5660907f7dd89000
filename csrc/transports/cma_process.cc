// SPDX-License-Identifier: Apache-2.0
#include "transports/cma_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/blob.h"
#include "transports/cma_permission.h"

namespace kvlink::cma {
namespace {

constexpr size_t kMaxBootIdBytes = 64;

ssize_t copy_from(int pid, uint64_t address, void* into, size_t bytes) {
  const iovec local{into, bytes}, remote = piece(address, bytes);
  return ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
}

std::string text(const Identity& identity) {
  const size_t bytes = std::min<uint64_t>(identity.worker_bytes, kMaxWorkerBytes);
  return "worker '" + std::string(identity.worker.data(), bytes) + "' of epoch " +
         std::to_string(identity.epoch);
}

}  // namespace

std::string CmaAddress::blob() const {
  return BlobWriter().u32(kMagic).bytes(boot_id).u64(pid_namespace).u64(pid).u64(uid).u64(consent).take();
}

Result<CmaAddress> CmaAddress::parse(std::string_view blob) {
  BlobReader from(blob, kMagic);
  CmaAddress parsed;
  parsed.boot_id = from.bytes(kMaxBootIdBytes);
  from.fields(parsed.pid_namespace, parsed.pid, parsed.uid, parsed.consent);
  if (!from.done() || parsed.pid == 0 || parsed.pid > INT32_MAX ||
      parsed.consent > UINT64_MAX - sizeof(ConsentMemory)) {
    return Status::Unavailable("not a cma address", "let both ends run the same version of kvlink");
  }
  return parsed;
}

Result<Process> Process::of(CmaAddress address, const WorkerRun& owner) {
  const Result<Identity> identity = Identity::of(address.pid, owner);
  if (!identity.ok()) return identity.status();
  return Process(std::move(address), *identity);
}

Process::Process(CmaAddress address, const Identity& owner) : address_(std::move(address)), owner_(owner) {
  // Without pidfds (before Linux 5.3) the stamp shows that the owner is gone.
  pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid(), 0)));
}

bool Process::ended() const {
  pollfd exit{pidfd_.get(), POLLIN, 0};
  return ::poll(&exit, 1, 0) > 0;
}

Status Process::permitted() const {
  if (ended()) return has_ended();
  char ignored;
  const bool answered = copy_from(pid(), address_.consent, &ignored, 1) >= 0 || errno == EFAULT;
  return answered ? Status{} : failed(errno);
}

Status Process::read(uint64_t offset, void* into, size_t bytes) const {
  const ssize_t got = copy_from(pid(), address_.consent + offset, into, bytes);
  if (got < 0 && errno != EFAULT) return failed(errno);
  return got == static_cast<ssize_t>(bytes) ? Status{} : replaced();
}

Status Process::believe(const Challenge& challenge, uint32_t place) {
  // Without this, bytes that a liar brought into that memory could pass for a consent.
  const Result<bool> has_one = has_consent_at(pid(), address_.consent);
  if (!has_one.ok()) return ended() ? has_ended() : has_one.status();
  if (!*has_one) return replaced();
  if (place >= kNumChallenges) return Status::AccessDenied("not a reply of a cma owner");
  Identity found;
  Challenge stored;
  uint64_t num_regions = 0;
  Status status = read(offsetof(ConsentMemory, identity), &found, sizeof found);
  if (status.ok()) status = read(offsetof(ConsentMemory, stamp), &stamp_, sizeof stamp_);
  const size_t at = offsetof(ConsentMemory, challenges) + place * sizeof stored;
  if (status.ok()) status = read(at, &stored, sizeof stored);
  if (status.ok()) status = read(offsetof(ConsentMemory, num_regions), &num_regions, sizeof num_regions);
  if (!status.ok()) return status;
  if (found.pid != owner_.pid || stamp_ == 0) return replaced();
  if (found != owner_) {
    return Status::AccessDenied(name() + " is not " + text(owner_) + ": the card of that worker is false");
  }
  if (stored != challenge) {
    return Status::AccessDenied(name() + " did not consent to be read by this process: the card of " +
                                text(owner_) + " or the answer of its agent is false");
  }
  if (num_regions > kMaxRegions) return replaced();
  regions_.resize(num_regions);
  status = read(offsetof(ConsentMemory, regions), regions_.data(), num_regions * sizeof(Region));
  return status.ok() ? check() : status;
}

Status Process::check() const {
  if (ended()) return has_ended();
  uint64_t stamp = 0;
  Status status = read(offsetof(ConsentMemory, stamp), &stamp, sizeof stamp);
  return !status.ok() || stamp == stamp_ ? status : replaced();
}

bool Process::has(const Region& region) const {
  return std::find(regions_.begin(), regions_.end(), region) != regions_.end();
}

Result<MemfdMapping> Process::map_words(const Region& region) const {
  const std::string path = "/proc/" + std::to_string(pid()) + "/fd/" + std::to_string(region.memfd);
  // It is opened with the rights of this process, and to open a device may have effects. So it is checked
  // first; and its number may be that of another file by now.
  const UniqueFd seen(::open(path.c_str(), O_PATH | O_CLOEXEC));
  struct stat found{};
  UniqueFd fd;
  if (seen && ::fstat(seen.get(), &found) == 0 && S_ISREG(found.st_mode) &&
      found.st_ino == region.memfd_inode)
    fd.reset(::open(("/proc/self/fd/" + std::to_string(seen.get())).c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) {
    return Status::Unavailable("cannot open the lease words of " + name() + " through /proc",
                               "mount /proc of the owner's pid namespace, or use shm or tcp");
  }
  return MemfdMapping::make(fd.get(), {0, region.memfd_offset, region.bytes, Access::kWriteWords});
}

Status Process::failed(int error) const {
  if (error == EFAULT)
    return Status::AccessDenied(name() + " no longer has that memory, or this process does not");
  if (error == ESRCH) return has_ended();
  if (error == EPERM) return why_cma_refused(pid(), static_cast<uid_t>(address_.uid));
  return Status::Unreachable("process_vm_readv from " + name() + ": " + std::strerror(error));
}

}  // namespace kvlink::cma

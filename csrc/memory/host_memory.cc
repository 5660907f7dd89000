// SPDX-License-Identifier: Apache-2.0
#include "memory/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/read_file.h"
#include "base/sys.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvlink {
namespace {

/// " (… available)", or nothing where /proc does not say.
std::string available_memory() {
  constexpr std::string_view kName = "MemAvailable:";
  const std::string meminfo = read_file("/proc/meminfo").value_or("");
  for (std::string_view rest = meminfo; !rest.empty();) {
    std::string_view line = take_line(rest);
    if (!line.starts_with(kName)) continue;
    line.remove_prefix(std::min(line.find_first_not_of(' ', kName.size()), line.size()));
    return " (" + std::string(line) + " available)";
  }
  return {};
}

Status refused(uint64_t bytes, const char* call, int error) {
  const std::string doing = "cannot allocate " + std::to_string(bytes) + " bytes of shared memory";
  return sys::failed(Code::kConfig, sys::is_memory(call, error) ? doing + available_memory() : doing, call,
                     error);
}

// Populating one piece takes about 10 ms.
constexpr uint64_t kPopulateBytes = 64 << 20;

// Faults every page in now: a pool that does not fit must fail here, and not by SIGBUS during a copy. Returns
// an errno, or ECANCELED if `go_on` returned false.
int populate(std::byte* base, uint64_t bytes, int fd, const std::function<bool()>& go_on) {
  for (uint64_t at = 0; at < bytes; at += kPopulateBytes) {
    if (go_on && !go_on()) return ECANCELED;
    const uint64_t piece = std::min(bytes - at, kPopulateBytes);
    if (::madvise(base + at, piece, MADV_POPULATE_WRITE) == 0) continue;
    // Linux before 5.14 does not know it, and seccomp may refuse it.
    const bool unknown = errno == EINVAL || errno == EPERM || errno == ENOSYS;
    const int error =
        unknown ? ::posix_fallocate(fd, static_cast<off_t>(at), static_cast<off_t>(piece)) : errno;
    if (error != 0) return error;
  }
  return 0;
}

/// Leaves this process's mapping writable and makes later ones read-only. Returns false with errno set on
/// failure.
bool seal_for_good(int fd, Access access) {
  if (access != Access::kWriteWords && sys::add_seals(fd, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0)
    return true;
  return (access == Access::kWriteWords || errno == EINVAL) && sys::add_seals(fd, F_SEAL_SEAL) == 0;
}

}  // namespace

Result<std::shared_ptr<HostMemory>> HostMemory::allocate(uint64_t bytes, bool huge_pages,
                                                         const std::function<bool()>& go_on, Access access) {
  if (bytes == 0) return Status::Config("cannot allocate 0 bytes of shared memory");
  if (bytes > static_cast<uint64_t>(INT64_MAX)) return refused(bytes, "ftruncate", EFBIG);
  UniqueFd fd(sys::make_memfd("kvlink", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return refused(bytes, "memfd_create", errno);
  if (sys::set_size(fd.get(), bytes) != 0) return refused(bytes, "ftruncate", errno);
  // Readers map it, so it must never shrink.
  if (sys::add_seals(fd.get(), F_SEAL_SHRINK | F_SEAL_GROW) != 0) return refused(bytes, "fcntl", errno);
  void* const mapped = sys::map_shared(bytes, PROT_READ | PROT_WRITE, 0, fd.get(), 0);
  if (mapped == MAP_FAILED) return refused(bytes, "mmap", errno);
  auto* const base = static_cast<std::byte*>(mapped);
  const int memfd = fd.get();
  if (huge_pages) ::madvise(base, bytes, MADV_HUGEPAGE);  // advice: failure changes nothing
  std::shared_ptr<HostMemory> memory(new HostMemory({base, bytes, memfd, 0}, std::move(fd)));
  const int error = populate(base, bytes, memory->range_.memfd, go_on);
  if (error == ECANCELED) return Status::Cancelled("the allocation was interrupted");
  if (error != 0) return refused(bytes, "madvise", error);
  if (!seal_for_good(memory->range_.memfd, access)) return refused(bytes, "fcntl", errno);
  return memory;
}

HostMemory::~HostMemory() { ::munmap(range_.base, range_.bytes); }

void HostMemory::close_memfd() {
  memfd_.reset();
  range_.memfd = -1;
}

}  // namespace kvlink

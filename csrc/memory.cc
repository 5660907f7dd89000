// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "fd.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvlink {
namespace {

std::string available_memory() {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string name, rest; meminfo >> name && std::getline(meminfo, rest);) {
    if (name == "MemAvailable:") return rest.substr(rest.find_first_not_of(' '));
  }
  return "an unknown amount";
}

Status no_memory(uint64_t bytes, const char* call, int error) {
  return {Code::kConfig,
          "cannot allocate " + std::to_string(bytes) + " bytes of shared memory: " + call + ": " +
              std::strerror(error) + " (" + available_memory() + " available)",
          "ask for fewer blocks, or raise the memory limit of this machine or container"};
}

// Faults every page in now: a pool that does not fit must fail here and not by SIGBUS in the middle of a
// copy.
int populate(std::byte* base, uint64_t bytes, int fd) {
  if (::madvise(base, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;  // EINVAL: a kernel before 5.14
  return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
}

}  // namespace

Result<std::shared_ptr<HostMemory>> HostMemory::allocate(uint64_t bytes, bool huge_pages) {
  if (bytes == 0) return Status::Config("cannot allocate 0 bytes of shared memory");
  if (bytes > static_cast<uint64_t>(INT64_MAX)) return no_memory(bytes, "ftruncate", EFBIG);
  UniqueFd fd(::memfd_create("kvlink", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return no_memory(bytes, "memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return no_memory(bytes, "ftruncate", errno);
  // Readers map it: it must never shrink under them.
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return no_memory(bytes, "F_ADD_SEALS", errno);
  }
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (mapped == MAP_FAILED) return no_memory(bytes, "mmap", errno);
  auto* const base = static_cast<std::byte*>(mapped);
  if (huge_pages) ::madvise(base, bytes, MADV_HUGEPAGE);  // advice: failure changes nothing
  std::shared_ptr<HostMemory> memory(new HostMemory({base, bytes, fd.release(), 0}));
  if (const int error = populate(base, bytes, memory->range_.memfd))
    return no_memory(bytes, "populate", error);
  return memory;
}

HostMemory::~HostMemory() {
  ::munmap(range_.base, range_.bytes);
  ::close(range_.memfd);
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "transports/same_host/shared_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/sys.h"

namespace kvlink {
namespace {

// Page tables of larger mappings are filled on first use, because filling them at once would delay the first
// pull.
constexpr uint64_t kPopulateBytes = uint64_t{1} << 30;

bool never_shrinks(int memfd) {
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

/// Returns whether the memfd has those bytes and never shrinks.
bool memfd_holds(int memfd, uint64_t offset, uint64_t bytes) {
  struct stat found{};
  if (!never_shrinks(memfd) || ::fstat(memfd, &found) != 0) return false;
  const auto size = static_cast<uint64_t>(found.st_size);
  return bytes <= size && offset <= size - bytes;
}

}  // namespace

Result<FdOffer> export_memfd(FdServer& server, const MemoryRange& range, Access access) {
  if (range.memfd < 0) return Status::Unavailable("the pool was not allocated by kvlink", {});
  if (!never_shrinks(range.memfd))
    return Status::Unavailable("its memfd is not sealed against shrinking", {});
  const bool again = access != Access::kWriteWords;
  const std::string path = "/proc/self/fd/" + std::to_string(range.memfd);
  UniqueFd memfd(again ? sys::open_file(path.c_str(), O_RDONLY) : sys::duplicate(range.memfd));
  if (!memfd) {
    return sys::transport_failed("cannot open the pool's memfd again", again ? "open" : "fcntl", errno);
  }
  return server.add(std::move(memfd), {0, range.memfd_offset, range.bytes, access});
}

Result<UniqueFd> memfd_of(const char* name, std::string_view bytes) {
  UniqueFd fd(sys::make_memfd(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::pwrite(fd.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return sys::transport_failed("cannot keep what readers are told", fd ? "pwrite" : "memfd_create", errno);
  }
  // Readers get this open file, so any of them could change what the next one is told.
  if (sys::add_seals(fd.get(), F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return sys::transport_failed("cannot keep what readers are told", "fcntl", errno);
  return fd;
}

bool file_has(int fd, std::string_view bytes) {
  std::string found(bytes.size(), '\0');
  return ::pread(fd, found.data(), found.size(), 0) == static_cast<ssize_t>(found.size()) && found == bytes;
}

MemfdMapping::~MemfdMapping() {
  if (start_) ::munmap(start_, bytes_);
}

Result<MemfdMapping> MemfdMapping::make(FdClient& client, const FdOffer& offer) {
  const Result<UniqueFd> taken = client.take(offer);
  return taken.ok() ? make((*taken).get(), offer) : taken.status();
}

Result<MemfdMapping> MemfdMapping::make(int memfd, const FdOffer& offer) {
  if (!memfd_holds(memfd, offer.offset, offer.bytes))
    return Status::AccessDenied("the owner's offer of memory is malformed");
  MemfdMapping mapping;
  mapping.skip_ = offer.offset % static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  mapping.bytes_ = offer.bytes + mapping.skip_;
  const int protection = offer.access == Access::kWriteWords ? PROT_READ | PROT_WRITE : PROT_READ;
  const int populate = offer.bytes <= kPopulateBytes ? MAP_POPULATE : 0;
  void* const start =
      sys::map_shared(mapping.bytes_, protection, populate, memfd, offer.offset - mapping.skip_);
  if (start == MAP_FAILED) {
    return sys::failed(Code::kTransportUnavailable,
                       "cannot map " + std::to_string(offer.bytes) + " bytes of the owner's memory", "mmap",
                       errno);
  }
  mapping.start_ = start;
  return mapping;
}

}  // namespace kvlink

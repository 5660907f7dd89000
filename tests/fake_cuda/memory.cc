// SPDX-License-Identifier: Apache-2.0
// Device memory: memfds, mapped where the driver would map physical memory, and copies from device to device.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "fake.h"

namespace fake {
namespace {

constexpr size_t kGranularity = 2 << 20;
constexpr char kName[] = "fake-cuda-allocation-";  // and the GPU's number

/// One physical allocation, counted by handles and mappings.
struct Allocation {
  int fd;
  size_t bytes;
  int gpu;
  int count = 1;
  int handle_types = 1;
  unsigned long long id = 0;
  bool by_ipc = false;  // other processes may have it by cuIpcOpenMemHandle
};
struct Range {
  size_t bytes;
  Allocation* allocation;  // null: only reserved
  bool by_malloc;
};

std::mutex mutex;
std::map<uintptr_t, Range> reserved, mapped;  // by address on the host

Allocation* make(size_t bytes, int gpu) {
  const int fd = ::memfd_create((kName + std::to_string(gpu)).c_str(), MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return nullptr;
  ++live;
  static std::atomic<unsigned long long> made{0};
  auto* const allocation = new Allocation{fd, bytes, gpu};
  allocation->id = ++made;
  return allocation;
}

ino_t inode_of(int fd) {
  struct stat found{};
  return ::fstat(fd, &found) == 0 ? found.st_ino : 0;
}

void drop(Allocation* allocation) {
  if (--allocation->count > 0) return;
  ::close(allocation->fd);
  delete allocation;
  --live;
}

std::map<uintptr_t, Range>::iterator find(uint64_t address) {
  const auto at = reinterpret_cast<uintptr_t>(behind(address));
  auto found = mapped.upper_bound(at);
  if (found == mapped.begin()) return mapped.end();
  --found;
  return at < found->first + found->second.bytes ? found : mapped.end();
}

int map_whole(uint64_t* address, Allocation* allocation) {
  void* const at = ::mmap(nullptr, allocation->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, allocation->fd, 0);
  if (at == MAP_FAILED) return kInvalidValue;
  mapped[reinterpret_cast<uintptr_t>(at)] = {allocation->bytes, allocation, true};
  *address = on_device(at);
  return kSuccess;
}

int unmap_whole(uint64_t address) {
  const auto found = mapped.find(reinterpret_cast<uintptr_t>(behind(address)));
  if (found == mapped.end() || !found->second.by_malloc) return kInvalidValue;
  ::munmap(behind(address), found->second.bytes);
  drop(found->second.allocation);
  mapped.erase(found);
  return kSuccess;
}

}  // namespace

int gpu_of(uint64_t address) {
  std::lock_guard lock(mutex);
  const auto found = find(address);
  return found == mapped.end() ? 0 : found->second.allocation->gpu;
}

unsigned long long id_of(uint64_t address) {
  std::lock_guard lock(mutex);
  const auto found = find(address);
  return found == mapped.end() || !found->second.by_malloc ? 0 : found->second.allocation->id;
}

}  // namespace fake

using namespace fake;  // NOLINT: the C functions below

struct Properties {
  int type, handle_types, location_type, location_id;
};
/// As CUDA's, where this fake fills only what comes first.
struct AllProperties {
  Properties first;
  std::array<char, 16> rest;
};
struct AccessDescription {
  int location_type, location_id, flags;
};
struct IpcHandle {
  pid_t pid;
  int fd;
  size_t bytes;
  ino_t inode;
  int gpu;
  std::array<char, 36> rest;
};
static_assert(sizeof(IpcHandle) == 64);
using FabricHandle = IpcHandle;

/// The error of a process that has no channel of IMEX.
int may_share_by_fabric() { return has_channel() ? kSuccess : on_fabric() ? kNotPermitted : kNotSupported; }

/// Opens what another process of this machine, or this one, told by a handle. -1: it is not there.
int open_told(const IpcHandle& handle) {
  const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0 || inode_of(fd) == handle.inode) return fd;
  ::close(fd);  // of another process: pids are those of one namespace
  return -1;
}

#pragma GCC visibility push(default)
extern "C" {

int cuMemGetAllocationGranularity(size_t* bytes, const Properties* wanted, int) {
  *bytes = kGranularity;
  return wanted->type == 1 && wanted->location_type == 1 ? kSuccess : kInvalidValue;
}

int cuMemCreate(uint64_t* handle, size_t bytes, const Properties* wanted, unsigned long long flags) {
  if (const int error = may_wait()) return error;
  const int gpu = gpu_at(wanted->location_id);
  if (wanted->type != 1 || wanted->location_type != 1 || gpu < 0) return kInvalidValue;
  const int types = wanted->handle_types;
  if (types == 0 || (types & ~9) != 0 || bytes == 0 || bytes % kGranularity != 0 || flags != 0)
    return kInvalidValue;
  if (const int error = may_share_by_fabric(); (types & 8) != 0 && error != kSuccess) return error;
  Allocation* const made = make(bytes, gpu);
  if (made != nullptr) made->handle_types = types;
  *handle = reinterpret_cast<uint64_t>(made);
  return made ? kSuccess : kInvalidValue;
}

int cuMemRelease(uint64_t handle) {
  if (const int error = breaks_capture()) return error;
  std::lock_guard lock(mutex);
  drop(reinterpret_cast<Allocation*>(handle));
  return kSuccess;
}

int cuMemRetainAllocationHandle(uint64_t* handle, void* address) {
  std::lock_guard lock(mutex);
  const auto found = find(reinterpret_cast<uint64_t>(address));
  if (found == mapped.end() || found->second.by_malloc) return kInvalidValue;
  ++found->second.allocation->count;
  *handle = reinterpret_cast<uint64_t>(found->second.allocation);
  return kSuccess;
}

int cuMemGetAllocationPropertiesFromHandle(AllProperties* properties, uint64_t handle) {
  const Allocation& allocation = *reinterpret_cast<Allocation*>(handle);
  *properties = {{1, allocation.handle_types, 1, ordinal_of(allocation.gpu)}, {}};
  return kSuccess;
}

int cuMemExportToShareableHandle(void* into, uint64_t handle, int type, unsigned long long flags) {
  if (const int error = breaks_capture()) return error;
  Allocation& allocation = *reinterpret_cast<Allocation*>(handle);
  if ((type & allocation.handle_types) == 0 || flags != 0) return kInvalidValue;
  if (type == 8) {
    if (const int error = may_share_by_fabric()) return error;
    *static_cast<FabricHandle*>(into) = {
        ::getpid(), allocation.fd, allocation.bytes, inode_of(allocation.fd), allocation.gpu, {}};
    return kSuccess;
  }
  const int fd = ::fcntl(allocation.fd, F_DUPFD_CLOEXEC, 0);
  *static_cast<int*>(into) = fd;
  return fd >= 0 ? kSuccess : kInvalidValue;
}

int cuMemImportFromShareableHandle(uint64_t* handle, void* descriptor, int type) {
  if (const int error = breaks_capture()) return error;
  if (type == 8) {  // the GPU need not be visible to this process
    if (const int error = may_share_by_fabric()) return error;
    const FabricHandle& told = *static_cast<const FabricHandle*>(descriptor);
    const int opened = open_told(told);
    if (opened < 0) return kInvalidValue;
    ++live;
    *handle = reinterpret_cast<uint64_t>(new Allocation{opened, told.bytes, told.gpu});
    return kSuccess;
  }
  const auto fd = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
  std::array<char, 64> link{};
  struct stat found{};
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  if (type != 1 || ::readlink(path.c_str(), link.data(), link.size() - 1) < 0 || ::fstat(fd, &found) != 0) {
    return kInvalidValue;
  }
  const char* const name = std::strstr(link.data(), kName);
  if (name == nullptr) return kInvalidValue;
  const int gpu = std::atoi(name + std::strlen(kName));
  if (ordinal_of(gpu) < 0) return kInvalidDevice;  // NVIDIA/nccl#1647
  ++live;
  *handle = reinterpret_cast<uint64_t>(
      new Allocation{::fcntl(fd, F_DUPFD_CLOEXEC, 0), static_cast<size_t>(found.st_size), gpu});
  return kSuccess;
}

int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t, uint64_t, unsigned long long) {
  if (const int error = breaks_capture()) return error;
  if (bytes == 0 || bytes % kGranularity != 0) return kInvalidValue;
  void* const at = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return kInvalidValue;
  std::lock_guard lock(mutex);
  reserved[reinterpret_cast<uintptr_t>(at)] = {bytes, nullptr, false};
  ++live;
  *address = on_device(at);
  return kSuccess;
}

int cuMemAddressFree(uint64_t address, size_t bytes) {
  if (const int error = breaks_capture()) return error;
  std::lock_guard lock(mutex);
  const auto found = reserved.find(reinterpret_cast<uintptr_t>(behind(address)));
  if (found == reserved.end() || found->second.bytes != bytes) return kInvalidValue;
  ::munmap(behind(address), bytes);
  reserved.erase(found);
  --live;
  return kSuccess;
}

int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
  if (const int error = may_wait()) return error;
  auto* const allocation = reinterpret_cast<Allocation*>(handle);
  if (bytes > allocation->bytes || offset != 0 || flags != 0) return kInvalidValue;
  std::lock_guard lock(mutex);
  void* const at = ::mmap(behind(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd, 0);
  if (at == MAP_FAILED) return kInvalidValue;
  ++allocation->count;
  mapped[reinterpret_cast<uintptr_t>(at)] = {bytes, allocation, false};
  return kSuccess;
}

int cuMemUnmap(uint64_t address, size_t bytes) {
  if (const int error = breaks_capture()) return error;
  std::lock_guard lock(mutex);
  const auto found = mapped.find(reinterpret_cast<uintptr_t>(behind(address)));
  if (found == mapped.end() || found->second.bytes != bytes || found->second.by_malloc) return kInvalidValue;
  ::mmap(behind(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  drop(found->second.allocation);
  mapped.erase(found);
  return kSuccess;
}

int cuMemSetAccess(uint64_t address, size_t bytes, const AccessDescription* access, size_t count) {
  if (const int error = breaks_capture()) return error;
  const int gpu = gpu_at(access->location_id);
  if (count != 1 || access->location_type != 1 || gpu < 0) return kInvalidValue;
  if (!peers(gpu, gpu_of(address))) return kPeerAccessUnsupported;
  const char* const refused = std::getenv("FAKE_CUDA_NO_READ_ONLY");  // the error, as a number
  if (access->flags != 3 && refused != nullptr) return std::atoi(refused);
  const int protection = access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
  return ::mprotect(behind(address), bytes, protection) == 0 ? kSuccess : kInvalidValue;
}

int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
  if (const int error = ready()) return error;
  std::lock_guard lock(mutex);
  const auto found = find(address);
  if (found == mapped.end()) return kInvalidValue;
  *base = found->first | kDeviceBit;
  *bytes = found->second.bytes;
  return kSuccess;
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  if (const int error = may_wait()) return error;
  std::lock_guard lock(mutex);
  Allocation* const made = make(bytes, current_gpu());
  return made ? map_whole(address, made) : kInvalidValue;
}

/// Ends readers that touch the memory afterwards: CUDA does not define what they see.
int cuMemFree_v2(uint64_t address) {
  if (const int error = breaks_capture()) return error;
  std::lock_guard lock(mutex);
  const auto found = find(address);
  if (found != mapped.end() && found->second.allocation->by_ipc &&
      ::ftruncate(found->second.allocation->fd, 0) != 0) {
    return kInvalidValue;
  }
  return unmap_whole(address);
}

int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, CUstream_st* stream) {
  if (const int error = ready()) return error;
  if (stream == nullptr) return kInvalidValue;
  stream->push([=] { std::memset(behind(address), value, bytes); });
  return kSuccess;
}

int cuIpcGetMemHandle(IpcHandle* handle, uint64_t address) {
  if (const int error = breaks_capture()) return error;
  std::lock_guard lock(mutex);
  const auto found = mapped.find(reinterpret_cast<uintptr_t>(behind(address)));
  if (found == mapped.end() || !found->second.by_malloc) return kInvalidValue;
  Allocation& allocation = *found->second.allocation;
  allocation.by_ipc = true;
  *handle = {::getpid(), allocation.fd, allocation.bytes, inode_of(allocation.fd), allocation.gpu, {}};
  return kSuccess;
}

int cuIpcOpenMemHandle_v2(uint64_t* address, IpcHandle handle, unsigned flags) {
  if (const int error = may_wait()) return error;
  if (flags != 1) return kInvalidValue;
  if (handle.pid == ::getpid()) return kInvalidContext;
  if (!peers(current_gpu(), handle.gpu)) return kPeerAccessUnsupported;  // seen by this process or not
  const int fd = open_told(handle);
  if (fd < 0) return kInvalidValue;
  std::lock_guard lock(mutex);
  ++live;
  return map_whole(address, new Allocation{fd, handle.bytes, handle.gpu});
}

int cuIpcCloseMemHandle(uint64_t address) {
  if (const int error = breaks_capture()) return error;
  std::lock_guard lock(mutex);
  return unmap_whole(address);
}

int cuMemcpyBatchAsync_v2(uint64_t* to, uint64_t* from, size_t* bytes, size_t count, void* attributes,
                          size_t* starts, size_t num_attributes, CUstream_st* stream) {
  if (std::getenv("FAKE_CUDA_NO_BATCH") != nullptr) return kNotSupported;
  if (attributes == nullptr || num_attributes != 1 || starts[0] != 0) return kInvalidValue;
  for (size_t i = 0; i < count; ++i) {
    if (const int error = copy(to[i], from[i], bytes[i], stream)) return error;
  }
  return kSuccess;
}

/// Has the signature of CUDA 12.8 and 12.9.
int cuMemcpyBatchAsync(uint64_t* to, uint64_t* from, size_t* bytes, size_t count, void* attributes,
                       size_t* starts, size_t num_attributes, size_t* failed, CUstream_st* stream) {
  if (failed == nullptr) return kInvalidValue;
  *failed = SIZE_MAX;
  return cuMemcpyBatchAsync_v2(to, from, bytes, count, attributes, starts, num_attributes, stream);
}

}  // extern "C"
#pragma GCC visibility pop

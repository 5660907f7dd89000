// SPDX-License-Identifier: Apache-2.0
// The remote key of a region: what an owner of GPU memory sends to readers on the same host.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/blob.h"
#include "device/cuda_api.h"
#include "transports/same_host/fd_protocol.h"

namespace kvlink {

inline constexpr uint32_t kCudaMagic = 0x3461'6463;  // "cda4"
inline constexpr uint32_t kMaxCudaParts = 2048;      // of one region; its key stays below 64 KiB

struct CudaKey {
  enum class Kind : uint32_t {
    kHost,         // a memfd, mapped by the CPU: the lease table
    kAllocations,  // physical allocations of a GPU, one behind the other, each with a descriptor
    kIpc,          // what cudaMalloc made, by CUDA's older handles
    kFabric,       // as kAllocations, but each descriptor has a handle of the fabric in it
  };
  Kind kind = Kind::kHost;
  uint64_t bytes = 0, offset = 0;  // of the region; offset into its first part, or what cudaMalloc made
  uint64_t address = 0;            // kIpc: readers in the owner's own process go there directly
  uint64_t pid_namespace = 0;      // of the owner, which kIpc depends on
  cuda::Uuid gpu{};
  cuda::IpcHandle ipc{};
  std::vector<FdOffer> parts;  // not of kIpc
  /// Names the offer whose descriptor has this key, but for this field: what the card has counts only if the
  /// owner's process says the same. Not of kHost, where the only part says all.
  uint64_t deed = 0;

  std::string blob() const {
    BlobWriter to;
    to.u32(kCudaMagic)
        .u32(static_cast<uint32_t>(kind))
        .u64(bytes)
        .u64(offset)
        .u64(address)
        .u64(pid_namespace)
        .u64(deed);
    to.bytes({gpu.bytes, sizeof gpu.bytes});
    to.bytes(kind == Kind::kIpc ? std::string_view(ipc.bytes, sizeof ipc.bytes) : std::string_view());
    to.u32(static_cast<uint32_t>(parts.size()));
    for (const FdOffer& part : parts) part.write(to);
    return to.take();
  }

  /// Returns kAccessDenied if no owner makes such a key.
  static Result<CudaKey> parse(std::string_view blob) {
    BlobReader from(blob, kCudaMagic);
    CudaKey key;
    uint32_t kind = 0;
    from.fields(kind, key.bytes, key.offset, key.address, key.pid_namespace, key.deed);
    key.kind = static_cast<Kind>(kind);
    const std::string_view gpu = from.bytes(sizeof key.gpu.bytes);
    const std::string_view ipc = from.bytes(sizeof key.ipc.bytes);
    const uint32_t count = from.u32();
    if (!from.ok() || kind > kLastKind || gpu.size() != sizeof key.gpu.bytes || count > kMaxCudaParts) {
      return malformed();
    }
    std::memcpy(key.gpu.bytes, gpu.data(), gpu.size());
    std::memcpy(key.ipc.bytes, ipc.data(), ipc.size());
    for (uint32_t part = 0; part < count; ++part) {
      if (!key.parts.emplace_back().read(from)) return malformed();
    }
    return from.done() && key.is_whole(ipc.size()) ? Result<CudaKey>(key) : malformed();
  }

  /// Returns what the deed has.
  std::string deed_blob() const {
    CudaKey key = *this;
    key.deed = 0;
    return key.blob();
  }
  FdOffer deed_offer() const { return {deed, 0, deed_blob().size(), Access::kRead}; }

  /// Returns the bytes of all parts.
  uint64_t span() const {
    uint64_t sum = 0;
    for (const FdOffer& part : parts) sum += part.bytes;
    return sum;
  }

  bool in_parts() const { return kind == Kind::kAllocations || kind == Kind::kFabric; }

 private:
  static constexpr uint32_t kLastKind = static_cast<uint32_t>(Kind::kFabric);

  static Status malformed() { return Status::AccessDenied("not a key of a cuda region"); }

  bool is_whole(size_t ipc_bytes) const {
    if (bytes == 0 || offset > UINT64_MAX - bytes) return false;
    if (kind == Kind::kIpc) return ipc_bytes == sizeof ipc.bytes && parts.empty();
    for (const FdOffer& part : parts) {
      if (part.bytes > UINT64_MAX / kMaxCudaParts) return false;  // span() must not wrap
    }
    if (kind == Kind::kHost) return parts.size() == 1 && parts.front().bytes == bytes && offset == 0;
    return offset + bytes <= span();
  }
};

}  // namespace kvlink

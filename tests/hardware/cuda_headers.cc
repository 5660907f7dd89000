// SPDX-License-Identifier: Apache-2.0
// Compares csrc/device/cuda_api.h with NVIDIA's cuda.h. test_kernels.py appends a line for each function and each
// constant, and compiles this without linking it.
#include <cuda.h>

#include <cstddef>
#include <tuple>
#include <type_traits>

#include "device/cuda_api.h"

namespace kvlink::cuda {

/// Whether both are passed to a function in the same way: as integers, pointers or structures of the same size.
template <typename Ours, typename Theirs>
constexpr bool alike = sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs) &&
                       std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
                       std::is_class_v<Ours> == std::is_class_v<Theirs>;
/// Also compares the sizes behind two pointers, unless one is void or unknown.
template <typename Ours, typename Theirs>
constexpr bool point_alike = alike<Ours, Theirs>;
template <typename Ours, typename Theirs>
  requires requires {
    sizeof(std::remove_pointer_t<Ours>);
    sizeof(std::remove_pointer_t<Theirs>);
  } && (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs> && !std::is_void_v<std::remove_pointer_t<Ours>> &&
        !std::is_void_v<std::remove_pointer_t<Theirs>>)
constexpr bool point_alike<Ours, Theirs> = alike<std::remove_pointer_t<Ours>, std::remove_pointer_t<Theirs>>;

template <typename Ours, typename Theirs>
constexpr bool same_call = false;
template <typename... Ours, typename... Theirs>
constexpr bool same_call<int (*)(Ours...), CUresult (*)(Theirs...)> = [] {
  if constexpr (sizeof...(Ours) != sizeof...(Theirs)) return false;
  else return (point_alike<Ours, Theirs> && ...);
}();

static_assert(sizeof(CUresult) == sizeof(int));
#define KVLINK_FUNCTION(member, symbol) \
  static_assert(same_call<decltype(Api::member), decltype(&::symbol)>, #symbol);
#define KVLINK_CONSTANT(ours, theirs) static_assert(static_cast<long long>(ours) == (theirs), #theirs);
#define KVLINK_FIELD(ours, field, theirs, name) \
  static_assert(offsetof(ours, field) == offsetof(theirs, name) && \
                sizeof(std::declval<ours>().field) == sizeof(std::declval<theirs>().name), #theirs "." #name);
#define KVLINK_STRUCT(ours, theirs) static_assert(alike<ours, theirs>, #theirs);

KVLINK_STRUCT(Uuid, CUuuid)
KVLINK_STRUCT(IpcHandle, CUipcMemHandle)
KVLINK_STRUCT(Address, CUdeviceptr)
KVLINK_STRUCT(Allocation, CUmemGenericAllocationHandle)
KVLINK_STRUCT(Location, CUmemLocation)
KVLINK_FIELD(Location, type, CUmemLocation, type)
KVLINK_FIELD(Location, id, CUmemLocation, id)
KVLINK_STRUCT(AccessDescription, CUmemAccessDesc)
KVLINK_FIELD(AccessDescription, location, CUmemAccessDesc, location)
KVLINK_FIELD(AccessDescription, flags, CUmemAccessDesc, flags)
KVLINK_STRUCT(AllocationProperties, CUmemAllocationProp)
KVLINK_FIELD(AllocationProperties, type, CUmemAllocationProp, type)
KVLINK_FIELD(AllocationProperties, handle_types, CUmemAllocationProp, requestedHandleTypes)
KVLINK_FIELD(AllocationProperties, location, CUmemAllocationProp, location)
KVLINK_FIELD(AllocationProperties, win32, CUmemAllocationProp, win32HandleMetaData)
KVLINK_FIELD(AllocationProperties, compression, CUmemAllocationProp, allocFlags.compressionType)
KVLINK_FIELD(AllocationProperties, rdma_capable, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable)
KVLINK_FIELD(AllocationProperties, usage, CUmemAllocationProp, allocFlags.usage)
KVLINK_FIELD(AllocationProperties, reserved, CUmemAllocationProp, allocFlags.reserved)
#if CUDA_VERSION >= 13000
KVLINK_FUNCTION(copy_batch, cuMemcpyBatchAsync_v2)
KVLINK_STRUCT(CopyAttributes, CUmemcpyAttributes)
KVLINK_FIELD(CopyAttributes, order, CUmemcpyAttributes, srcAccessOrder)
KVLINK_FIELD(CopyAttributes, from_hint, CUmemcpyAttributes, srcLocHint)
KVLINK_FIELD(CopyAttributes, to_hint, CUmemcpyAttributes, dstLocHint)
KVLINK_FIELD(CopyAttributes, flags, CUmemcpyAttributes, flags)
#endif

}  // namespace kvlink::cuda

using namespace kvlink::cuda;  // NOLINT: the lines below

// SPDX-License-Identifier: Apache-2.0
// The part of libcuda that copies and sharing need, loaded at run time. Signatures and numbers are those of
// cuda.h 13.0; names with a version in them have been current since CUDA 11.4.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace kvlink::cuda {

using Context = struct CUctx_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using Address = unsigned long long;
using Allocation = unsigned long long;  // a handle of physical memory

inline constexpr int kSuccess = 0;
inline constexpr int kNotReady = 600;           // CUDA_ERROR_NOT_READY
inline constexpr int kNotSupported = 801;       // CUDA_ERROR_NOT_SUPPORTED
inline constexpr int kPosixFd = 1;              // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr int kOnDevice = 1;             // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kPinnedAllocation = 1;     // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kReadOnly = 1;             // CU_MEM_ACCESS_FLAGS_PROT_READ
inline constexpr int kReadWrite = 3;            // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
inline constexpr int kRecommended = 1;          // CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
inline constexpr int kInStreamOrder = 1;        // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
inline constexpr int kRdmaWithVmm = 110;        // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
inline constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
inline constexpr int kDeviceOrdinal = 9;        // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
inline constexpr unsigned kPortable = 1;        // CU_MEMHOSTREGISTER_PORTABLE
inline constexpr unsigned kNonBlockingStream = 1;  // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kNoTiming = 2;           // CU_EVENT_DISABLE_TIMING

struct Uuid {
  char bytes[16];
  bool operator==(const Uuid&) const = default;
};
struct IpcHandle {
  char bytes[64];
};
struct Location {
  int type, id;
};
struct AccessDescription {
  Location location;
  int flags;
};
struct AllocationProperties {
  int type, handle_types;
  Location location;
  void* win32;
  unsigned char compression, rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
};
struct CopyAttributes {
  int order;
  Location from_hint, to_hint;
  unsigned flags;
};

/// Each returns a CUresult.
struct Api {
  int (*init)(unsigned flags);
  int (*get_error_name)(int error, const char** name);
  int (*pointer_get_attribute)(void* into, int attribute, Address pointer);
  int (*device_get)(int* device, int ordinal);
  int (*primary_context_retain)(Context* context, int device);
  int (*primary_context_release)(int device);
  int (*context_push)(Context context);
  int (*context_pop)(Context* context);
  int (*host_register)(void* host, size_t bytes, unsigned flags);
  int (*host_unregister)(void* host);
  int (*host_device_pointer)(Address* device, void* host, unsigned flags);
  int (*stream_create)(Stream* stream, unsigned flags);
  int (*stream_synchronize)(Stream stream);
  int (*stream_destroy)(Stream stream);
  int (*event_create)(Event* event, unsigned flags);
  int (*event_record)(Event event, Stream stream);
  int (*event_query)(Event event);
  int (*event_destroy)(Event event);
  int (*copy)(Address to, Address from, size_t bytes, Stream stream);

  int (*device_get_count)(int* count);
  int (*device_get_attribute)(int* value, int attribute, int device);
  int (*device_get_uuid)(Uuid* uuid, int device);
  int (*device_can_access_peer)(int* can, int device, int peer);

  int (*memory_alloc)(Address* memory, size_t bytes);
  int (*memory_free)(Address memory);
  int (*memory_set)(Address memory, unsigned char value, size_t bytes);
  int (*get_address_range)(Address* base, size_t* bytes, Address memory);
  int (*get_granularity)(size_t* bytes, const AllocationProperties* properties, int option);
  int (*allocation_create)(Allocation* allocation, size_t bytes, const AllocationProperties* properties,
                           unsigned long long flags);
  int (*allocation_retain)(Allocation* allocation, void* memory);
  int (*allocation_release)(Allocation allocation);
  int (*allocation_export)(void* fd, Allocation allocation, int type, unsigned long long flags);
  int (*allocation_import)(Allocation* allocation, void* fd, int type);
  int (*address_reserve)(Address* address, size_t bytes, size_t alignment, Address wanted,
                         unsigned long long flags);
  int (*address_free)(Address address, size_t bytes);
  int (*memory_map)(Address address, size_t bytes, size_t offset, Allocation allocation,
                    unsigned long long flags);
  int (*memory_unmap)(Address address, size_t bytes);
  int (*memory_set_access)(Address address, size_t bytes, const AccessDescription* access, size_t count);

  int (*ipc_get)(IpcHandle* handle, Address memory);
  int (*ipc_open)(Address* memory, IpcHandle handle, unsigned flags);
  int (*ipc_close)(Address memory);

  int (*module_load)(Module* module, const void* image);
  int (*module_unload)(Module module);
  int (*module_get_function)(Function* function, Module module, const char* name);
  int (*launch)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** arguments,
                void** extra);

  /// Null before CUDA 13.
  int (*copy_batch)(Address* to, Address* from, size_t* bytes, size_t count, CopyAttributes* attributes,
                    size_t* attribute_starts, size_t num_attributes, Stream stream);

  /// Returns kTransportUnavailable unless `result`, which `call` returned, is kSuccess.
  Status check(int result, const char* call) const;
};

/// Opens the driver's library once. Returns kTransportUnavailable and the fix if it is absent or too old.
Result<const Api*> library();
/// Also initialises it. From then on forked children cannot use it.
Result<const Api*> api();

}  // namespace kvlink::cuda

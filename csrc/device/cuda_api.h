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

inline constexpr int kSuccess = 0;              // CUDA_SUCCESS
inline constexpr int kNotReady = 600;           // CUDA_ERROR_NOT_READY
inline constexpr int kNotPermitted = 800;       // CUDA_ERROR_NOT_PERMITTED
inline constexpr int kNotSupported = 801;       // CUDA_ERROR_NOT_SUPPORTED
inline constexpr int kPosixFd = 1;              // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr int kFabric = 8;               // CU_MEM_HANDLE_TYPE_FABRIC
inline constexpr int kOnDevice = 1;             // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kPinnedAllocation = 1;     // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kReadOnly = 1;             // CU_MEM_ACCESS_FLAGS_PROT_READ
inline constexpr int kReadWrite = 3;            // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
inline constexpr int kRecommended = 1;          // CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
inline constexpr int kInStreamOrder = 1;        // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
inline constexpr int kCapabilityMajor = 75;     // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
inline constexpr int kCapabilityMinor = 76;     // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
inline constexpr int kMultiprocessors = 16;     // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
inline constexpr int kRdmaWithVmm = 110;        // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
inline constexpr int kFabricHandles = 128;      // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
inline constexpr int kRelaxedCapture = 2;       // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
inline constexpr int kMemoryType = 2;           // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
inline constexpr int kDeviceMemory = 2;         // CU_MEMORYTYPE_DEVICE
inline constexpr int kDeviceOrdinal = 9;        // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
inline constexpr int kBufferId = 7;             // CU_POINTER_ATTRIBUTE_BUFFER_ID
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
struct FabricHandle {
  unsigned char bytes[64];
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

/// F(member, symbol of libcuda, parameters). Each returns a CUresult.
// clang-format off
#define KVLINK_CUDA(F) \
  F(init, "cuInit", (unsigned flags)) \
  F(driver_get_version, "cuDriverGetVersion", (int* version)) \
  F(get_error_name, "cuGetErrorName", (int error, const char** name)) \
  F(pointer_get_attribute, "cuPointerGetAttribute", (void* into, int attribute, Address pointer)) \
  F(device_get, "cuDeviceGet", (int* device, int ordinal)) \
  F(primary_context_retain, "cuDevicePrimaryCtxRetain", (Context* context, int device)) \
  F(primary_context_release, "cuDevicePrimaryCtxRelease_v2", (int device)) \
  F(context_push, "cuCtxPushCurrent_v2", (Context context)) \
  F(context_pop, "cuCtxPopCurrent_v2", (Context* context)) \
  F(host_register, "cuMemHostRegister_v2", (void* host, size_t bytes, unsigned flags)) \
  F(host_unregister, "cuMemHostUnregister", (void* host)) \
  F(host_device_pointer, "cuMemHostGetDevicePointer_v2", (Address* device, void* host, unsigned flags)) \
  F(stream_priority_range, "cuCtxGetStreamPriorityRange", (int* least, int* greatest)) \
  F(stream_create, "cuStreamCreateWithPriority", (Stream* stream, unsigned flags, int priority)) \
  F(stream_synchronize, "cuStreamSynchronize", (Stream stream)) \
  F(stream_destroy, "cuStreamDestroy_v2", (Stream stream)) \
  F(event_create, "cuEventCreate", (Event* event, unsigned flags)) \
  F(event_record, "cuEventRecord", (Event event, Stream stream)) \
  F(event_query, "cuEventQuery", (Event event)) \
  F(event_destroy, "cuEventDestroy_v2", (Event event)) \
  F(copy, "cuMemcpyAsync", (Address to, Address from, size_t bytes, Stream stream)) \
  F(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int* mode)) \
  F(device_get_count, "cuDeviceGetCount", (int* count)) \
  F(device_get_attribute, "cuDeviceGetAttribute", (int* value, int attribute, int device)) \
  F(device_get_uuid, "cuDeviceGetUuid_v2", (Uuid* uuid, int device)) \
  F(device_can_access_peer, "cuDeviceCanAccessPeer", (int* can, int device, int peer)) \
  F(memory_alloc, "cuMemAlloc_v2", (Address* memory, size_t bytes)) \
  F(memory_free, "cuMemFree_v2", (Address memory)) \
  F(memory_set, "cuMemsetD8Async", (Address memory, unsigned char value, size_t bytes, Stream stream)) \
  F(get_address_range, "cuMemGetAddressRange_v2", (Address* base, size_t* bytes, Address memory)) \
  F(get_granularity, "cuMemGetAllocationGranularity", (size_t* bytes, const AllocationProperties* \
      properties, int option)) \
  F(allocation_create, "cuMemCreate", (Allocation* allocation, size_t bytes, const AllocationProperties* \
      properties, unsigned long long flags)) \
  F(allocation_retain, "cuMemRetainAllocationHandle", (Allocation* allocation, void* memory)) \
  F(allocation_release, "cuMemRelease", (Allocation allocation)) \
  F(allocation_properties, "cuMemGetAllocationPropertiesFromHandle", (AllocationProperties* properties, \
      Allocation allocation)) \
  F(allocation_export, "cuMemExportToShareableHandle", (void* handle, Allocation allocation, int type, \
      unsigned long long flags)) \
  F(allocation_import, "cuMemImportFromShareableHandle", (Allocation* allocation, void* handle, int type)) \
  F(address_reserve, "cuMemAddressReserve", (Address* address, size_t bytes, size_t alignment, Address \
      wanted, unsigned long long flags)) \
  F(address_free, "cuMemAddressFree", (Address address, size_t bytes)) \
  F(memory_map, "cuMemMap", (Address address, size_t bytes, size_t offset, Allocation allocation, unsigned \
      long long flags)) \
  F(memory_unmap, "cuMemUnmap", (Address address, size_t bytes)) \
  F(memory_set_access, "cuMemSetAccess", (Address address, size_t bytes, const AccessDescription* access, \
      size_t count)) \
  F(ipc_get, "cuIpcGetMemHandle", (IpcHandle* handle, Address memory)) \
  F(ipc_open, "cuIpcOpenMemHandle_v2", (Address* memory, IpcHandle handle, unsigned flags)) \
  F(ipc_close, "cuIpcCloseMemHandle", (Address memory)) \
  F(module_load, "cuModuleLoadData", (Module* module, const void* image)) \
  F(module_unload, "cuModuleUnload", (Module module)) \
  F(module_get_function, "cuModuleGetFunction", (Function* function, Module module, const char* name)) \
  F(launch, "cuLaunchKernel", (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, \
      unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** \
      arguments, void** extra))
// clang-format on

struct Api {
#define KVLINK_DECLARE(name, symbol, parameters) int(*name) parameters;
  KVLINK_CUDA(KVLINK_DECLARE)
#undef KVLINK_DECLARE

  /// The first is of CUDA 13, and the second of 12.8. Null before.
  int (*copy_batch)(Address* to, Address* from, size_t* bytes, size_t count, CopyAttributes* attributes,
                    size_t* attribute_starts, size_t num_attributes, Stream stream);
  int (*copy_batch_12)(Address* to, Address* from, size_t* bytes, size_t count, CopyAttributes* attributes,
                       size_t* attribute_starts, size_t num_attributes, size_t* failed, Stream stream);
  bool copies_batches() const { return copy_batch != nullptr || copy_batch_12 != nullptr; }

  /// Returns kTransportUnavailable unless `result`, which `call` returned, is kSuccess.
  Status check(int result, const char* call) const;
};

/// Opens the driver's library once. Returns kTransportUnavailable and the fix if it is absent or too old.
Result<const Api*> library();
/// Also initialises it. From then on forked children cannot use it.
Result<const Api*> api();

}  // namespace kvlink::cuda

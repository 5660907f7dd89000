// SPDX-License-Identifier: Apache-2.0
// The part of libcuda that copies take, as it is found at run time. Signatures and numbers are those of
// cuda.h 12.9; the names with a version in them have been the current ones since CUDA 11.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.h"

namespace kvlink::cuda {

using Context = struct CUctx_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;

inline constexpr int kSuccess = 0;
inline constexpr int kNotReady = 600;              // CUDA_ERROR_NOT_READY
inline constexpr int kDeviceOrdinal = 9;           // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
inline constexpr unsigned kPortable = 1;           // CU_MEMHOSTREGISTER_PORTABLE
inline constexpr unsigned kNonBlockingStream = 1;  // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kNoTiming = 2;           // CU_EVENT_DISABLE_TIMING

/// Each answers a CUresult.
struct Api {
  int (*init)(unsigned flags);
  int (*get_error_name)(int error, const char** name);
  int (*pointer_get_attribute)(void* into, int attribute, unsigned long long pointer);
  int (*device_get)(int* device, int ordinal);
  int (*primary_context_retain)(Context* context, int device);
  int (*primary_context_release)(int device);
  int (*context_push)(Context context);
  int (*context_pop)(Context* context);
  int (*host_register)(void* host, size_t bytes, unsigned flags);
  int (*host_unregister)(void* host);
  int (*stream_create)(Stream* stream, unsigned flags);
  int (*stream_synchronize)(Stream stream);
  int (*stream_destroy)(Stream stream);
  int (*event_create)(Event* event, unsigned flags);
  int (*event_record)(Event event, Stream stream);
  int (*event_query)(Event event);
  int (*event_destroy)(Event event);
  int (*copy_to_device)(unsigned long long device, const void* host, size_t bytes, Stream stream);
  int (*copy_to_host)(void* host, unsigned long long device, size_t bytes, Stream stream);

  /// kTransportUnavailable unless `result` is kSuccess; `call` is what answered it.
  Status check(int result, const char* call) const;
};

/// Opens and initialises the driver once. kTransportUnavailable, with what fixes it, when it is absent.
Result<const Api*> api();

}  // namespace kvlink::cuda

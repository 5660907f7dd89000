// SPDX-License-Identifier: Apache-2.0
// A libcuda.so.1 for machines without a GPU: the calls that csrc/device/cuda_api.h loads, over host memory,
// with the driver's rules. Device memory is host memory whose address has kDeviceBit: no CPU can follow it.
// Copies are made by the stream's thread, late; they need a current context and, at the host's end,
// registered memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

struct CUstream_st;

namespace fake {

inline constexpr uint64_t kDeviceBit = uint64_t{1} << 60;
inline constexpr int kMultiprocessors = 108;  // of each GPU, as an A100 has
enum Error {
  kSuccess = 0,
  kInvalidValue = 1,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kPeerAccessUnsupported = 217,
  kNotReady = 600,
  kNotPermitted = 800,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901
};

/// Contexts, streams, events, registrations, allocations and mappings.
extern std::atomic<int> live;
/// Tasks of streams that have not ended.
extern std::atomic<int> unfinished;

/// kSuccess when the driver is initialised and a context current.
int ready();
/// The same for calls that may wait for the device, which a capture forbids: kCaptureUnsupported, and the
/// capture is broken. breaks_capture() is for those that need no context.
int may_wait();
int breaks_capture();

/// The machine's number of the GPU that this process numbers `ordinal`, and the other way round. -1: not
/// visible.
int gpu_at(int ordinal);
int ordinal_of(int gpu);
/// The GPU of the current context. REQUIRES ready().
int current_gpu();
/// The GPU with the memory at this address; 0 for memory of nobody.
int gpu_of(uint64_t address);
/// A number of its own for each of cuMemAlloc's; 0 for memory that was mapped, or is not there.
unsigned long long id_of(uint64_t address);
/// Whether one GPU reaches the other's memory: not with FAKE_CUDA_NO_PEERS.
bool peers(int gpu, int other);

/// FAKE_CUDA_FABRIC: the GPUs are on a fabric. Its value "no-imex" leaves this process without a channel.
bool on_fabric();
bool has_channel();

/// Whether the device may follow the address: its own memory's, or one of registered host memory.
bool reaches(uint64_t address, size_t bytes);
/// As the driver's copies by unified addresses, on a stream.
int copy(uint64_t to, uint64_t from, size_t bytes, CUstream_st* stream);

inline void* behind(uint64_t device) { return reinterpret_cast<void*>(device & ~kDeviceBit); }
inline uint64_t on_device(void* memory) { return reinterpret_cast<uint64_t>(memory) | kDeviceBit; }

}  // namespace fake

/// Works off what it is given, in order; an idle one begins late.
struct CUstream_st {
  CUstream_st();
  ~CUstream_st();
  void push(std::function<void()> task);
  void synchronize();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ended_ = false;
  std::thread thread_;
};

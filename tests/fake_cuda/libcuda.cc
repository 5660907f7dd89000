// SPDX-License-Identifier: Apache-2.0
// Streams and events, and copies between host and device.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>

#include "fake.h"

namespace fake {

std::atomic<int> live{0};
std::atomic<int> unfinished{0};

namespace {

constexpr int kLeastPriority = 2;  // another number than of streams without a priority
std::atomic<int> copies{0};
std::mutex registered_mutex;
std::map<uintptr_t, size_t> registered;

bool is_registered(const void* host, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(host);
  std::lock_guard lock(registered_mutex);
  const auto after = registered.upper_bound(address);
  if (after == registered.begin()) return false;
  const auto& [base, size] = *std::prev(after);
  return address + bytes <= base + size;
}

/// FAKE_CUDA_HELD names a file. While it is there idle streams do not begin, and who waits for one writes to
/// it.
const char* held() {
  static const char* const file = std::getenv("FAKE_CUDA_HELD");
  return file != nullptr && ::access(file, F_OK) == 0 ? file : nullptr;
}

std::atomic<bool> held_by_test{false};

void begin_late() {
  do {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  } while (held() != nullptr || held_by_test);
}

}  // namespace

bool reaches(uint64_t address, size_t bytes) {
  return (address & kDeviceBit) || is_registered(behind(address), bytes);
}

int copy(uint64_t to, uint64_t from, size_t bytes, CUstream_st* stream) {
  if (const int error = ready()) return error;
  if (stream == nullptr || !reaches(to, bytes) || !reaches(from, bytes)) return kInvalidValue;
  stream->push([=] { std::memcpy(behind(to), behind(from), bytes); });
  return kSuccess;
}

}  // namespace fake

CUstream_st::CUstream_st() : thread_([this] { run(); }) { ++fake::live; }

CUstream_st::~CUstream_st() {
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  thread_.join();
  --fake::live;
}

void CUstream_st::push(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  ++fake::unfinished;
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

void CUstream_st::synchronize() {
  if (const char* file = fake::held()) std::fstream(file) << "awaited";
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return tasks_.empty(); });
}

void CUstream_st::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    const bool idle = tasks_.empty();
    changed_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const auto task = tasks_.front();
    lock.unlock();
    if (idle) fake::begin_late();
    task();
    --fake::unfinished;
    lock.lock();
    tasks_.pop_front();
    changed_.notify_all();
  }
}

struct CUevent_st {
  CUevent_st() { ++fake::live; }
  ~CUevent_st() { --fake::live; }
  std::atomic<bool> passed{true};
};

using namespace fake;  // NOLINT: the C functions below

#pragma GCC visibility push(default)
extern "C" {

/// Returns how many copies of one piece each there were.
int fake_cuda_copies() { return copies; }
/// As FAKE_CUDA_HELD does, for a test of the same process.
void fake_cuda_hold(int hold) { held_by_test = hold != 0; }
int fake_cuda_live() { return live; }
/// Returns how much work of streams has not ended.
int fake_cuda_unfinished() { return unfinished; }

int cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kPeerAccessUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED"},
      {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
      {kNotReady, "CUDA_ERROR_NOT_READY"}};
  const auto found = names.find(error);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : kSuccess;
}

int cuMemHostRegister_v2(void* host, size_t bytes, unsigned flags) {
  if (const int error = may_wait()) return error;
  if (flags != 1 || reinterpret_cast<uintptr_t>(host) % 4096 != 0) return kInvalidValue;
  std::lock_guard lock(registered_mutex);
  registered[reinterpret_cast<uintptr_t>(host)] = bytes;
  ++live;
  return kSuccess;
}

int cuMemHostUnregister(void* host) {
  if (const int error = may_wait()) return error;
  std::lock_guard lock(registered_mutex);
  if (registered.erase(reinterpret_cast<uintptr_t>(host)) == 0) return kInvalidValue;
  --live;
  return kSuccess;
}

int cuMemHostGetDevicePointer_v2(unsigned long long* device, void* host, unsigned flags) {
  *device = reinterpret_cast<uintptr_t>(host);
  return flags == 0 && reaches(*device, 1) ? kSuccess : kInvalidValue;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = kLeastPriority;
  *greatest = kLeastPriority - 5;
  return ready();
}

/// Takes the lowest priority alone: the engine's kernels go first.
int cuStreamCreateWithPriority(CUstream_st** stream, unsigned flags, int priority) {
  if (const int error = may_wait()) return error;
  if (flags != 1 || priority != kLeastPriority) return kInvalidValue;
  *stream = new CUstream_st;
  return kSuccess;
}

int cuStreamSynchronize(CUstream_st* stream) {
  if (const int error = may_wait()) return error;
  stream->synchronize();
  return kSuccess;
}

int cuStreamDestroy_v2(CUstream_st* stream) {
  if (const int error = breaks_capture()) return error;
  delete stream;
  return kSuccess;
}

int cuEventCreate(CUevent_st** event, unsigned flags) {
  if (const int error = may_wait()) return error;
  if (flags != 2) return kInvalidValue;
  *event = new CUevent_st;
  return kSuccess;
}

int cuEventRecord(CUevent_st* event, CUstream_st* stream) {
  if (const int error = ready()) return error;
  event->passed = false;
  stream->push([event] { event->passed = true; });
  return kSuccess;
}

int cuEventQuery(CUevent_st* event) {
  if (const int error = breaks_capture()) return error;
  return event->passed ? kSuccess : kNotReady;
}

int cuEventDestroy_v2(CUevent_st* event) {
  if (const int error = breaks_capture()) return error;
  delete event;
  return kSuccess;
}

int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, CUstream_st* stream) {
  ++copies;
  return copy(to, from, bytes, stream);
}

}  // extern "C"
#pragma GCC visibility pop

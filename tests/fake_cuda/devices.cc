// SPDX-License-Identifier: Apache-2.0
// The machine's GPUs, which of them this process sees, and the contexts on them.
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "fake.h"

namespace fake {
namespace {

std::atomic<bool> initialized{false};
std::array<char, 64> contexts_of;  // an address for each GPU of the machine
thread_local std::vector<void*> contexts;

/// FAKE_CUDA_GPUS is the number of the machine's GPUs. CUDA_VISIBLE_DEVICES hides those that it does not
/// name, and all behind the first that there is not.
std::vector<int> visible() {
  const char* const number = std::getenv("FAKE_CUDA_GPUS");
  const int all = number != nullptr ? std::atoi(number) : 1;
  std::vector<int> seen;
  const char* const named = std::getenv("CUDA_VISIBLE_DEVICES");
  if (named == nullptr) {
    seen.resize(static_cast<size_t>(all));
    std::iota(seen.begin(), seen.end(), 0);
    return seen;
  }
  std::istringstream list(named);
  for (std::string one; std::getline(list, one, ',');) {
    int gpu = -1;
    std::from_chars(one.data(), one.data() + one.size(), gpu);
    if (gpu < 0 || gpu >= all) break;
    seen.push_back(gpu);
  }
  return seen;
}

}  // namespace

int ready() {
  if (!initialized) return kNotInitialized;
  return contexts.empty() ? kInvalidContext : kSuccess;
}

int gpu_at(int ordinal) {
  const std::vector<int> seen = visible();
  return ordinal >= 0 && static_cast<size_t>(ordinal) < seen.size() ? seen[static_cast<size_t>(ordinal)] : -1;
}

int ordinal_of(int gpu) {
  const std::vector<int> seen = visible();
  for (size_t ordinal = 0; ordinal < seen.size(); ++ordinal) {
    if (seen[ordinal] == gpu) return static_cast<int>(ordinal);
  }
  return -1;
}

int current_gpu() { return static_cast<int>(static_cast<char*>(contexts.back()) - contexts_of.data()); }

bool on_fabric() { return std::getenv("FAKE_CUDA_FABRIC") != nullptr; }
bool has_channel() { return on_fabric() && std::string(std::getenv("FAKE_CUDA_FABRIC")) != "no-imex"; }

bool peers(int gpu, int other) { return gpu == other || std::getenv("FAKE_CUDA_NO_PEERS") == nullptr; }

}  // namespace fake

using namespace fake;  // NOLINT: the C functions below

#pragma GCC visibility push(default)
extern "C" {

int fake_cuda_contexts() { return static_cast<int>(contexts.size()); }

int cuInit(unsigned flags) {
  initialized = flags == 0;
  return flags == 0 ? kSuccess : kInvalidValue;
}

int cuPointerGetAttribute(void* into, int attribute, unsigned long long pointer) {
  if (!initialized) return kNotInitialized;
  if ((attribute != 9 && attribute != 7 && attribute != 2) || !(pointer & kDeviceBit)) return kInvalidValue;
  if (attribute == 2) {
    *static_cast<int*>(into) = 2;  // memory of a device
    return kSuccess;
  }
  if (attribute == 7) {
    *static_cast<unsigned long long*>(into) = id_of(pointer);
    return kSuccess;
  }
  const int ordinal = ordinal_of(gpu_of(pointer));
  *static_cast<int*>(into) = ordinal;
  return ordinal >= 0 ? kSuccess : kInvalidValue;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return gpu_at(ordinal) >= 0 ? kSuccess : kInvalidDevice;
}

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(visible().size());
  return kSuccess;
}

int cuDeviceGetUuid_v2(char* uuid, int device) {
  std::memset(uuid, 7, 16);
  uuid[15] = static_cast<char>(gpu_at(device));
  return gpu_at(device) >= 0 ? kSuccess : kInvalidDevice;
}

/// The GPU is like an H100: capability 9.0.
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const std::map<int, int> values = {{16, kMultiprocessors}, {75, 9}, {110, 1}, {128, on_fabric() ? 1 : 0}};
  const auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return gpu_at(device) >= 0 ? kSuccess : kInvalidDevice;
}

int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = peers(gpu_at(device), gpu_at(peer)) ? 1 : 0;
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (const int error = breaks_capture()) return error;
  const int gpu = gpu_at(device);
  if (gpu < 0) return kInvalidDevice;
  *context = &contexts_of[static_cast<size_t>(gpu)];
  ++live;
  return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  if (const int error = breaks_capture()) return error;
  --live;
  return gpu_at(device) >= 0 ? kSuccess : kInvalidDevice;
}

int cuCtxPushCurrent_v2(void* context) {
  if (context < contexts_of.data() || context >= contexts_of.data() + contexts_of.size()) {
    return kInvalidContext;
  }
  contexts.push_back(context);
  return kSuccess;
}

int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

}  // extern "C"
#pragma GCC visibility pop

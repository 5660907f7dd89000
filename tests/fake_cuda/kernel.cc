// SPDX-License-Identifier: Apache-2.0
// kvlink's kernel itself, run on the CPU: every thread of a grid after the other.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fake.h"

namespace {

struct Coordinate {
  unsigned x = 0, y = 0, z = 0;
};
thread_local Coordinate gridDim, blockDim, blockIdx, threadIdx;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

template <typename Word>
const Word* on_host(const Word* at) {
  return static_cast<const Word*>(fake::behind(reinterpret_cast<uint64_t>(at)));
}
template <typename Word>
Word __ldcs(const Word* at) {
  return *on_host(at);
}
template <typename Word>
Word __ldg(const Word* at) {
  return *on_host(at);
}
template <typename Word>
void __stcs(Word* at, Word value) {
  *const_cast<Word*>(on_host(at)) = value;
}

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#include "../../kvlink/hardware/kernels/gather.cu"

/// Ends the process where a GPU would find no memory.
void check(const Launch& launch) {
  const unsigned long long* const words = launch.table != nullptr ? on_host(launch.table) : launch.words;
  const unsigned long long* const repeats = words + launch.num_pieces * kPieceWords;
  for (unsigned turn = 0; turn <= launch.num_repeats; ++turn) {
    for (unsigned piece = 0; piece < launch.num_pieces; ++piece) {
      const unsigned long long* const it = words + piece * kPieceWords;
      const bool moved = turn > 0;
      const uint64_t from = it[0] + (moved ? repeats[(turn - 1) * kRepeatWords] : 0);
      const uint64_t to = it[1] + (moved ? repeats[(turn - 1) * kRepeatWords + 1] : 0);
      if (!fake::reaches(from, it[2]) || !fake::reaches(to, it[2])) std::abort();
    }
  }
}

void run(const Launch& launch, unsigned blocks, unsigned threads) {
  check(launch);
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kvlink_gather(launch);
  }
}

std::atomic<int> modules{0}, launches{0}, most_blocks{0};

}  // namespace

using namespace fake;  // NOLINT: the C functions below

#pragma GCC visibility push(default)
extern "C" {

/// Returns how many launches there were.
int fake_cuda_launches() { return launches; }
/// Returns the most blocks of a launch since the last call.
int fake_cuda_most_blocks() { return most_blocks.exchange(0); }

/// Returns how many images were loaded so far.
int fake_cuda_modules() { return modules; }

/// Takes cubins, by the machine of their ELF header, and "fake image".
int cuModuleLoadData(void** module, const char* image) {
  if (const int error = may_wait()) return error;
  const bool cubin = std::strncmp(image,
                                  "\x7f"
                                  "ELF",
                                  4) == 0 &&
                     static_cast<unsigned char>(image[18]) == 190;
  if (!cubin && std::strcmp(image, "fake image") != 0) return kInvalidImage;
  *module = new char;
  ++modules;
  ++live;
  return kSuccess;
}

int cuModuleUnload(void* module) {
  if (const int error = breaks_capture()) return error;
  delete static_cast<char*>(module);
  --live;
  return kSuccess;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = module;
  return std::strcmp(name, "kvlink_gather") == 0 ? kSuccess : kInvalidValue;
}

int cuLaunchKernel(void*, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned, CUstream_st* stream, void** arguments,
                   void** extra) {
  if (const int error = ready()) return error;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 128 || block_y != 1 ||
      block_z != 1 || stream == nullptr || extra != nullptr) {
    return kInvalidValue;
  }
  Launch launch;
  std::memcpy(&launch, arguments[0], sizeof launch);
  if (launch.lanes == 0 || block_x % launch.lanes != 0) return kInvalidValue;
  ++launches;
  most_blocks = std::max(most_blocks.load(), static_cast<int>(grid_x));
  stream->push([=] { run(launch, grid_x, block_x); });
  return kSuccess;
}

}  // extern "C"
#pragma GCC visibility pop

// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines.h"

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "device/cuda_device.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvlink {
namespace {

std::byte* address(uint64_t value) { return reinterpret_cast<std::byte*>(value); }

constexpr uint64_t kShareBytes = 4096;  // shares end at multiples of it within a piece

std::vector<std::vector<BaselinePiece>> shares_of(BaselinePieces pieces, size_t count) {
  uint64_t total = 0;
  for (const BaselinePiece& piece : pieces) total += piece.bytes;
  const uint64_t each = std::max((total / count + kShareBytes - 1) / kShareBytes, uint64_t{1}) * kShareBytes;
  std::vector<std::vector<BaselinePiece>> shares(1);
  uint64_t room = each;
  for (const BaselinePiece& piece : pieces) {
    for (uint64_t at = 0; at < piece.bytes;) {
      if (room == 0 && shares.size() < count) {
        shares.emplace_back();
        room = each;
      }
      const uint64_t bytes = room == 0 ? piece.bytes - at : std::min(piece.bytes - at, room);
      shares.back().push_back({piece.from + at, piece.to + at, bytes});
      at += bytes;
      room -= std::min(room, bytes);
    }
  }
  return shares;
}

void copy(const BaselinePiece& piece) { std::memcpy(address(piece.to), address(piece.from), piece.bytes); }

#if defined(__x86_64__)

constexpr size_t kLineBytes = 64;
constexpr size_t kPageBytes = 4096;
constexpr size_t kPagesInTurns = 8;  // more keep the memory no busier, fewer leave it waiting
constexpr size_t kTurnBytes = 512;

/// Whole lines of at most a page each, and the rests of the pieces before and after them.
struct Cut {
  std::vector<BaselinePiece> pages, odds;
};

void keep(std::vector<BaselinePiece>& kept, const BaselinePiece& piece, uint64_t at, uint64_t bytes) {
  if (bytes > 0) kept.push_back({piece.from + at, piece.to + at, bytes});
}

Cut cut(BaselinePieces pieces) {
  Cut cut;
  for (const BaselinePiece& piece : pieces) {
    const uint64_t head = std::min(piece.bytes, -piece.to % kLineBytes);
    const uint64_t tail = (piece.bytes - head) % kLineBytes;
    const uint64_t end = piece.bytes - tail;
    keep(cut.odds, piece, 0, head);
    for (uint64_t at = head; at < end; at += kPageBytes)
      keep(cut.pages, piece, at, std::min(end - at, kPageBytes));
    keep(cut.odds, piece, end, tail);
  }
  return cut;
}

__attribute__((target("avx2"), always_inline)) inline void stream_lines(const BaselinePiece& page, size_t at,
                                                                        size_t end) {
#pragma GCC unroll 4
  for (; at < end; at += kLineBytes) {
    const auto* const from = reinterpret_cast<const __m256i*>(page.from + at);
    auto* const to = reinterpret_cast<__m256i*>(page.to + at);
    const __m256i low = _mm256_loadu_si256(from);
    const __m256i high = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, low);
    _mm256_stream_si256(to + 1, high);
  }
}

__attribute__((target("avx2"))) void stream_in_turns(BaselinePieces pages) {
  uint64_t common = kPageBytes;
  for (const BaselinePiece& page : pages) {
    __builtin_prefetch(address(page.from));
    __builtin_prefetch(address(page.from + kLineBytes));
    common = std::min(common, page.bytes - page.bytes % kTurnBytes);
  }
  for (size_t at = 0; at < common; at += kTurnBytes) {
    for (const BaselinePiece& page : pages) stream_lines(page, at, at + kTurnBytes);
  }
  for (const BaselinePiece& page : pages) stream_lines(page, common, page.bytes);
}

int64_t stream(BaselinePieces pieces) {
  const Cut work = cut(pieces);
  const BaselinePieces pages = work.pages;
  const int64_t start = now_ns();
  for (size_t first = 0; first < pages.size(); first += kPagesInTurns) {
    stream_in_turns(pages.subspan(first, std::min(kPagesInTurns, pages.size() - first)));
  }
  for (const BaselinePiece& odd : work.odds) copy(odd);
  _mm_sfence();
  return now_ns() - start;
}

#endif

}  // namespace

Result<int64_t> baseline_at_once(BaselinePieces pieces, size_t threads,
                                 const std::function<Result<int64_t>(size_t, BaselinePieces)>& move) {
  if (threads <= 1) return move(0, pieces);
  const auto shares = shares_of(pieces, threads);
  std::atomic<size_t> here = 0;
  std::vector<Result<int64_t>> took(shares.size(), int64_t{0});
  std::vector<int64_t> ends(shares.size());
  const auto run = [&](size_t number) {
    ++here;
    while (here < shares.size()) std::this_thread::yield();
    took[number] = move(number, shares[number]);
    ends[number] = now_ns();
  };
  std::vector<std::thread> others;
  for (size_t number = 1; number < shares.size(); ++number) others.emplace_back(run, number);
  run(0);
  for (std::thread& other : others) other.join();
  int64_t first = INT64_MAX, last = 0;
  for (size_t number = 0; number < shares.size(); ++number) {
    if (!took[number].ok()) return took[number].status();
    first = std::min(first, ends[number] - *took[number]);
    last = std::max(last, ends[number]);
  }
  return last - first;
}

int64_t baseline_memcpy(BaselinePieces pieces) {
  const int64_t start = now_ns();
  for (const BaselinePiece& piece : pieces) copy(piece);
  return now_ns() - start;
}

int64_t baseline_streamed_copy(BaselinePieces pieces) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return stream(pieces);
#endif
  return baseline_memcpy(pieces);
}

Result<int64_t> baseline_process_vm_readv(int pid, BaselinePieces pieces) {
  std::vector<iovec> local, remote;
  for (const BaselinePiece& piece : pieces) {
    local.push_back({address(piece.to), piece.bytes});
    remote.push_back({address(piece.from), piece.bytes});
  }
  uint64_t missing = 0;
  for (const BaselinePiece& piece : pieces) missing += piece.bytes;
  const int64_t start = now_ns();
  for (size_t first = 0; first < local.size(); first += size_t{IOV_MAX}) {
    const size_t count = std::min(size_t{IOV_MAX}, local.size() - first);
    const ssize_t got = ::process_vm_readv(pid, &local[first], count, &remote[first], count, 0);
    if (got < 0)
      return Status::Unreachable(std::string("the bare process_vm_readv: ") + std::strerror(errno));
    missing -= static_cast<uint64_t>(got);
  }
  const int64_t took = now_ns() - start;
  if (missing > 0) return Status::AccessDenied("the bare process_vm_readv copied less than it was asked for");
  return took;
}

Result<int64_t> baseline_cuda_copies(BaselinePieces pieces) {
  if (pieces.empty()) return Status::Config("there is nothing to copy");
  using cuda::Device;
  Result<std::shared_ptr<const Device>> device = Device::of(address(pieces.front().to));
  if (!device.ok()) device = Device::of(address(pieces.front().from));
  if (!device.ok()) return device.status();
  const cuda::Api& api = (*device)->api;
  Result<std::unique_ptr<cuda::MarkedStream>> stream = cuda::MarkedStream::open(*device);
  if (!stream.ok()) return stream.status();
  const cuda::Current current(**device);
  if (!current.status().ok()) return current.status();
  const int64_t start = now_ns();
  for (const BaselinePiece& piece : pieces) {
    const int result = api.copy(piece.to, piece.from, piece.bytes, (*stream)->get());
    if (Status status = api.check(result, "cuMemcpyAsync"); !status.ok()) return status;
  }
  const int ended = api.stream_synchronize((*stream)->get());
  if (Status status = api.check(ended, "cuStreamSynchronize"); !status.ok()) return status;
  return now_ns() - start;
}

}  // namespace kvlink

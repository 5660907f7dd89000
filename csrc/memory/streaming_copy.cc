// SPDX-License-Identifier: Apache-2.0
#include "memory/streaming_copy.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "base/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The other process may be writing what is copied here; ThreadSanitizer must not check it.
#define KVLINK_RACY __attribute__((no_sanitize("thread")))

namespace kvlink {
namespace {

using Pieces = std::span<const StreamCopy::Piece>;

constexpr size_t kPageBytes = 4096;  // hardware prefetchers stop at it
constexpr size_t kLineBytes = 64;
constexpr size_t kPiecesInTurns = 8;  // more keep the memory no busier, fewer leave it waiting
constexpr size_t kTurnBytes = 512;    // of one piece before it is the next one's turn

// Smaller pieces are copied into the cache, and those with a part of a line at either end, for which the
// whole line must be loaded. 1,024 random pieces on EPYC, past the cache -> into it, us: 136 bytes 113 -> 61,
// 264 127 -> 76, 1,160 279 -> 271; 576 (whole lines) 82 -> 107.
constexpr size_t kLeastLines = 512, kLeastUneven = 2048;

bool is_streamed(const StreamCopy::Piece& piece) {
  const bool even = (reinterpret_cast<uintptr_t>(piece.to) | piece.bytes) % kLineBytes == 0;
  return piece.bytes >= (even ? kLeastLines : kLeastUneven);
}

// GCC removes calls of a function that only prefetches.
[[gnu::always_inline]] inline void fetch(const StreamCopy::Piece& piece) {
  for (size_t at = 0; at < std::min(piece.bytes, kLeastLines); at += kLineBytes) {
    __builtin_prefetch(piece.from + at);
    __builtin_prefetch(piece.to + at, 1);
  }
}

void copy_cached(Pieces pieces) {
  for (const auto& piece : pieces) copy_bytes(piece.to, piece.from, piece.bytes);
}

#if defined(__x86_64__)

__attribute__((target("avx2"), always_inline)) KVLINK_RACY inline void stream(std::byte* to,
                                                                              const std::byte* from,
                                                                              size_t bytes) {
#pragma GCC unroll 4
  for (size_t at = 0; at < bytes; at += kLineBytes) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + 32), high);
  }
}

// REQUIRES every `to` to be aligned to a cache line.
__attribute__((target("avx2"))) KVLINK_RACY void copy_in_turns(Pieces pieces) {
  size_t common = kPageBytes;
  for (const auto& piece : pieces) {
    __builtin_prefetch(piece.from);
    __builtin_prefetch(piece.from + kLineBytes);
    common = std::min(common, piece.bytes - piece.bytes % kTurnBytes);
  }
  for (size_t at = 0; at < common; at += kTurnBytes) {
    for (const auto& piece : pieces) stream(piece.to + at, piece.from + at, kTurnBytes);
  }
  for (const auto& piece : pieces) {
    const size_t lines_end = piece.bytes - piece.bytes % kLineBytes;
    for (size_t at = common; at < lines_end; at += kLineBytes) {
      stream(piece.to + at, piece.from + at, kLineBytes);
    }
    copy_bytes(piece.to + lines_end, piece.from + lines_end, piece.bytes - lines_end);
  }
}

void copy_streamed(Pieces pieces) {
  for (size_t first = 0; first < pieces.size(); first += kPiecesInTurns) {
    copy_in_turns(pieces.subspan(first, std::min(kPiecesInTurns, pieces.size() - first)));
  }
}

const auto copy_pieces = __builtin_cpu_supports("avx2") ? copy_streamed : copy_cached;

void store_fence() { _mm_sfence(); }

#else

constexpr auto copy_pieces = copy_cached;
void store_fence() {}

#endif

}  // namespace

void StreamCopy::add(std::byte* to, const std::byte* from, size_t bytes) {
  if (!is_streamed({to, from, bytes})) return copy_later({to, from, bytes});
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLineBytes);
  copy_bytes(to, from, head);
  for (size_t at = head; at < bytes;) {
    const size_t size = std::min(bytes - at, kPageBytes);
    pieces_[num_pieces_++] = {to + at, from + at, size};
    if (num_pieces_ == pieces_.size()) flush();
    at += size;
  }
}

void StreamCopy::flush() {
  copy_pieces({pieces_.data(), num_pieces_});
  num_pieces_ = 0;
}

void StreamCopy::copy_later(const Piece& piece) {
  fetch(piece);
  Piece& oldest = later_[num_later_++ % later_.size()];
  copy_bytes(oldest.to, oldest.from, oldest.bytes);
  oldest = piece;
}

void StreamCopy::finish() {
  flush();
  copy_cached(later_);
  later_ = {};
  store_fence();
}

#if defined(__SANITIZE_THREAD__)

// ThreadSanitizer intercepts memcpy despite the attribute, and the volatile keeps the loop from becoming one.
KVLINK_RACY void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  const volatile std::byte* racing = from;
  for (size_t i = 0; i < bytes; ++i) to[i] = racing[i];
}

#else

void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

#endif

void load_fence() {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored \
    "-Wtsan"  // what the fence orders is racy copies, which it does not follow anyway
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
#pragma GCC diagnostic pop
}

void load_words(std::byte* to, const std::byte* from, size_t bytes) {
  KVLINK_DCHECK((reinterpret_cast<uintptr_t>(from) | bytes) % sizeof(uint64_t) == 0);
  load_fence();
  for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word = __atomic_load_n(reinterpret_cast<const uint64_t*>(from + at), __ATOMIC_ACQUIRE);
    std::memcpy(to + at, &word, sizeof word);
  }
}

void copy_shared(std::byte* to, const std::byte* from, uint32_t bytes) {
  is_words(reinterpret_cast<uint64_t>(from), bytes) ? load_words(to, from, bytes)
                                                    : copy_bytes(to, from, bytes);
}

void store_word(std::byte* to, uint64_t value) {
  KVLINK_DCHECK(reinterpret_cast<uintptr_t>(to) % sizeof value == 0);
  __atomic_store_n(reinterpret_cast<uint64_t*>(to), value, __ATOMIC_RELEASE);
}

}  // namespace kvlink

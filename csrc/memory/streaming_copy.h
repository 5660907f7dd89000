// SPDX-License-Identifier: Apache-2.0
// Copies between mappings that another process may be writing: a copy that raced is dropped by lease
// validation (docs/design/leases.md), so none of these is a data race that matters.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvlink {

/// Chunks of at least this many bytes are copied by StreamCopy, smaller ones into the cache. Measured on EPYC
/// (Zen 4, 2 MiB of L2): blocks at random, GiB/s: 4 KiB 7.2 -> 16.8, 16 KiB 8.3 -> 16.6, 64 KiB 13.0 -> 18.6;
/// 16 KiB alone 2.4 -> 1.5 us. Nothing is lost: a decode step streams its weights through the cache before it
/// comes to the blocks.
inline constexpr size_t kStreamBytes = 16 << 10;

/// Copies past the cache. Pieces are cut to pages and copied eight pages at a time in turns, which keeps the
/// memory busier than one page after the other; stores are non-temporal.
class StreamCopy {
 public:
  StreamCopy() = default;
  ~StreamCopy() { finish(); }
  StreamCopy(const StreamCopy&) = delete;
  StreamCopy& operator=(const StreamCopy&) = delete;

  /// The bytes are there only after finish().
  void add(std::byte* to, const std::byte* from, size_t bytes);
  /// Orders everything added before whatever the caller stores or loads next.
  void finish();

  struct Piece {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };

 private:
  void flush();

  // Collected first: a walk over operations between two turns costs 7 % of the copy.
  std::array<Piece, 256> pieces_;
  size_t num_pieces_ = 0;
};

/// A plain copy, into the cache.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes);

/// Orders every earlier load of this thread, and copies the kernel made for it, before its later ones.
void load_fence();
/// load_fence(), then loads words, each word whole.
/// REQUIRES `from` 8-byte aligned and `bytes` a multiple of 8.
void load_words(std::byte* to, const std::byte* from, size_t bytes);
inline constexpr uint32_t kMaxWordsBytes = 64;  // reads up to a lease slot are loaded word by word
inline bool is_words(uint64_t address, uint32_t bytes) {
  return bytes <= kMaxWordsBytes && (address | bytes) % sizeof(uint64_t) == 0;
}
/// load_words() where is_words(), else copy_bytes().
void copy_shared(std::byte* to, const std::byte* from, uint32_t bytes);
/// Stores a word whole, after every earlier load and store. REQUIRES `to` 8-byte aligned.
void store_word(std::byte* to, uint64_t value);

}  // namespace kvlink

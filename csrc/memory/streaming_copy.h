// SPDX-License-Identifier: Apache-2.0
// Copies between mappings that another process may be writing. Lease validation drops a copy that raced
// (docs/design/leases.md), so these data races are harmless.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvlink {

/// Chunks of at least this many bytes are copied by StreamCopy, smaller ones into the cache. Measured on EPYC
/// (Zen 4, 2 MiB of L2) with random blocks, GiB/s: 4 KiB 7.2 -> 16.8, 16 KiB 8.3 -> 16.6, 64 KiB 13.0 ->
/// 18.6; one block of 16 KiB 2.4 -> 1.5 us. A decode step would evict the blocks anyway: it streams its
/// weights through the cache before it reads them.
inline constexpr size_t kStreamBytes = 16 << 10;

/// Copies past the cache with non-temporal stores. Pieces are cut into pages, and eight pages are copied in
/// turns, which keeps the memory busier than one page after the other. A piece that is too small for this is
/// copied into the cache, and the lines of those after it are fetched meanwhile.
class StreamCopy {
 public:
  StreamCopy() = default;
  ~StreamCopy() { finish(); }
  StreamCopy(const StreamCopy&) = delete;
  StreamCopy& operator=(const StreamCopy&) = delete;

  /// The bytes are in place only after finish().
  void add(std::byte* to, const std::byte* from, size_t bytes);
  /// Orders everything added before any later store or load of the caller.
  void finish();

  struct Piece {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };

 private:
  void flush();
  void copy_later(const Piece& piece);

  static constexpr size_t kFetchedAhead = 8;
  std::array<Piece, kFetchedAhead> later_ = {};  // a ring; of no bytes where there is none
  size_t num_later_ = 0;
  // Collected first, because walking the operations between two turns costs 7 % of the copy.
  std::array<Piece, 256> pieces_;
  size_t num_pieces_ = 0;
};

/// Copies into the cache.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes);

/// Orders every earlier load of this thread, and copies that the kernel made for it, before its later ones.
void load_fence();
/// Calls load_fence(), then loads whole words. REQUIRES `from` to be 8-byte aligned and `bytes` to be a
/// multiple of 8.
void load_words(std::byte* to, const std::byte* from, size_t bytes);
inline constexpr uint32_t kMaxWordsBytes = 64;  // reads up to a lease slot are loaded word by word
inline bool is_words(uint64_t address, uint32_t bytes) {
  return bytes <= kMaxWordsBytes && (address | bytes) % sizeof(uint64_t) == 0;
}
/// Calls load_words() if is_words(), else copy_bytes().
void copy_shared(std::byte* to, const std::byte* from, uint32_t bytes);
/// Stores a whole word after every earlier load and store. REQUIRES `to` to be 8-byte aligned.
void store_word(std::byte* to, uint64_t value);

}  // namespace kvlink

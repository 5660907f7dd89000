// SPDX-License-Identifier: Apache-2.0
// Writes and reads the blobs of transport_api/transport.h (addresses, hellos, replies, keys): little-endian
// integers and length-prefixed strings. A reader never looks past its end. The first field that does not fit
// makes ok() false for good and every later field zero or empty, so a parser reads all fields and checks
// done() once.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace kvlink {

/// Returns whether a name from another process may appear in messages.
inline bool is_printable(std::string_view name) {
  return std::all_of(name.begin(), name.end(), [](char byte) { return byte > ' ' && byte <= '~'; });
}

static_assert(std::endian::native == std::endian::little, "blobs are written as the host stores integers");

class BlobWriter {
 public:
  BlobWriter& u32(uint32_t value) { return append(&value, sizeof value); }
  BlobWriter& u64(uint64_t value) { return append(&value, sizeof value); }
  BlobWriter& bytes(std::string_view value) {
    return u32(static_cast<uint32_t>(value.size())).append(value.data(), value.size());
  }
  template <size_t size>
  BlobWriter& bytes(const std::array<char, size>& value) {
    return bytes(std::string_view(value.data(), size));
  }
  std::string take() { return std::move(blob_); }

 private:
  BlobWriter& append(const void* from, size_t bytes) {
    blob_.append(static_cast<const char*>(from), bytes);
    return *this;
  }
  std::string blob_;
};

/// Borrows `blob`; so do the views that bytes() returns.
class BlobReader {
 public:
  explicit BlobReader(std::string_view blob) : rest_(blob) {}
  /// Also refuses a blob that does not begin with `magic`.
  BlobReader(std::string_view blob, uint32_t magic) : rest_(blob) { ok_ = u32() == magic && ok_; }

  uint32_t u32() { return integer<uint32_t>(); }
  uint64_t u64() { return integer<uint64_t>(); }
  /// Reads a length-prefixed string of at most `max_bytes`.
  std::string_view bytes(size_t max_bytes) {
    const uint32_t size = u32();
    if (size > max_bytes) ok_ = false;
    return take(size);
  }
  /// Reads several fields, in this order. A byte array takes a length-prefixed string of its own size.
  template <typename... Fields>
  BlobReader& fields(Fields&... into) {
    (field(into), ...);
    return *this;
  }
  bool ok() const { return ok_; }
  /// Returns whether every field so far was there and nothing is left over.
  bool done() const { return ok_ && rest_.empty(); }

 private:
  void field(uint32_t& into) { into = u32(); }
  void field(uint64_t& into) { into = u64(); }
  template <size_t size>
  void field(std::array<char, size>& into) {
    const std::string_view from = bytes(size);
    ok_ = ok_ && from.size() == size;
    if (ok_) std::memcpy(into.data(), from.data(), size);
  }

  template <typename T>
  T integer() {
    T value = 0;
    const std::string_view from = take(sizeof value);
    if (ok_) std::memcpy(&value, from.data(), sizeof value);
    return value;
  }
  std::string_view take(size_t bytes) {
    ok_ = ok_ && bytes <= rest_.size();
    if (!ok_) return {};
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }
  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace kvlink

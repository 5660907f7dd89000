// SPDX-License-Identifier: Apache-2.0
// How calls end, and how structures and bytes cross the interface.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/status.h"
#include "capi/kvlink.h"

namespace kvlink::capi {

static_assert(static_cast<int>(Code::kStaleBlocks) == KVL_STALE_BLOCKS);

/// A code of the interface. Most are those of a Status.
class [[nodiscard]] Outcome {
 public:
  Outcome() = default;
  Outcome(Status status) {  // NOLINT: implicit by design
    if (!status.ok()) *this = Outcome(static_cast<int32_t>(status.code()), std::move(status));
  }
  Outcome(kvl_code code, std::string what)
      : Outcome(static_cast<int32_t>(code), Status(Code::kConfig, std::move(what))) {}

  bool ok() const { return code_ == KVL_OK; }
  int32_t code() const { return code_; }
  Status status() const { return status_ ? *status_ : Status{}; }

 private:
  Outcome(int32_t code, Status status) : code_(code), status_(std::make_unique<Status>(std::move(status))) {}

  int32_t code_ = KVL_OK;
  std::unique_ptr<const Status> status_;  // null if there is nothing to say: a pull has a dozen of these
};

inline Outcome refuse(std::string what) { return Outcome(KVL_CONFIG, std::move(what)); }

/// No structure of any version is larger, so what a program calls a size is not followed beyond.
inline constexpr uint32_t kMostStructBytes = 64 << 10;

/// Copies a structure of the program, of whatever version, into that of this library.
template <typename T>
Outcome take_struct(const T* from, T& into, const char* name) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, size) == 0);
  if (!from) return refuse(std::string(name) + " is NULL");
  const uint32_t size = from->size;
  if (size < sizeof size || size > kMostStructBytes) {
    return refuse(std::string(name) + ".size is " + std::to_string(size) + "; set it to sizeof(" + name +
                  ")");
  }
  const char* const bytes = reinterpret_cast<const char*>(from);
  for (size_t at = sizeof(T); at < size; ++at) {
    if (bytes[at] != 0)
      return refuse(std::string(name) + " has fields that this version of kvlink does not know");
  }
  if (size >= sizeof into) {
    into = *from;  // of a fixed size: in a few instructions
  } else {
    into = {};
    std::memcpy(&into, bytes, size);
  }
  return {};
}

/// Copies what the program's version of a structure has room for. Its size stays.
template <typename T>
Outcome give_struct(T& from, T* into, const char* name) {
  if (!into) return refuse(std::string(name) + " is NULL");
  const uint32_t size = into->size;
  if (size < sizeof size || size > kMostStructBytes) {
    return refuse(std::string(name) + ".size is " + std::to_string(size) + "; set it to sizeof(" + name +
                  ")");
  }
  from.size = size;
  std::memcpy(into, &from, std::min<size_t>(size, sizeof from));
  return {};
}

/// Copies a text of the program, of at most `most` bytes. NULL is an empty one.
inline Outcome take_text(const char* from, std::string& into, const char* name, size_t most = 512) {
  if (!from) return {};
  const size_t bytes = ::strnlen(from, most + 1);
  if (bytes > most) return refuse(std::string(name) + " has more than " + std::to_string(most) + " bytes");
  into.assign(from, bytes);
  return {};
}

inline Outcome take_bytes(const void* from, uint64_t bytes, std::string_view& into, const char* name) {
  if (bytes > 0 && !from) return refuse(std::string(name) + " is NULL");
  if (bytes > uint64_t{64} << 20) return refuse(std::string(name) + " has more than 64 MiB");
  into = {static_cast<const char*>(from), bytes};
  return {};
}

/// Where a call returns bytes.
struct Space {
  void* out;
  uint64_t capacity;
  uint64_t* out_bytes;

  Outcome check() const {
    if (!out_bytes || (capacity > 0 && !out)) return refuse("out or out_bytes is NULL");
    return {};
  }
  /// KVL_BUFFER if there is too little space. REQUIRES check().
  Outcome give(std::string_view bytes) const {
    *out_bytes = bytes.size();
    if (bytes.size() > capacity) {
      return {KVL_BUFFER, "the bytes need space for " + std::to_string(bytes.size())};
    }
    if (!bytes.empty()) std::memcpy(out, bytes.data(), bytes.size());
    return {};
  }
};

/// Stores how a call ended where the program has asked for it.
void report(kvl_error* error, int32_t code, std::string_view what, std::string_view fix, StaleReason stale);

}  // namespace kvlink::capi

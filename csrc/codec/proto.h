// SPDX-License-Identifier: Apache-2.0
// Writes and reads the wire format of proto3, as far as kvlink's messages use it, without a library. A writer
// that is called in the order of the field numbers writes the bytes that protobuf writes. A reader borrows
// its message, never looks past its end, and allocates nothing.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/status.h"

namespace kvlink {

bool is_utf8(std::string_view text);

class ProtoWriter {
 public:
  /// Like protobuf, these leave out 0 and empty strings.
  ProtoWriter& number(uint32_t field, uint64_t value);
  ProtoWriter& bytes(uint32_t field, std::string_view value);
  ProtoWriter& fixed32(uint32_t field, uint32_t value);
  /// An entry of a repeated field, or a nested message, which may be empty.
  ProtoWriter& entry(uint32_t field, std::string_view value);
  template <typename T>
  ProtoWriter& packed(uint32_t field, const std::vector<T>& values) {
    ProtoWriter inner;
    for (const T value : values) inner.varint(value);
    return bytes(field, inner.blob_);
  }
  std::string take() { return std::move(blob_); }

 private:
  void varint(uint64_t value);

  std::string blob_;
};

class ProtoReader {
 public:
  enum class Wire : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

  explicit ProtoReader(std::string_view message) : rest_(message) {}
  /// Moves to the next field. Returns false at the end, and where the message is malformed.
  bool next();
  bool ok() const { return ok_; }
  uint32_t field() const { return field_; }

  // Each returns whether the field that it is at has this form; protobuf skips a field of another form, too.
  template <std::unsigned_integral T>
  bool get(T& into) const {
    if (wire_ != Wire::kVarint) return false;
    if constexpr (std::is_same_v<T, bool>) {
      into = number_ != 0;
    } else {
      into = static_cast<T>(number_);  // as protobuf cuts it
    }
    return true;
  }
  bool get_fixed32(uint32_t& into) const;
  bool get(std::string_view& into) const;
  bool get(std::string& into) const;
  /// Appends the numbers, packed or one by one, while there are at most `most`. Returns false beyond that, or
  /// if a packed number is malformed.
  template <std::unsigned_integral T>
  bool append(std::vector<T>& into, size_t most) const {
    if (wire_ == Wire::kBytes) {
      for (ProtoReader packed(bytes_); !packed.rest_.empty();) {
        uint64_t value;
        if (!packed.varint(value) || into.size() >= most) return false;
        into.push_back(static_cast<T>(value));
      }
    } else if (wire_ == Wire::kVarint) {
      if (into.size() >= most) return false;
      into.push_back(static_cast<T>(number_));
    }
    return true;
  }

 private:
  bool varint(uint64_t& into);
  bool take(size_t bytes);

  std::string_view rest_, bytes_;
  uint64_t number_ = 0;
  uint32_t field_ = 0;
  Wire wire_ = Wire::kVarint;
  bool ok_ = true;
};

/// Calls `take(reader)` for each field, which returns kOk or why the message is refused.
template <typename Take>
Status read_fields(std::string_view message, Take take) {
  ProtoReader reader(message);
  while (reader.next()) {
    if (Status status = take(reader); !status.ok()) return status;
  }
  return reader.ok() ? Status{} : Status::Config("it is truncated, or no message of protobuf");
}

}  // namespace kvlink

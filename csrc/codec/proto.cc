// SPDX-License-Identifier: Apache-2.0
#include "codec/proto.h"

#include <cstring>

namespace kvlink {
namespace {

constexpr uint32_t kMostFieldNumber = (1 << 29) - 1;

uint64_t tag(uint32_t field, ProtoReader::Wire wire) {
  return uint64_t{field} << 3 | static_cast<uint64_t>(wire);
}

/// Returns the bytes of the character that begins here, or 0 if none does.
size_t character(std::string_view text) {
  const auto at = [text](size_t index) { return static_cast<uint8_t>(text[index]); };
  const uint8_t first = at(0);
  const size_t size = first < 0x80   ? 1
                      : first < 0xC2 ? 0
                      : first < 0xE0 ? 2
                      : first < 0xF0 ? 3
                      : first < 0xF5 ? 4
                                     : 0;
  if (size == 0 || size > text.size()) return 0;
  for (size_t index = 1; index < size; ++index) {
    if ((at(index) & 0xC0) != 0x80) return 0;
  }
  if (first == 0xE0 && at(1) < 0xA0) return 0;       // longer than needed
  if (first == 0xED && at(1) >= 0xA0) return 0;      // half of a pair of UTF-16
  if (first == 0xF0 && at(1) < 0x90) return 0;       // longer than needed
  return first == 0xF4 && at(1) >= 0x90 ? 0 : size;  // beyond the last character
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    for (uint64_t eight; text.size() >= sizeof eight; text.remove_prefix(sizeof eight)) {
      std::memcpy(&eight, text.data(), sizeof eight);
      if (eight & 0x8080808080808080) break;  // most texts are ASCII
    }
    while (!text.empty() && static_cast<signed char>(text.front()) >= 0) text.remove_prefix(1);
    if (text.empty()) break;
    const size_t size = character(text);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

void ProtoWriter::varint(uint64_t value) {
  for (; value >= 0x80; value >>= 7) blob_.push_back(static_cast<char>(value | 0x80));
  blob_.push_back(static_cast<char>(value));
}

ProtoWriter& ProtoWriter::number(uint32_t field, uint64_t value) {
  if (value == 0) return *this;
  varint(tag(field, ProtoReader::Wire::kVarint));
  varint(value);
  return *this;
}

ProtoWriter& ProtoWriter::bytes(uint32_t field, std::string_view value) {
  return value.empty() ? *this : entry(field, value);
}

ProtoWriter& ProtoWriter::fixed32(uint32_t field, uint32_t value) {
  if (value == 0) return *this;
  varint(tag(field, ProtoReader::Wire::kFixed32));
  char little[sizeof value];
  std::memcpy(little, &value, sizeof value);
  blob_.append(little, sizeof little);
  return *this;
}

ProtoWriter& ProtoWriter::entry(uint32_t field, std::string_view value) {
  varint(tag(field, ProtoReader::Wire::kBytes));
  varint(value.size());
  blob_.append(value);
  return *this;
}

bool ProtoReader::varint(uint64_t& into) {
  into = 0;
  for (uint32_t at = 0; at < 10 && at < rest_.size(); ++at) {
    const auto byte = static_cast<uint8_t>(rest_[at]);
    if (at == 9 && byte > 1) return false;  // more than 64 bits
    into |= uint64_t{byte & 0x7Fu} << (7 * at);
    if (byte < 0x80) return take(at + 1);
  }
  return false;
}

bool ProtoReader::take(size_t bytes) {
  if (bytes > rest_.size()) return false;
  bytes_ = rest_.substr(0, bytes);
  rest_.remove_prefix(bytes);
  return true;
}

bool ProtoReader::next() {
  if (rest_.empty() || !ok_) return false;
  uint64_t key, size = 0;
  ok_ = varint(key) && key >> 3 > 0 && key >> 3 <= kMostFieldNumber;
  if (!ok_) return false;
  field_ = static_cast<uint32_t>(key >> 3);
  wire_ = static_cast<Wire>(key & 7);
  switch (wire_) {
    case Wire::kVarint:
      ok_ = varint(number_);
      break;
    case Wire::kFixed64:
      ok_ = take(8);
      break;
    case Wire::kFixed32:
      ok_ = take(4);
      break;
    case Wire::kBytes:
      ok_ = varint(size) && take(size);
      break;
    default:  // groups, which proto3 does not have
      ok_ = false;
  }
  return ok_;
}

bool ProtoReader::get_fixed32(uint32_t& into) const {
  if (wire_ != Wire::kFixed32) return false;
  std::memcpy(&into, bytes_.data(), sizeof into);
  return true;
}

bool ProtoReader::get(std::string_view& into) const {
  if (wire_ != Wire::kBytes) return false;
  into = bytes_;
  return true;
}

bool ProtoReader::get(std::string& into) const {
  if (wire_ != Wire::kBytes) return false;
  into = bytes_;
  return true;
}

}  // namespace kvlink

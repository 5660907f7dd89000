// SPDX-License-Identifier: Apache-2.0
#include "transports/tcp/owner_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lease/stale.h"

namespace kvlink::tcp {
namespace {

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

bool is_aligned(const std::byte* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(uint64_t) == 0;
}

std::atomic_ref<uint64_t> word_at(const std::byte* address) {
  return std::atomic_ref(*reinterpret_cast<uint64_t*>(const_cast<std::byte*>(address)));
}

bool inside(const ExportedRegion& region, uint64_t offset, uint64_t bytes) {
  return bytes <= region.bytes && offset <= region.bytes - bytes;
}

bool is_read(const RequestHeader& header) {
  return header.kind == FrameKind::kRead || header.kind == FrameKind::kGuardedRead;
}

size_t guard_bytes(const RequestHeader& header) {
  return header.kind == FrameKind::kGuardedRead ? sizeof(GuardEntry) : 0;
}

size_t frame_bytes(const RequestHeader& header) {
  if (header.kind == FrameKind::kWrite) return kWriteFrameBytes;
  return sizeof header + guard_bytes(header) + header.count * sizeof(ReadEntry);
}

bool well_formed(const RequestHeader& header) {
  if (header.magic != kFrameMagic) return false;
  if (header.kind == FrameKind::kWrite) return header.count == 0;
  return is_read(header) && header.count > 0 && header.count <= kMaxFrameOps;
}

}  // namespace

Wants ServedConnection::serve() {
  size_t budget = kSliceBytes;
  for (bool drained = false;;) {
    if (device_ && device_->has_turn(outbox_)) {
      const Wants wants = device_->hand_out(outbox_);
      if (wants != Wants::kRequests) return wants;
    }
    if (!outbox_.empty()) {
      enforce_guard();  // behind the copy of what a device handed out
      const bool more = (device_ && device_->goes_on()) || read_follows();
      const size_t before = budget;
      const Wants wants = outbox_.send(socket(), more, budget);
      response_sent_ += before - budget;
      if (wants != Wants::kRequests) return wants;
      if (device_ && !device_->empty()) continue;
    }
    const Step step = run_next_frame();
    if (step == Step::kMalformed) return Wants::kEnd;
    if (step == Step::kDone) continue;
    if (drained || budget == 0) return Wants::kRequests;

    std::memmove(inbox_.data(), inbox_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    const size_t space = inbox_.size() - end_;
    const ssize_t got = ::recv(socket(), inbox_.data() + end_, space, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return Wants::kRequests;
    if (got <= 0) return Wants::kEnd;
    end_ += static_cast<size_t>(got);
    budget -= std::min(budget, static_cast<size_t>(got));
    drained = static_cast<size_t>(got) < space;
  }
}

void ServedConnection::set_deferred(bool deferred) {
  deferred_ = deferred;
  if (deferred) expects_write_ = false;
  const int bytes = deferred ? kWriteFrameBytes + 1 : 1;
  ::setsockopt(socket(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

size_t ServedConnection::whole_frame(RequestHeader& header) const {
  if (end_ - begin_ < sizeof header) return 0;
  header = load<RequestHeader>(&inbox_[begin_]);
  if (!well_formed(header)) return sizeof header;
  return end_ - begin_ < frame_bytes(header) ? 0 : frame_bytes(header);
}

bool ServedConnection::read_follows() const {
  RequestHeader header;
  return whole_frame(header) > 0 && is_read(header);
}

ServedConnection::Step ServedConnection::run_next_frame() {
  RequestHeader header;
  const size_t bytes = whole_frame(header);
  if (bytes == 0) return Step::kNeedsMore;
  if (!well_formed(header)) return Step::kMalformed;
  const std::byte* entries = &inbox_[begin_ + sizeof header];
  begin_ += bytes;
  return is_read(header) ? answer_read(header, entries) : store(header, entries);
}

ServedConnection::Step ServedConnection::answer_read(const RequestHeader& header, const std::byte* entries) {
  // Keeps the kernel's loads of the payload before this frame before this thread's loads for it, on any
  // processor.
  frames_.fetch_add(1, std::memory_order_acq_rel);
  outbox_.clear();
  // It is resized before any piece points into it.
  copied_.resize(std::max(copied_.size(), sizeof(ResponseHeader) + header.count * kMaxAtomicBytes));
  copied_bytes_ = sizeof(ResponseHeader);
  outbox_.add(copied_.data(), sizeof(ResponseHeader));
  uint64_t bytes = 0;
  ReadStatus status = ReadStatus::kOk;
  guard_ = {};
  if (header.kind == FrameKind::kGuardedRead) status = hold_guard(load<GuardEntry>(entries));
  if (status == ReadStatus::kOk) status = gather(header, entries + guard_bytes(header), bytes);
  if (bytes > kMaxFrameBytes) return Step::kMalformed;
  response_ = {kFrameMagic, ReadStatus::kOk, static_cast<uint32_t>(header.id), bytes};
  response_sent_ = 0;
  if (status == ReadStatus::kOk) {
    std::memcpy(copied_.data(), &response_, sizeof response_);
    enforce_guard();  // before any copy of a device is begun
  } else {
    refuse(status, 0);
  }
  return Step::kDone;
}

/// Sends a refusal instead of the payload.
void ServedConnection::refuse(ReadStatus status, uint64_t why) {
  if (device_) device_->clear();
  outbox_.clear();
  guard_ = {};
  expects_write_ = false;
  response_.status = status;
  response_.bytes = why;
  std::memcpy(copied_.data(), &response_, sizeof response_);
  outbox_.add(copied_.data(), sizeof response_);
}

/// Called when the guard failed. The announced rest is sent as zeros.
void ServedConnection::withhold() {
  const uint64_t found = guard_.found();
  if (response_sent_ == 0) return refuse(ReadStatus::kStale, std::min(found, kLargestToldWord));
  if (device_) device_->clear();
  outbox_.clear();
  guard_ = {};
  const size_t header_sent = std::min<uint64_t>(response_sent_, sizeof response_);
  outbox_.add(&copied_[header_sent], sizeof response_ - header_sent);
  outbox_.add_zeros(response_.bytes - (response_sent_ - header_sent));
}

uint64_t ServedConnection::HeldGuard::found() const { return word_at(word).load(std::memory_order_acquire); }

ReadStatus ServedConnection::hold_guard(const GuardEntry& entry) {
  const auto found = regions_.find(entry.key);
  if (found == regions_.end()) return ReadStatus::kUnknownKey;
  const ExportedRegion& region = found->second;
  const std::byte* const word = region.base + entry.offset;
  if (region.access != Access::kReadWords || !inside(region, entry.offset, sizeof entry.value) ||
      !is_aligned(word)) {
    return ReadStatus::kOutOfBounds;
  }
  guard_ = {word, entry.value};
  return ReadStatus::kOk;
}

ReadStatus ServedConnection::gather(const RequestHeader& header, const std::byte* entries, uint64_t& bytes) {
  uint64_t key = 0;
  const ExportedRegion* region = nullptr;  // of `key`
  for (uint32_t index = 0; index < header.count && bytes <= kMaxFrameBytes; ++index) {
    const auto entry = load<ReadEntry>(entries + index * sizeof(ReadEntry));
    if (region == nullptr || entry.key != key) {
      const auto found = regions_.find(entry.key);
      if (found == regions_.end()) return ReadStatus::kUnknownKey;
      if (found->second.device) {
        return index == 0 ? gather_device(header, entries, bytes) : ReadStatus::kMixed;
      }
      key = entry.key;
      region = &found->second;
    }
    if (region->access == Access::kWriteWords) return ReadStatus::kUnknownKey;
    if (!inside(*region, entry.offset, entry.bytes)) return ReadStatus::kOutOfBounds;
    bytes += entry.bytes;
    std::byte* from = region->base + entry.offset;
    const bool words =
        entry.bytes <= kMaxAtomicBytes && entry.bytes % sizeof(uint64_t) == 0 && is_aligned(from);
    expects_write_ = words && region->access == Access::kReadWords;
    if (words) {
      gather_words(from, entry.bytes);
    } else {
      outbox_.add(from, entry.bytes);
    }
  }
  return ReadStatus::kOk;
}

ReadStatus ServedConnection::gather_device(const RequestHeader& header, const std::byte* entries,
                                           uint64_t& bytes) {
  if (!device_) device_ = std::make_unique<DevicePayload>(*source_);
  expects_write_ = false;
  for (uint32_t index = 0; index < header.count && bytes <= kMaxFrameBytes; ++index) {
    const auto entry = load<ReadEntry>(entries + index * sizeof(ReadEntry));
    const auto found = regions_.find(entry.key);
    if (found == regions_.end()) return ReadStatus::kUnknownKey;
    if (!found->second.device) return ReadStatus::kMixed;
    if (!inside(found->second, entry.offset, entry.bytes)) return ReadStatus::kOutOfBounds;
    bytes += entry.bytes;
    device_->add(found->second.base + entry.offset, entry.bytes);
  }
  return ReadStatus::kOk;
}

void ServedConnection::gather_words(const std::byte* from, uint64_t bytes) {
  std::byte* to = &copied_[copied_bytes_];
  for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word = word_at(from + at).load(std::memory_order_acquire);
    std::memcpy(to + at, &word, sizeof word);
  }
  copied_bytes_ += bytes;
  outbox_.add(to, bytes);
}

ServedConnection::Step ServedConnection::store(const RequestHeader& header, const std::byte* from) {
  const auto entry = load<WriteEntry>(from);
  const auto found = regions_.find(entry.key);
  if (found == regions_.end()) return Step::kMalformed;
  const ExportedRegion& region = found->second;
  if (region.access != Access::kWriteWords || !inside(region, entry.offset, sizeof(uint64_t)))
    return Step::kMalformed;
  std::byte* to = region.base + entry.offset;
  if (!is_aligned(to)) return Step::kMalformed;
  expects_write_ = false;
  word_at(to).store(header.id, std::memory_order_release);
  return Step::kDone;
}

}  // namespace kvlink::tcp

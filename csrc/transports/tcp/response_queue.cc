// SPDX-License-Identifier: Apache-2.0
#include "transports/tcp/response_queue.h"

#include <algorithm>
#include <cstring>

#include "lease/stale.h"

namespace kvlink::tcp {
namespace {

constexpr size_t kKeepEnded = 64;  // responses that may pile up before the vector is shifted

std::string refusal(ReadStatus status) {
  switch (status) {
    case ReadStatus::kUnknownKey:
      return "no such region (its key is wrong or was revoked)";
    case ReadStatus::kMixed:
      return "it asks for GPU memory and other memory at once";
    default:
      return "the range is outside the region";
  }
}

}  // namespace

void ResponseQueue::expect(uint64_t token, uint32_t id, const Chunk& chunk, uint64_t bytes) {
  ChunkCursor at;
  do {
    Response& response = responses_.emplace_back();
    response.token = token;
    response.bytes = std::min(bytes, kMaxFrameBytes);
    response.got = 0;
    response.chunk = chunk;
    response.id = id++;
    response.forgotten = false;
    bytes -= response.bytes;
    response.last = bytes == 0;
    response.at = at;
    if (!response.last) skip(chunk, at, response.bytes);
  } while (bytes > 0);
}

void ResponseQueue::forget(uint64_t token) {
  for (size_t index = first_; index < responses_.size(); ++index) {
    Response& response = responses_[index];
    if (response.token != token) continue;
    response.forgotten = true;
    response.chunk = {.ops = {}, .guard = response.chunk.guard};
  }
}

void ResponseQueue::forget_all() {
  responses_.clear();
  first_ = 0;
}

void ResponseQueue::place(void* base, size_t bytes) {
  places_.push_back({base, bytes});
  placed_bytes_ += bytes;
}

std::span<iovec> ResponseQueue::places(size_t budget) {
  places_.clear();
  placed_bytes_ = 0;
  bool ahead = false;  // a payload has its place ahead of its header
  for (size_t index = first_; index < responses_.size(); ++index) {
    if (placed_bytes_ >= budget || places_.size() >= kMaxPlaces) break;
    Response& response = responses_[index];
    if (response.small()) {
      place(&response.head[response.got], response.total() - response.got);
      continue;
    }
    const bool proven = response.proven();
    if (!proven) {
      place(&response.head[response.got], sizeof(ResponseHeader) - response.got);
      if (ahead || response.forgotten) break;
      ahead = true;
    }
    if (!place_payload(response, budget)) break;
  }
  if (places_.empty()) place(&stray_, sizeof stray_);
  return places_;
}

/// Returns false if there was no room for all of it.
bool ResponseQueue::place_payload(const Response& response, size_t budget) {
  if (response.forgotten && !scratch_) scratch_ = std::make_unique<std::byte[]>(kScratchBytes);
  ChunkCursor at = response.at;
  uint64_t left = response.total() - std::max<uint64_t>(response.got, sizeof(ResponseHeader));
  while (left > 0) {
    if (placed_bytes_ >= budget || places_.size() >= kMaxPlaces) return false;
    const iovec room = response.forgotten ? iovec{scratch_.get(), kScratchBytes} : segment_at(response, at);
    const size_t bytes = std::min({room.iov_len, left, budget - placed_bytes_});
    place(room.iov_base, bytes);
    if (!response.forgotten) skip(response.chunk, at, bytes);
    left -= bytes;
  }
  return true;
}

iovec ResponseQueue::segment_at(const Response& response, const ChunkCursor& at) {
  const Segment& segment = response.chunk.segments[response.chunk.ops[at.op].first_segment + at.segment];
  return {segment.local + at.in_segment, segment.bytes - at.in_segment};
}

Status ResponseQueue::landed(size_t bytes, std::vector<Completion>& ended) {
  size_t taken = 0;
  Status status = take(bytes, taken, ended);
  if (!status.ok() || taken == bytes) return status;
  take_back(taken, bytes - taken);
  for (size_t from = 0; from < taken_back_.size() && status.ok(); from += taken) {
    status = take(place_again(from), taken, ended);
  }
  taken_back_.clear();
  return status;
}

Status ResponseQueue::take(size_t bytes, size_t& taken, std::vector<Completion>& ended) {
  for (taken = 0; taken < bytes;) {
    if (empty())
      return Status::Unreachable("protocol error: " + peer_ + " sent bytes that were not requested");
    Response& response = responses_[first_];
    if (!response.proven()) {
      const size_t head = std::min<size_t>(bytes - taken, sizeof(ResponseHeader) - response.got);
      response.got += head;
      taken += head;
      if (!response.proven()) break;
      bool refused = false;
      const Status status = take_header(response, ended, refused);
      if (!status.ok() || refused) return status;
    }
    const uint64_t payload = std::min<uint64_t>(bytes - taken, response.total() - response.got);
    if (!response.small() && !response.forgotten) skip(response.chunk, response.at, payload);
    response.got += payload;
    taken += payload;
    if (response.got < response.total()) break;
    if (response.small()) scatter_small(response);
    if (response.last && !response.forgotten) ended.push_back({response.token, {}});
    pop();
  }
  return {};
}

/// A refused response ends here.
Status ResponseQueue::take_header(Response& response, std::vector<Completion>& ended, bool& refused) {
  ResponseHeader header;
  std::memcpy(&header, response.head.data(), sizeof header);
  refused = header.status != ReadStatus::kOk;
  const bool stale = header.status == ReadStatus::kStale;
  const bool fits = stale ? header.bytes <= kLargestToldWord && response.chunk.guard.value != 0
                          : header.bytes == (refused ? 0 : response.bytes);
  if (header.magic != kFrameMagic || header.id != response.id || header.status > ReadStatus::kStale ||
      !fits) {
    return Status::Unreachable("protocol error: " + peer_ + " sent a response that does not fit its request");
  }
  if (!refused) return {};
  if (!response.forgotten) {
    ended.push_back(
        {response.token, stale ? stale_blocks(header.bytes)
                               : Status::AccessDenied(peer_ + " refused a read: " + refusal(header.status))});
    forget(response.token);
  }
  pop();
  return {};
}

void ResponseQueue::scatter_small(const Response& response) const {
  const std::byte* from = response.head.data() + sizeof(ResponseHeader);
  ChunkCursor at = response.at;
  walk(response.chunk, at, response.bytes, [&](const ReadOp&, uint32_t, std::byte* to, uint32_t bytes) {
    std::memcpy(to, from, bytes);
    from += bytes;
    return true;
  });
}

void ResponseQueue::take_back(size_t skip, size_t bytes) {
  for (const iovec& place : places_) {
    const size_t skipped = std::min(skip, place.iov_len);
    const size_t here = std::min(bytes, place.iov_len - skipped);
    const auto* from = static_cast<const std::byte*>(place.iov_base) + skipped;
    taken_back_.insert(taken_back_.end(), from, from + here);
    skip -= skipped;
    bytes -= here;
  }
}

/// Returns how many bytes found their next places.
size_t ResponseQueue::place_again(size_t from) {
  size_t copied = 0;
  for (const iovec& place : places(taken_back_.size() - from)) {
    const size_t bytes = std::min(place.iov_len, taken_back_.size() - from - copied);
    std::memcpy(place.iov_base, taken_back_.data() + from + copied, bytes);
    copied += bytes;
  }
  return copied;
}

void ResponseQueue::pop() {
  ++first_;
  if (!empty() && first_ < kKeepEnded) return;
  responses_.erase(responses_.begin(), responses_.begin() + static_cast<ptrdiff_t>(first_));
  first_ = 0;
}

}  // namespace kvlink::tcp

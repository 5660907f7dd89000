// SPDX-License-Identifier: Apache-2.0
#include "transports/same_host/copy_endpoint.h"

#include <algorithm>
#include <array>

#include "memory/streaming_copy.h"

namespace kvlink {
namespace {

constexpr size_t kSharedBytes = 512 << 10;  // less is never shared
constexpr int64_t kBytesPerUs = 10'000;     // of one thread on an Intel Xeon and on an EPYC
constexpr size_t kPartBytes = 128 << 10;    // of what one of them copies at a time

std::byte* local_address(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

void QueuedEndpoint::break_down(Status why) {
  if (broken_.ok()) broken_ = std::move(why);
  posts_.clear();
}

Status QueuedEndpoint::post_read(uint64_t token, const Chunk& chunk) {
  if (!broken_.ok()) return broken_;
  const Result<uint64_t> bytes = remotes_.check_read(chunk);
  if (!bytes.ok()) return bytes.status();
  posts_.push_back({.token = token, .read = {chunk, *bytes, {}}});
  return {};
}

Status QueuedEndpoint::post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) {
  if (!broken_.ok()) return broken_;
  if (Status status = remotes_.check_write(region, offset); !status.ok()) return status;
  posts_.push_back({.token = token, .region = region, .offset = offset, .value = value});
  return {};
}

void QueuedEndpoint::notice_owner(int64_t now_ns) {
  if (!owner_checks_.due(now_ns)) return;
  if (Status status = check_owner(); !status.ok()) break_down(std::move(status));
}

Status QueuedEndpoint::execute_front(size_t& budget) {
  Post& post = posts_.front();
  if (post.read.bytes == 0) {
    budget -= std::min(budget, sizeof post.value);
    return write_word(post.region, post.offset, post.value);
  }
  if (post.read.done()) return {};
  Read* const behind = posts_.size() > 1 && posts_[1].read.bytes > 0 ? &posts_[1].read : nullptr;
  const uint64_t before = post.read.at.moved;
  Status status = read_some(post.read, behind, budget);
  budget -= post.read.at.moved - before;
  return status;
}

PollResult QueuedEndpoint::poll(int64_t now_ns, bool, std::vector<Completion>& ended) {
  if (broken_.ok()) notice_owner(now_ns);
  const size_t num_ended = ended.size();
  size_t budget = kSliceBytes;
  while (budget > 0 && !posts_.empty()) {
    const size_t before = budget;
    Status status = execute_front(budget);
    if (!status.ok() && status.code() != Code::kAccessDenied && status.code() != Code::kStaleBlocks) {
      break_down(std::move(status));
      break;
    }
    if (!status.ok() || posts_.front().read.done()) {
      ended.push_back({posts_.front().token, std::move(status)});
      posts_.pop_front();
    } else if (budget == before) {
      break;
    }
  }
  return {broken_, budget < kSliceBytes || ended.size() > num_ended};
}

bool QueuedEndpoint::cancel(uint64_t token) {
  std::erase_if(posts_, [token](const Post& post) { return post.token == token; });
  return true;
}

template <typename Cursor>
void MappedEndpoint::copy(const Chunk& chunk, Cursor& at, size_t num_bytes) const {
  StreamCopy streamed;
  const bool streams = num_bytes >= kStreamBytes;
  walk(chunk, at, num_bytes, [&](const ReadOp& op, uint32_t in_op, std::byte* local, uint32_t bytes) {
    const std::byte* const from = local_address(remote(op.region).address + op.offset + in_op);
    if (streams) {
      streamed.add(local, from, bytes);
    } else {
      copy_shared(local, from, bytes);
    }
    return true;
  });
}

Status MappedEndpoint::read_some(Read& read, Read*, size_t budget) {
  const size_t bytes = std::min(budget, read.bytes - read.at.moved);
  if (helper_ && bytes >= kSharedBytes) {
    copy_by_two(read, bytes);
  } else {
    copy(read.chunk, read.at, bytes);
  }
  return {};
}

void MappedEndpoint::copy_by_two(Read& read, size_t bytes) const {
  struct Part {
    ChunkCursor at;
    size_t bytes = 0;
  };
  struct Work {
    const MappedEndpoint& endpoint;
    const Chunk& chunk;
    std::array<Part, kSliceBytes / kPartBytes> parts = {};
  } work{*this, read.chunk};
  uint32_t num_parts = 0;
  for (size_t left = bytes; left > 0; left -= work.parts[num_parts++].bytes) {
    Part& part = work.parts[num_parts] = {read.at, std::min(left, kPartBytes)};
    skip(read.chunk, read.at, part.bytes);
  }
  const auto copy_part = [](void* context, uint32_t number) {
    auto& [endpoint, chunk, parts] = *static_cast<Work*>(context);
    endpoint.copy(chunk, parts[number].at, parts[number].bytes);
  };
  helper_->run(copy_part, &work, num_parts, static_cast<int64_t>(bytes) * 1000 / kBytesPerUs);
}

Status MappedEndpoint::write_word(uint32_t region, uint64_t offset, uint64_t value) {
  store_word(local_address(remote(region).address + offset), value);
  return {};
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "queued_endpoint.h"

#include "clock.h"
#include "copy.h"

namespace kvlink {
namespace {

// Asking costs a system call or two: too much for every slice of a small pull.
constexpr int64_t kCheckOwnerNs = 2'000'000;

Status out_of_bounds(const char* what, uint32_t region, uint64_t offset, uint64_t bytes,
                     uint64_t region_bytes) {
  return Status::AccessDenied(std::string(what) + " of " + std::to_string(bytes) + " bytes at offset " +
                              std::to_string(offset) + " leaves region " + std::to_string(region) + " of " +
                              std::to_string(region_bytes) + " bytes");
}

bool fits(uint64_t offset, uint64_t bytes, uint64_t region_bytes) {
  return bytes <= region_bytes && offset <= region_bytes - bytes;
}

std::byte* local_address(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

uint32_t QueuedEndpoint::add_remote(const Remote& remote) {
  remotes_.push_back(remote);
  return static_cast<uint32_t>(remotes_.size() - 1);
}

void QueuedEndpoint::break_down(Status why) {
  if (broken_.ok()) broken_ = std::move(why);
  posts_.clear();
}

Status QueuedEndpoint::check(const ReadOp& op, const Segment* segments) const {
  if (op.region >= remotes_.size()) {
    return Status::AccessDenied("region " + std::to_string(op.region) + " was not imported");
  }
  const uint64_t region_bytes = remotes_[op.region].bytes;
  if (!fits(op.offset, op.bytes, region_bytes)) {
    return out_of_bounds("a read", op.region, op.offset, op.bytes, region_bytes);
  }
  uint64_t landing = 0;
  for (uint32_t i = 0; i < op.num_segments; ++i) {
    const uint32_t bytes = segments[op.first_segment + i].bytes;
    if (bytes == 0) return Status::Config("a read has an empty segment");
    landing += bytes;
  }
  if (landing == op.bytes && landing != 0) return {};
  return Status::Config("the segments of a read of " + std::to_string(op.bytes) + " bytes take " +
                        std::to_string(landing));
}

Status QueuedEndpoint::post_read(uint64_t token, const Chunk& chunk) {
  if (!broken_.ok()) return broken_;
  if (chunk.ops.empty()) return Status::Config("a read has no operations");
  uint64_t bytes = 0;
  for (const ReadOp& op : chunk.ops) {
    if (Status status = check(op, chunk.segments); !status.ok()) return status;
    bytes += op.bytes;
  }
  posts_.push_back({.token = token, .read = {chunk, bytes, {}}});
  return {};
}

Status QueuedEndpoint::post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) {
  if (!broken_.ok()) return broken_;
  if (region >= remotes_.size()) {
    return Status::AccessDenied("region " + std::to_string(region) + " was not imported");
  }
  const Remote& to = remotes_[region];
  if (!fits(offset, sizeof value, to.bytes)) {
    return out_of_bounds("a write", region, offset, sizeof value, to.bytes);
  }
  if (to.access != Access::kReadWrite) {
    return Status::AccessDenied("region " + std::to_string(region) + " was lent for reading only");
  }
  if ((to.address + offset) % sizeof value != 0) {
    return Status::AccessDenied("a write at offset " + std::to_string(offset) + " is not 8-byte aligned");
  }
  posts_.push_back({.token = token, .region = region, .offset = offset, .value = value});
  return {};
}

void QueuedEndpoint::notice_owner() {
  const int64_t now = now_ns();
  if (now - owner_checked_ns_ < kCheckOwnerNs) return;
  owner_checked_ns_ = now;
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

PollResult QueuedEndpoint::poll(std::vector<Completion>& ended) {
  if (broken_.ok()) notice_owner();
  const size_t num_ended = ended.size();
  size_t budget = kSliceBytes;
  while (budget > 0 && !posts_.empty()) {
    const size_t before = budget;
    Status status = execute_front(budget);
    if (!status.ok() && status.code() != Code::kAccessDenied) {
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

Status MappedEndpoint::read_some(Read& read, Read*, size_t budget) {
  StreamCopy streamed;
  const bool streams = read.bytes >= kStreamBytes;
  walk(read.chunk, read.at, budget, [&](const ReadOp& op, uint32_t in_op, std::byte* local, uint32_t bytes) {
    const uint64_t address = remote(op.region).address + op.offset + in_op;
    const std::byte* const from = local_address(address);
    if (streams) {
      streamed.add(local, from, bytes);
    } else if (is_words(address, bytes)) {
      load_words(local, from, bytes);
    } else {
      copy_bytes(local, from, bytes);
    }
    return true;
  });
  return {};
}

Status MappedEndpoint::write_word(uint32_t region, uint64_t offset, uint64_t value) {
  store_word(local_address(remote(region).address + offset), value);
  return {};
}

}  // namespace kvlink

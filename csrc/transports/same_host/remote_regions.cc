// SPDX-License-Identifier: Apache-2.0
#include "transports/same_host/remote_regions.h"

#include <algorithm>
#include <string>

namespace kvlink {
namespace {

Status out_of_bounds(const char* what, uint32_t region, uint64_t offset, uint64_t bytes,
                     uint64_t region_bytes) {
  return Status::AccessDenied(std::string(what) + " of " + std::to_string(bytes) + " bytes at offset " +
                              std::to_string(offset) + " leaves region " + std::to_string(region) + " of " +
                              std::to_string(region_bytes) + " bytes");
}

Status not_imported(uint32_t region) {
  return Status::AccessDenied("region " + std::to_string(region) + " was not imported");
}

bool fits(uint64_t offset, uint64_t bytes, uint64_t region_bytes) {
  return bytes <= region_bytes && offset <= region_bytes - bytes;
}

}  // namespace

uint32_t Remotes::add(const Remote& remote) {
  remotes_.push_back(remote);
  return static_cast<uint32_t>(remotes_.size() - 1);
}

Status Remotes::check(const ReadOp& op, const Segment* segments) const {
  if (op.region >= remotes_.size()) return not_imported(op.region);
  const uint64_t region_bytes = remotes_[op.region].bytes;
  if (remotes_[op.region].access == Access::kWriteWords) {
    return Status::AccessDenied("region " + std::to_string(op.region) + " was lent for writing only");
  }
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

Result<uint64_t> Remotes::check_read(const Chunk& chunk) const {
  if (chunk.ops.empty()) return Status::Config("a read has no operations");
  uint64_t bytes = 0;
  for (const ReadOp& op : chunk.ops) {
    if (Status status = check(op, chunk.segments); !status.ok()) return status;
    bytes += op.bytes;
  }
  return bytes;
}

Result<uint64_t> Remotes::check_repeated(const Chunk& chunk) const {
  const Result<uint64_t> once = check_read(chunk);
  if (!once.ok() || chunk.repeats.empty()) return once;
  uint64_t first = UINT64_MAX, end = 0;
  for (const ReadOp& op : chunk.ops) {
    if (op.region != chunk.ops.front().region) return Status::Config("repeats are of one region");
    first = std::min(first, op.offset);
    end = std::max(end, op.offset + op.bytes);
  }
  for (const Repeat& repeat : chunk.repeats) {
    if (repeat.region >= remotes_.size()) return not_imported(repeat.region);
    const uint64_t region_bytes = remotes_[repeat.region].bytes, offset = first + repeat.offset;
    if (!fits(offset, end - first, region_bytes)) {
      return out_of_bounds("a repeated read", repeat.region, offset, end - first, region_bytes);
    }
  }
  return *once * (1 + chunk.repeats.size());
}

Status Remotes::check_write(uint32_t region, uint64_t offset) const {
  constexpr uint64_t kBytes = sizeof(uint64_t);
  if (region >= remotes_.size()) return not_imported(region);
  const Remote& to = remotes_[region];
  if (!fits(offset, kBytes, to.bytes)) return out_of_bounds("a write", region, offset, kBytes, to.bytes);
  if (to.access != Access::kWriteWords) {
    return Status::AccessDenied("region " + std::to_string(region) + " was lent for reading only");
  }
  if ((to.address + offset) % kBytes != 0) {
    return Status::AccessDenied("a write at offset " + std::to_string(offset) + " is not 8-byte aligned");
  }
  return {};
}

}  // namespace kvlink

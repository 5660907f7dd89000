// SPDX-License-Identifier: Apache-2.0
#include "transports/same_host/remote_regions.h"

#include <algorithm>
#include <string>

namespace kvlink {
uint32_t Remotes::add(const Remote& remote) {
  remotes_.push_back(remote);
  return static_cast<uint32_t>(remotes_.size() - 1);
}

Result<uint64_t> Remotes::check_read(const Chunk& chunk) const {
  if (chunk.ops.empty()) return Status::Config("a read has no operations");
  uint64_t bytes = 0;
  for (const ReadOp& op : chunk.ops) {
    if (Status status = kvlink::check_read(op, chunk.segments, remotes_); !status.ok()) return status;
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
  Status status = check_store(region, offset, remotes_);
  if (!status.ok() || (remotes_[region].address + offset) % sizeof(uint64_t) == 0) return status;
  return Status::AccessDenied("region " + std::to_string(region) + " does not begin on a word");
}

}  // namespace kvlink

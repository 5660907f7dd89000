// SPDX-License-Identifier: Apache-2.0
#include "transport_api/chunk.h"

#include <string>

namespace kvlink {

Status not_imported(uint32_t region) {
  return Status::AccessDenied("region " + std::to_string(region) + " was not imported");
}

Status out_of_bounds(const char* what, uint32_t region, uint64_t offset, uint64_t bytes,
                     uint64_t region_bytes) {
  return Status::AccessDenied(std::string(what) + " of " + std::to_string(bytes) + " bytes at offset " +
                              std::to_string(offset) + " leaves region " + std::to_string(region) + " of " +
                              std::to_string(region_bytes) + " bytes");
}

Status not_readable(uint32_t region) {
  return Status::AccessDenied("region " + std::to_string(region) + " was registered for writing only");
}

Status wrong_segments(const ReadOp& op, uint64_t landing) {
  return Status::Config("the segments of a read of " + std::to_string(op.bytes) + " bytes take " +
                        std::to_string(landing));
}

Status check_store(uint64_t offset, uint32_t region, uint64_t region_bytes, Access access) {
  constexpr uint64_t kBytes = sizeof(uint64_t);
  if (!fits(offset, kBytes, region_bytes))
    return out_of_bounds("a write", region, offset, kBytes, region_bytes);
  if (access != Access::kWriteWords) {
    return Status::AccessDenied("region " + std::to_string(region) + " was registered for reading only");
  }
  if (offset % kBytes == 0) return {};
  return Status::AccessDenied("a write at offset " + std::to_string(offset) + " is not 8-byte aligned");
}

}  // namespace kvlink

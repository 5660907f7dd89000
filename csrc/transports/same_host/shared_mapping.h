// SPDX-License-Identifier: Apache-2.0
// Host memory that processes of one machine share: exports and maps a piece of a memfd.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "memory/memory_range.h"
#include "transports/same_host/fd_client.h"
#include "transports/same_host/fd_protocol.h"
#include "transports/same_host/fd_server.h"

namespace kvlink {

/// Exports `range` to later readers, with read-only descriptors except for kWriteWords, so that no bug of a
/// reader can write to it. Refuses (kTransportUnavailable, the reason alone) memory that is not in a memfd,
/// or in one that can shrink.
Result<FdOffer> export_memfd(FdServer& server, const MemoryRange& range, Access access);

/// Returns a memfd with these bytes, which nobody can change.
Result<UniqueFd> memfd_of(const char* name, std::string_view bytes);
/// Returns whether the file has these bytes at its start.
bool file_has(int fd, std::string_view bytes);

/// A reader's mapping of exported memory, which need not start on a page.
class MemfdMapping {
 public:
  MemfdMapping(MemfdMapping&& other) noexcept
      : start_(std::exchange(other.start_, nullptr)), bytes_(other.bytes_), skip_(other.skip_) {}
  MemfdMapping& operator=(MemfdMapping&&) = delete;
  ~MemfdMapping();

  /// Takes the descriptor of `offer`, and checks that it holds the offer and never shrinks, so that no owner
  /// can end its readers by SIGBUS.
  static Result<MemfdMapping> make(FdClient& client, const FdOffer& offer);
  static Result<MemfdMapping> make(int memfd, const FdOffer& offer);

  uint64_t address() const { return reinterpret_cast<uint64_t>(start_) + skip_; }

 private:
  MemfdMapping() = default;

  void* start_ = nullptr;
  uint64_t bytes_ = 0, skip_ = 0;
};

}  // namespace kvlink

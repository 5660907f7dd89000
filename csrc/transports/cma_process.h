// SPDX-License-Identifier: Apache-2.0
// The owner of cma as a reader sees it: what the card claims, and then what the kernel and the process itself
// show.
#pragma once

#include <sys/uio.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "transports/cma_consent.h"
#include "transports/same_host/shared_mapping.h"

namespace kvlink::cma {

struct CmaAddress {
  std::string boot_id;
  uint64_t pid_namespace = 0, pid = 0, uid = 0;
  uint64_t consent = 0;  // the address of the owner's Consent

  std::string blob() const;
  static Result<CmaAddress> parse(std::string_view blob);
};

inline iovec piece(uint64_t address, size_t bytes) { return {reinterpret_cast<void*>(address), bytes}; }

class Process {
 public:
  /// `owner` is the process that the address must be of.
  static Result<Process> of(CmaAddress address, const WorkerRun& owner);

  /// Returns whether the process is there and may be read. Nothing that it has in its memory decides, because
  /// the address is not yet believed.
  Status permitted() const;
  /// Fails unless the process consents to be read by the reader of this challenge, which is at `place`. On
  /// success its regions are known.
  Status believe(const Challenge& challenge, uint32_t place);
  /// Fails if it has ended or closed since. REQUIRES that believe() succeeded, as what follows does.
  Status check() const;
  bool has(const Region& region) const;
  /// Maps words from the descriptors of the process: so a settle is a store instead of a system call (0.1
  /// against 2 us), and no reader writes anywhere else in another process. They are never read, because only
  /// the process itself shows whether its memory still exists.
  Result<MemfdMapping> map_words(const Region& region) const;
  /// Returns the meaning of the kernel's refusal to copy.
  Status failed(int error) const;

  int pid() const { return static_cast<int>(address_.pid); }
  int pidfd() const { return pidfd_.get(); }
  void forget() { pidfd_.reset(); }

 private:
  Process(CmaAddress address, const Identity& owner);
  Status read(uint64_t offset, void* into, size_t bytes) const;
  bool ended() const;
  std::string name() const { return "process " + std::to_string(pid()); }
  Status has_ended() const { return Status::Unreachable("the owner, " + name() + ", has ended"); }
  Status replaced() const {
    return Status::Unreachable("the owner has closed, or " + name() + " is another program by now");
  }

  CmaAddress address_;
  Identity owner_;
  uint64_t stamp_ = 0;
  std::vector<Region> regions_;
  UniqueFd pidfd_;
};

}  // namespace kvlink::cma

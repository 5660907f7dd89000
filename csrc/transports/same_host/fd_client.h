// SPDX-License-Identifier: Apache-2.0
// The reader's end. It fetches the owner's descriptors of memory, and notices the owner's end.
#pragma once

#include <unistd.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/patience.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "transports/same_host/fd_protocol.h"

namespace kvlink {

class FdClient {
 public:
  /// Refuses (kTransportUnavailable, reason and fix) an owner on another host or in another namespace.
  static Result<FdClient> of(uint32_t magic, std::string_view owner_address);

  std::string hello() const { return BlobWriter().u32(magic_).take(); }
  /// Takes all descriptors that the owner exports. Waits no longer than `patience` lasts.
  Status establish(std::string_view reply, const Patience& patience);
  /// Returns the descriptor of one offer, unchecked. Each can be taken once.
  Result<UniqueFd> take(const FdOffer& wanted);
  /// Returns kPeerUnreachable after the owner closed or ended, even if a child of it still has the socket.
  Status check_owner() const;
  /// Returns whether owner and reader are workers of one process.
  bool in_owner_process() const { return owner_pid_ == ::getpid(); }
  int wake_fd() const { return wake_.get(); }
  void close();

 private:
  struct Received {
    FdOffer offer;
    UniqueFd fd;
  };

  FdClient(uint32_t magic, std::string socket_name) : magic_(magic), socket_name_(std::move(socket_name)) {}
  /// Repeats `call` on the socket until it ends or `patience` does. `option` is its timeout option.
  template <typename Call>
  ssize_t in_time(int option, const Patience& patience, Call call);
  Status connect(const Patience& patience);
  Status watch_owner();
  Status receive_all(const Patience& patience);
  /// Waits for one message. Returns the total number of regions.
  Result<uint32_t> receive(const Patience& patience);

  uint32_t magic_;
  std::string socket_name_;
  UniqueFd socket_, pidfd_, wake_;
  pid_t owner_pid_ = 0;  // 0: in a pid namespace out of sight
  std::vector<Received> received_;
};

}  // namespace kvlink

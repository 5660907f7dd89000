// SPDX-License-Identifier: Apache-2.0
// The reader's end of the shm socket: fetches the owner's memfds and notices its end.
#pragma once

#include <string_view>
#include <vector>

#include "fd.h"
#include "shm_wire.h"
#include "status.h"

namespace kvlink {

class ShmReader {
 public:
  /// Blocks at most `timeout_ns`.
  Status connect(std::string_view socket_name, std::string_view secret, int64_t timeout_ns);
  /// The descriptor of one region, checked to hold it and never to shrink. Each can be taken once.
  Result<UniqueFd> take(const ShmOffer& wanted);
  /// kPeerUnreachable once the owner closed, or ended (even when a child of it lives on with the socket).
  Status check_owner() const;
  int wake_fd() const { return wake_.get(); }
  void close();

 private:
  struct Received {
    ShmOffer offer;
    UniqueFd memfd;
  };

  Status watch_owner();
  Status receive_all(int64_t deadline_ns);
  /// Waits for one message. Returns how many regions there are in all.
  Result<uint32_t> receive(int64_t deadline_ns);

  UniqueFd socket_, pidfd_, wake_;
  std::vector<Received> received_;
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The owner's end: a Unix socket that passes descriptors of memory to readers that know a secret. A client
// can neither block nor starve it: it never waits, and the oldest client that has not shown its secret makes
// room for new ones.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/invitations.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "transports/same_host/fd_protocol.h"

namespace kvlink {

/// Any thread may call any method; serve() is for one thread at a time.
class FdServer {
 public:
  /// `magic` identifies the transport in all messages to readers.
  static Result<std::shared_ptr<FdServer>> listen(uint32_t magic);

  /// Returns the address for readers.
  std::string address() const;
  /// Returns a secret that admits the reader that sent `hello` once. If too many are unused, those of the
  /// same caller expire first.
  Result<std::string> accept(uint64_t caller, std::string_view hello);
  /// Gives `fd` to every later reader. Returns its offer.
  FdOffer add(UniqueFd fd, FdOffer offer);
  /// Ends the export: no later reader gets it, and earlier ones keep their mapping.
  void revoke(uint64_t id);

  int serve_fd() const { return epoll_.get(); }
  void serve();
  void close();

 private:
  static constexpr uint64_t kListenerSerial = 0;

  struct Exported {
    FdOffer offer;
    UniqueFd fd;
  };
  struct Client {
    UniqueFd socket;
    bool admitted = false;
    std::vector<std::shared_ptr<const Exported>> offers;  // fixed when admitted
    size_t num_sent = 0;
    bool all_sent = false;
  };

  FdServer(uint32_t magic, std::string name, UniqueFd listener, UniqueFd epoll, UniqueFd spare);
  void accept_ready();
  void make_room();
  /// Returns false if the client is to be dropped.
  bool serve_client(uint64_t serial, Client& client, uint32_t events);
  bool read_secret(Client& client);
  bool send_offers(uint64_t serial, Client& client);

  const uint32_t magic_;
  const std::string name_;
  std::mutex mutex_;  // guards all below; never held while waiting
  UniqueFd listener_, epoll_;
  UniqueFd spare_;                      // given up for a moment to turn clients away when descriptors run out
  std::map<uint64_t, Client> clients_;  // oldest first, by a number that names the socket to epoll
  std::unordered_map<uint64_t, std::shared_ptr<const Exported>> exported_;
  Invitations invitations_;
  uint64_t last_id_ = 0, last_serial_ = kListenerSerial;
  uint64_t num_pending_ = 0;  // clients that are not yet admitted
};

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The owner's side of the tcp transport: a listening socket, exported regions, admitted connections.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/invitations.h"
#include "base/unique_fd.h"
#include "transport_api/options.h"
#include "transport_api/transport.h"
#include "transports/tcp/owner_connection.h"
#include "transports/tcp/socket.h"

namespace kvlink::tcp {

inline constexpr Invitations::Limits kInvitationLimits{
    .secret_bytes = sizeof(Secret),
    .most_of_one = 1024,  // 16 connections that have not come yet, of 64 lanes each
    .most = 4096,
    .lifetime_ns = 30'000'000'000};

/// A mutex with one busy user, which lets all others go first, so that fence() never starves behind serve().
class ServeLock {
 public:
  void lock();
  void unlock() { mutex_.unlock(); }
  void lock_serving();

 private:
  std::mutex mutex_;
  std::atomic<uint32_t> waiting_{0};
};

/// Any thread may call any method except serve(), which belongs to one thread.
class Owner : public std::enable_shared_from_this<Owner> {
 public:
  static Result<std::shared_ptr<Owner>> listen(const TransportOptions& options);
  Owner(UniqueFd listener, Address address);
  ~Owner() { close(); }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  const Address& address() const { return address_; }
  /// Sends device memory through `bounce` from now on. Null changes nothing.
  Status send_through(const std::shared_ptr<Bounce>& bounce);
  /// Exports the range until the region is destroyed. Connections that are being sent from it then are cut.
  std::unique_ptr<MemoryRegion> register_region(const MemoryRange& range, Access access);
  void revoke(uint64_t key);
  Invitation admit(ReaderId reader);
  /// On return nothing is sent under a guard that fails now, nor to connections admitted under this id.
  /// Returns true if there were any.
  bool fence(uint64_t connection_id);

  /// Returns how many readers are connected.
  size_t num_served();
  int serve_fd() const { return epoll_.get(); }
  void serve();
  void close();

 private:
  /// A socket that has not yet shown its invitation.
  struct PendingSocket {
    UniqueFd socket;
    int64_t deadline_ns;
    Hello hello;
    size_t got;
  };

  void dispatch(uint64_t serial);
  void serve(uint64_t serial, ServedConnection& connection);
  void defer_settle(uint64_t serial, ServedConnection& connection);
  void on_defer_timer();
  void await_copies(uint64_t serial);
  void on_copy_timer();
  void serve_again(std::vector<uint64_t>& serials);
  void accept_ready();
  void listen_again(bool enabled);
  void on_hello_timer();
  void read_hello(uint64_t serial);
  Verdict authenticate(const Hello& hello, uint64_t& connection_id);
  void dismiss(std::map<uint64_t, PendingSocket>::iterator pending);
  void dismiss_oldest() { dismiss(pending_.begin()); }
  size_t cut_served(const std::function<bool(const ServedConnection&)>& which);
  Status open_descriptors();
  bool watch(int fd, uint32_t events, uint64_t serial);
  bool rewatch(int fd, uint32_t events, uint64_t serial);
  void unwatch(int fd);

  const Address address_;
  UniqueFd listener_, epoll_, hello_timer_, defer_timer_, copy_timer_;

  ServeLock lock_;  // guards everything below
  ExportedRegions regions_;
  DeviceSource device_;  // empty: no device memory is exported
  Invitations invitations_{kInvitationLimits};
  uint64_t next_serial_;                       // names a socket to epoll; never used twice
  std::map<uint64_t, PendingSocket> pending_;  // oldest first
  std::unordered_map<uint64_t, ServedConnection> served_;
  std::vector<uint64_t> deferred_, copying_, waking_;  // serials
  uint32_t vain_polls_ = 0;                            // at copies, one after the other
};

}  // namespace kvlink::tcp

// SPDX-License-Identifier: Apache-2.0
// The owner's side of the tcp transport: a listening socket, lent regions, admitted connections.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/unique_fd.h"
#include "transport_api/options.h"
#include "transport_api/transport.h"
#include "transports/tcp/admission.h"
#include "transports/tcp/owner_connection.h"
#include "transports/tcp/socket.h"

namespace kvlink::tcp {

/// A mutex whose one busy user lets everybody else go first, so that fence() never starves behind serve().
class ServeLock {
 public:
  void lock();
  void unlock() { mutex_.unlock(); }
  void lock_serving();

 private:
  std::mutex mutex_;
  std::atomic<uint32_t> waiting_{0};
};

/// Any thread may call anything but serve(), which belongs to one thread.
class Owner : public std::enable_shared_from_this<Owner> {
 public:
  static Result<std::shared_ptr<Owner>> listen(const TransportOptions& options);
  Owner(UniqueFd listener, Address address);
  ~Owner() { close(); }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  const Address& address() const { return address_; }
  /// From now on device memory is sent by way of `bounce`; null changes nothing.
  Status send_through(const std::shared_ptr<Bounce>& bounce);
  /// Until the region is destroyed. What is being sent from it then is cut off with its connection.
  std::unique_ptr<MemoryRegion> lend(const MemoryRange& range, Access access);
  void take_back(uint64_t key);
  Invitation admit(ReaderId reader);
  /// On return nothing is sent under a guard that fails now, nor to who was admitted under this id. True when
  /// anything was.
  bool fence(uint64_t connection_id);

  int serve_fd() const { return epoll_.get(); }
  void serve();
  void close();

 private:
  /// A socket that has not shown its invitation yet.
  struct Newcomer {
    UniqueFd socket;
    int64_t deadline_ns;
    Hello hello;
    size_t got;
  };

  void dispatch(uint64_t serial);
  void serve(uint64_t serial, ServedConnection& connection);
  void hush(uint64_t serial, ServedConnection& connection);
  void on_hush_timer();
  void await_copies(uint64_t serial);
  void on_copy_timer();
  void serve_again(std::vector<uint64_t>& serials);
  void welcome();
  void listen_again(bool enabled);
  void on_greeting_timer();
  void greet(uint64_t serial);
  Verdict judge(const Hello& hello, uint64_t& connection_id);
  void dismiss(std::map<uint64_t, Newcomer>::iterator newcomer);
  void dismiss_oldest() { dismiss(newcomers_.begin()); }
  size_t cut_served(const std::function<bool(const ServedConnection&)>& which);
  Status open_descriptors();
  bool watch(int fd, uint32_t events, uint64_t serial);
  bool rewatch(int fd, uint32_t events, uint64_t serial);
  void unwatch(int fd);

  const Address address_;
  UniqueFd listener_, epoll_, greeting_timer_, hush_timer_, copy_timer_;

  ServeLock lock_;  // guards everything below
  LentRegions regions_;
  DeviceSource device_;  // empty: none is lent
  Invitations invitations_;
  uint64_t next_serial_;                    // names a socket to epoll; never used twice
  std::map<uint64_t, Newcomer> newcomers_;  // oldest first
  std::unordered_map<uint64_t, ServedConnection> served_;
  std::vector<uint64_t> hushed_, copying_, waking_;  // serials
  uint32_t vain_looks_ = 0;                          // at copies, one after the other
};

}  // namespace kvlink::tcp

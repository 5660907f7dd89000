// SPDX-License-Identifier: Apache-2.0
// The ports of a worker. If a port's device is removed, the port is released. It is reopened, with all that
// was registered, once the device is back.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "transport_api/transport.h"
#include "transports/verbs/nic.h"
#include "transports/verbs/queue_pair.h"
#include "transports/verbs/rdma_cm.h"
#include "transports/verbs/registration.h"
#include "transports/verbs/reopen_backoff.h"
#include "transports/verbs/work_requests.h"

namespace kvlink::verbs {

inline constexpr uint32_t kServedWrs = 4;       // of each queue pair that a reader reads through
inline constexpr uint32_t kServedCqes = 16384;  // of all of them at a port

/// A port whose device is present. The device is closed when this object, its queue pairs and its users are
/// gone.
struct OpenPort {
  std::shared_ptr<Nic> nic;
  std::shared_ptr<CmPort> cm;                         // null: it is connected to directly
  std::unique_ptr<Cq> cq;                             // of queue pairs that readers read through
  std::vector<std::shared_ptr<const Memory>> memory;  // in order of registration; for Ports alone
};

/// Any thread may call any method except poll() and release(), which belong to one thread.
class Ports {
 public:
  using Open = std::function<Result<std::shared_ptr<Nic>>(const NicPlace&)>;
  enum class Change : uint8_t { kNone, kLost, kBack };

  /// `open` opens a port again.
  static Result<std::unique_ptr<Ports>> make(std::vector<std::shared_ptr<Nic>> nics, Open open);
  ~Ports() { close(); }

  size_t size() const { return ports_.size(); }
  /// Returns null while the port is away. Do not keep it, because the port may go.
  std::shared_ptr<const OpenPort> at(size_t port) const;
  Status why_away(size_t port) const;
  /// Returns the address of all ports. Absent ports keep their last address.
  Address address() const;
  std::vector<PortState> states() const;
  /// Returns whether a thread is closing or reopening the port.
  bool busy(size_t port) const;

  /// Registers memory at every port and returns its index. Ports that do not reach it, and that no user
  /// named, are left out for good, unless none does. Else refuses it (kTransportUnavailable). The peer words
  /// come before the first poll(); no port is left out behind them. What is refused counts as well.
  Result<size_t> register_everywhere(const MemoryRange& range, Rights rights);
  /// On return no NIC accesses the memory. Its index stays unused.
  void drop(size_t region);
  std::vector<PortState> left_out() const;
  std::vector<LocalRegion> locals(size_t port) const;
  RemoteKey key(size_t region, Access access) const;

  /// kLost: its device is gone. The holder of its queue pairs drops them and calls release(). kBack: the port
  /// may be used again, with other keys.
  Change poll(size_t port, int64_t now);
  /// Returns at once. The device is only asked to end the queue pairs `served`, then closed.
  void release(size_t port, int64_t now, std::vector<std::unique_ptr<Qp>> served = {});
  /// Idempotent. Waits for an attempt to reopen a port.
  void close();

 private:
  struct Range {
    MemoryRange at;  // empty: refused or dropped
    Rights rights;
    std::shared_ptr<const std::vector<UniqueFd>> dmabufs;  // descriptors of its own: those of `at`
  };
  struct Port {
    NicPlace place;
    std::shared_ptr<OpenPort> opened;  // null: away
    NicAddress address;
    std::string away = {};
    uint32_t times_away = 0;
    std::vector<std::weak_ptr<Nic>> left = {};  // connections may hold it for a while
    ReopenBackoff backoff = {};                 // from here on of the one thread
    std::future<void> leaving = {};
    std::future<Result<std::shared_ptr<OpenPort>>> attempt = {};
  };

  explicit Ports(Open open) : open_(std::move(open)) {}
  static Result<std::shared_ptr<OpenPort>> equip(std::shared_ptr<Nic> nic);
  static Result<std::shared_ptr<OpenPort>> reopen(const Open& open, const NicPlace& place,
                                                  const std::vector<Range>& ranges);
  Change settle(Port& port, int64_t now);
  Result<std::vector<std::shared_ptr<const Memory>>> register_at_ports(const MemoryRange& range,
                                                                       Rights rights);
  Result<std::vector<std::shared_ptr<const Memory>>> register_one_by_one(const MemoryRange& range,
                                                                         Rights rights, Status why_not_all);

  const Open open_;
  mutable std::mutex mutex_;  // guards everything below
  std::vector<Port> ports_;   // of which the number is constant once all is registered
  std::vector<Range> ranges_;
  std::vector<PortState> left_out_;
  bool final_ = false;  // the ports
  bool closed_ = false;
};

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
// One port of an RDMA device, opened: its protection domain, limits, address and asynchronous events.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "memory/memory_range.h"
#include "transport_api/options.h"
#include "transport_api/traits.h"
#include "transports/verbs/device_presence.h"
#include "transports/verbs/gid.h"
#include "transports/verbs/ibverbs_api.h"
#include "transports/verbs/protocol.h"

namespace kvlink::verbs {

/// How queue pairs are connected: by exchanged addresses, or by the kernel's connection manager
/// (transports/verbs/rdma_cm.h).
enum class Way : uint8_t { kByDevice, kDirect, kCm };

/// Packets of this size cross every Ethernet.
inline constexpr ibv_mtu kSmallMtu = IBV_MTU_1024;

struct NicPlace {
  std::string device;
  uint8_t port = 1;
  uint32_t mbps = 1;
  bool named = false;  // by a user
};

/// Settings of its queue pairs.
struct Manner {
  Way way = Way::kByDevice;
  uint8_t traffic_class = 0;  // of what they send; with RoCE v2 the IP header's
  uint8_t service_level = 0;
  uint16_t pkey = 0;  // 0: the first of the port's table
  GidChoice gid = {};
  /// A port that goes down does not end its connections: their readers wait as long as for a silent owner.
  bool rides_out_link_loss = false;
};

/// Any thread, except that take_events() and poll() are for one thread.
class Nic {
 public:
  struct Limits {
    uint32_t max_sge = 1;    // local segments of one read
    uint32_t max_wrs = 16;   // of one send queue
    uint32_t reads_out = 1;  // RDMA reads under way that one queue pair may start, and answer
    uint32_t reads_in = 1;
    uint64_t max_read_bytes = 1 << 30;
    int max_cqes = 16;
  };

  /// Refuses (kTransportUnavailable) a port without an address, and a device without reliable connections.
  static Result<std::shared_ptr<Nic>> open(const Api& api, const NicPlace& place, const Manner& manner);
  Nic(const Api& api, Owned<ibv_context> context, Owned<ibv_pd> pd, NicPlace place, const Manner& manner,
      DeviceNode node = {});
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  const Api& api() const { return api_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  const std::string& name() const { return name_; }  // "mlx5_0:1"
  uint8_t port() const { return place_.port; }
  const NicPlace& place() const { return place_; }
  const Manner& manner() const { return manner_; }
  uint16_t pkey_index() const { return pkey_index_.load(std::memory_order_relaxed); }
  const Limits& limits() const { return limits_; }
  bool ethernet() const { return ethernet_; }
  /// Untested for lack of such a driver. It connects only by the manager. A read lands in one segment, of
  /// memory that the network may write. Its GID is no address.
  bool iwarp() const { return iwarp_; }
  bool by_cm() const { return by_cm_; }
  /// Whether packets need a global route header within the subnet, too.
  bool needs_grh() const { return needs_grh_; }
  /// Returns the completion vector of the next completion queue that somebody sleeps on: all in turn.
  int next_vector();
  /// Asks the device, because the MTU of an interface changes without an event.
  ibv_mtu mtu() const;
  uint8_t gid_index() const;
  NicAddress address() const;
  /// Records that packets of more than kSmallMtu do not arrive from a peer's port.
  void note_large_lost(const Gid& peer);
  /// Returns whether that was so lately.
  bool loses_large(const Gid& peer) const;

  /// Returns whether the port can carry bytes now, or the reason and the fix.
  Status check() const;
  /// Counts the events that ended every connection of this port: it went down, the device failed, its address
  /// changed.
  uint32_t losses() const { return losses_.load(std::memory_order_acquire); }
  Status why_lost() const;
  std::string how_lost() const;
  /// Returns whether its device failed for good or was removed. Nothing new may be asked of it.
  bool removed() const { return removed_.load(std::memory_order_acquire); }
  /// Detects a removal without an event.
  void poll();
  /// Marks the device as removed, because another event reported it. For the same thread.
  void remove();

  /// This descriptor is readable when take_events() has work.
  int events_fd() const { return context_->async_fd; }
  void take_events();

  /// Registers one memory region over [base, base + bytes), named `iova` on the wire. Returns null with errno
  /// if refused.
  ibv_mr* register_memory(std::byte* base, uint64_t bytes, uint64_t iova, int access) const;
  /// Registers a part of a dma-buf. The driver maps all of it.
  ibv_mr* register_dmabuf(int fd, uint64_t offset, uint64_t bytes, uint64_t iova, int access) const;
  /// The same, if reaches_directly(), through the device's own PCIe function beside the GPU.
  ibv_mr* register_pcie_dmabuf(int fd, uint64_t offset, uint64_t bytes, uint64_t iova, int access) const;
  /// Whether it has such a function (ConnectX-8, Direct NIC).
  bool reaches_directly() const;

 private:
  Status choose_way(ibv_transport_type transport);
  Status query(ibv_port_attr& port) const;
  Status find_limits();
  Status find_address();
  Status find_partition();
  void lose(const std::string& why, bool for_good = false);
  void take_event(const ibv_async_event& event);
  void look_at_tables();

  const Api& api_;
  Owned<ibv_context> context_;
  Owned<ibv_pd> pd_;
  const NicPlace place_;
  const std::string name_;
  const Manner manner_;
  const DeviceNode node_;
  Limits limits_;
  bool ethernet_ = false, iwarp_ = false, by_cm_ = false, needs_grh_ = false;
  std::atomic<uint16_t> pkey_index_{0};
  std::atomic<uint32_t> num_vectors_given_{0};

  std::atomic<uint32_t> losses_{0};
  std::atomic<bool> removed_{false};
  mutable std::mutex mutex_;  // guards everything below
  std::string why_lost_;
  ibv_mtu mtu_ = IBV_MTU_1024;
  uint32_t lid_ = 0;
  uint8_t gid_index_ = 0;
  Gid gid_{};
  uint32_t net_bits_ = 0;
  std::map<Gid, int64_t> small_until_;
};

/// Opens a port that can carry bytes now, or returns the reason and the fix.
Result<std::shared_ptr<Nic>> open_active(const Api& api, const NicPlace& place, const Manner& manner);
/// Opens ports named "device" or "device:port" as in KVLINK_NICS, each once, and at most kMaxNics. Adds to
/// `left_out` those that no user named and that do not open. Without a list, opens every active port of this
/// machine. Refuses an empty list.
Result<std::vector<std::shared_ptr<Nic>>> open_nics(const Api& api,
                                                    const std::optional<std::vector<NicOption>>& wanted,
                                                    const Manner& manner, std::vector<PortState>& left_out);
}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/nic.h"

#include <endian.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <tuple>

#include "base/clock.h"
#include "base/sys.h"
#include "transports/verbs/devices.h"
#include "transports/verbs/gid.h"
#include "transports/verbs/queue_pair.h"
#include "transports/verbs/rdma_cm.h"

namespace kvlink::verbs {
namespace {

constexpr const char* kNodes = "/sys/class/infiniband_verbs/";  // one of each device, gone before it is
constexpr uint32_t kMostSge = 32;
constexpr uint32_t kMostWrs = 1024;
// The bytes of a send queue, of which a peer has several. A work request takes a multiple of 64, with 32 for
// itself and 16 for each segment: this has room for 227 reads of 32 segments, where 16 are in flight.
constexpr uint64_t kSendQueueBytes = 128 << 10;
constexpr uint64_t kWrBytes = 32, kSgeBytes = 16, kWrAlignment = 64;
constexpr int64_t kSmallForNs = 600'000'000'000;  // then a switch may have been set right
constexpr size_t kMostNoted = 4096;
constexpr int kMostGids = 256;       // a queue pair names its own in 8 bits
constexpr uint32_t kMostReads = 16;  // more in flight on one queue pair gained nothing where it was measured

std::string errno_text(int error) { return std::strerror(error); }

Status unusable(const std::string& nic, const std::string& what, const std::string& fix) {
  return Status::Unavailable("RDMA port " + nic + " " + what, fix);
}

bool is_link_local(const Gid& gid) { return gid[0] == '\xfe' && gid[1] == '\x80'; }

/// Ranks addresses: routable before local, IPv4 before IPv6; 0 is no address. With InfiniBand a GID by which
/// routers forward comes first.
int rank(const Gid& gid, bool infiniband) {
  if (std::all_of(gid.begin(), gid.end(), [](char byte) { return byte == 0; })) return 0;
  if (infiniband && flid_of(gid) != 0) return 5;
  if (is_v4(gid)) return gid[12] == 127 ? 2 : 4;
  return is_link_local(gid) ? 1 : 3;
}

constexpr uint32_t kSubnetBits = 64;  // of a GID of InfiniBand
constexpr int kHere = 10;             // before every address of another network namespace

/// Returns LocalIp::net_bits of a GID that is an address of this machine, or 0.
uint32_t net_bits_of(const Gid& gid, const std::vector<LocalIp>& here) {
  const auto found = std::ranges::find(here, gid, &LocalIp::ip);
  return found == here.end() ? 0 : found->net_bits;
}

/// A NIC that pods share shows the addresses of all of them. A link-local one does not tell whose it is.
int rank_of_roce(const Gid& gid, const std::vector<LocalIp>& here) {
  const bool ours = here.empty() || is_link_local(gid) || net_bits_of(gid, here) > 0;
  const int alone = rank(gid, false);
  return alone > 0 && ours ? kHere + alone : alone;
}

}  // namespace

Result<std::shared_ptr<Nic>> Nic::open(const Api& api, const NicPlace& place, const Manner& manner) {
  const std::string& device = place.device;
  const DeviceList list(api);
  ibv_device* const found = list.find(device);
  if (!found) {
    if (place.named) {
      return Status{Code::kConfig, "this process finds no RDMA device " + device,
                    list.count > 0 ? "choose from " + list.names() : kOpenNodes};
    }
    return Status::Unavailable("this process may not open RDMA device " + device, kOpenNodes);
  }
  if (Status status = connects_reliably(api, *found); !status.ok()) return status;
  Owned<ibv_context> context(api.open_device(found), api.close_device);
  if (!context) {
    return Status::Unavailable("opening RDMA device " + device + ": " + errno_text(errno), kOpenNodes);
  }
  Owned<ibv_pd> pd(api.alloc_pd(context.get()), api.dealloc_pd);
  if (!pd) {
    return Status::Unavailable("RDMA device " + device + " gives no protection domain: " + errno_text(errno),
                               {});
  }
  if (!sys::set_nonblocking(context->async_fd)) {
    return sys::transport_failed("opening RDMA device " + device, "fcntl", errno);
  }
  auto nic = std::make_shared<Nic>(api, std::move(context), std::move(pd), place, manner,
                                   DeviceNode(std::string(kNodes) + found->dev_name));
  if (Status status = nic->choose_way(found->transport_type); !status.ok()) return status;
  if (Status status = nic->find_limits(); !status.ok()) return status;
  if (Status status = nic->find_address(); !status.ok()) return status;
  if (Status status = nic->find_partition(); !status.ok()) return status;
  return nic;
}

Nic::Nic(const Api& api, Owned<ibv_context> context, Owned<ibv_pd> pd, NicPlace place, const Manner& manner,
         DeviceNode node)
    : api_(api),
      context_(std::move(context)),
      pd_(std::move(pd)),
      place_(std::move(place)),
      name_(place_.device + ":" + std::to_string(place_.port)),
      manner_(manner),
      node_(std::move(node)) {}

Status Nic::choose_way(ibv_transport_type transport) {
  const Way wish = manner_.way;
  iwarp_ = transport == IBV_TRANSPORT_IWARP;
  by_cm_ = wish == Way::kCm || (wish == Way::kByDevice && iwarp_);
  if (iwarp_ && !by_cm_) {
    return unusable(name_, "is iWARP, which connects through rdma_cm alone", "unset KVLINK_RDMA_CONNECT");
  }
  if (by_cm_ && (manner_.pkey != 0 || !manner_.gid.text.empty())) {
    return Status::Config("rdma_cm chooses the partition and the GID of " + name_ +
                          " by its IP address: unset KVLINK_RDMA_PKEY and KVLINK_RDMA_GID");
  }
  return by_cm_ ? cm_usable() : Status{};
}

Status Nic::find_limits() {
  ibv_device_attr device{};
  if (const int error = api_.query_device(context_.get(), &device)) {
    return unusable(name_, "cannot be asked for its limits: " + errno_text(error), {});
  }
  if (place_.port > device.phys_port_cnt) {
    return Status::Config("RDMA device " + place_.device + " has " + std::to_string(device.phys_port_cnt) +
                          " ports; there is no port " + std::to_string(place_.port));
  }
  const auto within = [](int limit, uint32_t most) {
    return static_cast<uint32_t>(std::clamp<int64_t>(limit, 1, most));
  };
  const int sge_rd = device.max_sge_rd > 0 ? device.max_sge_rd : device.max_sge;
  limits_.max_sge = within(std::min(sge_rd, device.max_sge), kMostSge);
  if (iwarp_) limits_.max_sge = 1;  // whatever it says: a read response names one place
  const uint64_t wr_bytes = kWrBytes + limits_.max_sge * kSgeBytes;
  const uint64_t fit = kSendQueueBytes / ((wr_bytes + kWrAlignment - 1) / kWrAlignment * kWrAlignment);
  limits_.max_wrs = within(device.max_qp_wr, static_cast<uint32_t>(std::min<uint64_t>(fit, kMostWrs)));
  limits_.reads_out = within(device.max_qp_init_rd_atom, kMostReads);
  limits_.reads_in = within(device.max_qp_rd_atom, kMostReads);
  limits_.max_cqes = device.max_cqe;
  ibv_port_attr port{};
  if (Status status = query(port); !status.ok()) return status;
  limits_.max_read_bytes = std::max<uint64_t>(port.max_msg_sz, 1);
  ethernet_ = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  needs_grh_ = !ethernet_ && (port.flags & IBV_QPF_GRH_REQUIRED) != 0;
  return {};
}

Status Nic::query(ibv_port_attr& port) const {
  const int error = api_.query_port(context_.get(), place_.port, &port);
  if (error == 0) return {};
  return unusable(name_, "does not answer: " + errno_text(error), "was the device removed? see dmesg");
}

Status Nic::find_address() {
  ibv_port_attr port{};
  if (Status status = query(port); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  mtu_ = port.active_mtu;
  lid_ = port.lid;
  const bool roce = ethernet_ && !iwarp_;
  const std::string types = port_folder(api_, place_.device, place_.port) + "gid_attrs/types/";
  const auto gid_type = [&](int index) { return read_line(types + std::to_string(index)); };
  const bool infiniband = !ethernet_ && !iwarp_;
  const auto here = roce && api_.local_ips ? api_.local_ips() : std::vector<LocalIp>();
  int best = 0;
  std::string there_are;
  for (int index = 0; index < std::min(port.gid_tbl_len, kMostGids); ++index) {
    ibv_gid found;
    if (api_.query_gid(context_.get(), place_.port, index, &found) != 0) continue;
    Gid gid;
    std::memcpy(gid.data(), found.raw, gid.size());
    if (rank(gid, infiniband) == 0 || (roce && gid_type(index) != "RoCE v2")) continue;
    there_are += (there_are.empty() ? "" : ", ") + ip_text(gid) + " (index " + std::to_string(index) + ")";
    const int rank_here = roce ? rank_of_roce(gid, here) : rank(gid, infiniband);
    if (rank_here <= best || !manner_.gid.allows(index, gid)) continue;
    best = rank_here;
    gid_index_ = static_cast<uint8_t>(index);
    gid_ = gid;
    net_bits_ = infiniband ? kSubnetBits : net_bits_of(gid, here);
  }
  if (best == 0 && !there_are.empty()) {
    return unusable(name_, "has no GID " + manner_.gid.text + ": it has " + there_are,
                    "set KVLINK_RDMA_GID to the index, the address or the subnet of one of them");
  }
  if (needs_grh_ && best == 0) {
    return unusable(name_, "needs global routes and has no GID", "check the subnet manager");
  }
  if (roce && best == 0) {
    return unusable(name_, "has no RoCE v2 address",
                    "give its network interface an IP address and bring it up");
  }
  return {};
}

/// The highest bit of a key is the kind of membership. Two limited members do not reach each other.
Status Nic::find_partition() {
  if (manner_.pkey == 0) return {};
  ibv_port_attr port{};
  if (Status status = query(port); !status.ok()) return status;
  constexpr uint16_t kFull = 0x8000, kKey = 0x7fff;
  bool found = false;
  std::string there_are;
  for (uint16_t index = 0; index < port.pkey_tbl_len; ++index) {
    __be16 raw = 0;
    if (api_.query_pkey(context_.get(), place_.port, index, &raw) != 0) continue;
    const uint16_t key = be16toh(raw);
    if ((key & kKey) == 0) continue;
    char text[8];
    std::snprintf(text, sizeof text, "0x%04x", key);
    there_are += (there_are.empty() ? "" : ", ") + std::string(text);
    if ((key & kKey) != (manner_.pkey & kKey) || (found && !(key & kFull))) continue;
    found = true;
    pkey_index_ = index;
  }
  if (found) return {};
  char text[8];
  std::snprintf(text, sizeof text, "0x%04x", manner_.pkey);
  return unusable(name_, std::string("is not in the partition ") + text + ": it is in " + there_are,
                  "set KVLINK_RDMA_PKEY to one of them, or have the subnet manager add it");
}

int Nic::next_vector() {
  const auto count = static_cast<uint32_t>(std::max(context_->num_comp_vectors, 1));
  return static_cast<int>(num_vectors_given_.fetch_add(1, std::memory_order_relaxed) % count);
}

ibv_mtu Nic::mtu() const {
  ibv_port_attr port{};
  if (query(port).ok()) return port.active_mtu;
  std::lock_guard lock(mutex_);
  return mtu_;
}

uint8_t Nic::gid_index() const {
  std::lock_guard lock(mutex_);
  return gid_index_;
}

NicAddress Nic::address() const {
  std::lock_guard lock(mutex_);
  return {name_, ethernet_, lid_, gid_, by_cm_, place_.mbps, net_bits_};
}

void Nic::note_large_lost(const Gid& peer) {
  std::lock_guard lock(mutex_);
  const int64_t now = now_ns();
  std::erase_if(small_until_, [now](const auto& noted) { return noted.second <= now; });
  if (small_until_.size() < kMostNoted) small_until_[peer] = now + kSmallForNs;
}

bool Nic::loses_large(const Gid& peer) const {
  std::lock_guard lock(mutex_);
  const auto noted = small_until_.find(peer);
  return noted != small_until_.end() && noted->second > now_ns();
}

Status Nic::check() const {
  if (removed()) return unusable(name_, "is gone", "it rejoins automatically once it is back; see dmesg");
  ibv_port_attr port{};
  if (Status status = query(port); !status.ok()) return status;
  if (port.state == IBV_PORT_ACTIVE) return {};
  return unusable(name_, "is down",
                  ethernet_ ? "ip link set its interface up, or check the cable"
                            : "check the cable and the subnet manager");
}

Status Nic::why_lost() const { return Status::Unreachable("RDMA port " + name_ + " " + how_lost()); }

std::string Nic::how_lost() const {
  std::lock_guard lock(mutex_);
  return why_lost_;
}

void Nic::lose(const std::string& why, bool for_good) {
  {
    std::lock_guard lock(mutex_);
    why_lost_ = why;
  }
  if (for_good) removed_.store(true, std::memory_order_release);
  losses_.fetch_add(1, std::memory_order_acq_rel);
}

void Nic::poll() {
  if (!removed() && node_.removed()) remove();
}

void Nic::remove() {
  if (!removed()) lose("was removed", true);
}

void Nic::take_events() {
  ibv_async_event event;
  while (api_.get_async_event(context_.get(), &event) == 0) {
    take_event(event);
    api_.ack_async_event(&event);
  }
}

void Nic::take_event(const ibv_async_event& event) {
  const auto name = [&] { return std::string(api_.event_type_str(event.event_type)); };
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_PATH_MIG_ERR:
      // It is alive, because destroying a queue pair waits until its events are acknowledged.
      static_cast<Qp*>(event.element.qp->qp_context)->fail(event.event_type);
      return;
    case IBV_EVENT_DEVICE_FATAL:
      return lose("failed: " + name(), true);
    case IBV_EVENT_PORT_ERR:
      if (event.element.port_num == place_.port && !manner_.rides_out_link_loss) lose("went down");
      return;
    case IBV_EVENT_GID_CHANGE:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_PORT_ACTIVE:  // its tables may have changed meanwhile
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
      if (event.element.port_num == place_.port) look_at_tables();
      return;
    default:
      return;
  }
}

/// A queue pair names its GID and its partition by their indices in these tables.
void Nic::look_at_tables() {
  const auto named = [this] {
    const NicAddress at = address();
    return std::tuple(at.gid, at.lid, gid_index(), pkey_index());
  };
  const auto before = named();
  if (!check().ok() || !find_address().ok() || !find_partition().ok()) return;
  if (named() != before) lose("has a new address");
}

ibv_mr* Nic::register_memory(std::byte* base, uint64_t bytes, uint64_t iova, int access) const {
  return api_.reg_mr_iova2(pd_.get(), base, bytes, iova, static_cast<unsigned>(access));
}

ibv_mr* Nic::register_dmabuf(int fd, uint64_t offset, uint64_t bytes, uint64_t iova, int access) const {
  if (api_.reg_dmabuf_mr) return api_.reg_dmabuf_mr(pd_.get(), offset, bytes, iova, fd, access);
  errno = ENOTSUP;
  return nullptr;
}

ibv_mr* Nic::register_pcie_dmabuf(int fd, uint64_t offset, uint64_t bytes, uint64_t iova, int access) const {
  return api_.mlx5->reg_dmabuf_mr(pd_.get(), offset, bytes, iova, fd, access, kDataDirect);
}

bool Nic::reaches_directly() const {
  char path[PATH_MAX];
  return api_.mlx5 && api_.mlx5->get_data_direct_sysfs_path(context_.get(), path, sizeof path) == 0;
}

Result<std::shared_ptr<Nic>> open_active(const Api& api, const NicPlace& place, const Manner& manner) {
  auto nic = Nic::open(api, place, manner);
  if (!nic.ok()) return nic;
  Status status = (*nic)->check();
  if (!status.ok()) return status;
  return nic;
}

}  // namespace kvlink::verbs

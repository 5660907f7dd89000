// SPDX-License-Identifier: Apache-2.0
// A made-up machine with RDMA devices: what the kernel shows of them, and a libibverbs that opens them. One
// at a time: the library's functions carry no object.
#pragma once

#include <arpa/inet.h>
#include <endian.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "cpp/transports/verbs/made_up_channels.h"
#include "transports/verbs/gid.h"
#include "transports/verbs/nic.h"

namespace kvlink::verbs::testing {

struct MadeUpPort {
  ibv_port_attr attributes{};
  std::vector<std::pair<std::string, std::string>> gids;  // address, type
  std::vector<uint16_t> pkeys{0xffff};
};

class MadeUpMachine;
inline MadeUpMachine* machine = nullptr;

class MadeUpMachine {
 public:
  MadeUpMachine() {
    machine = this;
    std::filesystem::create_directories(root_ / "dev");
    api.sysfs = (root_ / "sys").string() + "/";
    api.nodes = (root_ / "dev").string() + "/";
    fill_api();
  }
  ~MadeUpMachine() {
    std::filesystem::remove_all(root_);
    machine = nullptr;
  }
  MadeUpMachine(const MadeUpMachine&) = delete;
  MadeUpMachine& operator=(const MadeUpMachine&) = delete;

  /// Adds a device with one active port.
  MadeUpPort& add(const std::string& name, ibv_transport_type transport, uint8_t link_layer,
                  const std::string& vendor = "0x15b3") {
    ibv_device& device = devices_.emplace_back();
    device.transport_type = transport;
    std::strncpy(device.name, name.c_str(), sizeof device.name - 1);
    std::strncpy(device.dev_name, ("uverbs-" + name).c_str(), sizeof device.dev_name - 1);
    write("dev/uverbs-" + name, "");
    write("sys/" + name + "/device/vendor", vendor);
    write("sys/" + name + "/ports/1/state", "4: ACTIVE");
    MadeUpPort& port = ports_.emplace_back();
    port.attributes.state = IBV_PORT_ACTIVE;
    port.attributes.active_mtu = IBV_MTU_4096;
    port.attributes.max_msg_sz = 1 << 30;
    port.attributes.link_layer = link_layer;
    return port;
  }
  MadeUpPort& add_infiniband(const std::string& name, uint16_t lid = 7) {
    MadeUpPort& port = add(name, IBV_TRANSPORT_IB, IBV_LINK_LAYER_INFINIBAND);
    port.attributes.lid = lid;
    port.gids = {{"fe80::1", "IB/RoCE v1"}};
    return port;
  }
  MadeUpPort& add_roce(const std::string& name) {
    MadeUpPort& port = add(name, IBV_TRANSPORT_IB, IBV_LINK_LAYER_ETHERNET);
    port.gids = {{"::ffff:10.0.0.1", "RoCE v2"}};
    return port;
  }
  void add_efa(const std::string& name) {
    add(name, IBV_TRANSPORT_UNSPECIFIED, IBV_LINK_LAYER_UNSPECIFIED, "0x1d0f").gids = {{"fe80::2", ""}};
  }
  /// Writes a file of the kernel.
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
  }
  void remove(const std::string& path) { std::filesystem::remove(root_ / path); }

  Result<std::shared_ptr<Nic>> open(const std::string& name, const Manner& manner = {}) {
    show_gids();
    return open_active(api, {name, 1, 100'000}, manner);
  }
  /// Writes the types of all GIDs where the kernel has them.
  void show_gids() {
    for (size_t i = 0; i < ports_.size(); ++i) {
      for (size_t gid = 0; gid < ports_[i].gids.size(); ++gid) {
        write("sys/" + std::string(devices_[i].name) + "/ports/1/gid_attrs/types/" + std::to_string(gid),
              ports_[i].gids[gid].second);
      }
    }
  }

  static constexpr uint32_t kVendor = 0x15b3;

  Api api{};
  int num_opened = 0, num_open = 0;
  int max_sge = 30, max_wrs = 8192;
  int num_vectors = 1;
  uint32_t ece_known = 0;  // options of the device
  std::vector<std::pair<const ibv_qp*, ibv_ece>> ece_set;
  bool reaches_directly = false, refuses_direct = false;
  struct Attached {
    int fd;
    bool directly;
    int rights;
  };
  std::vector<Attached> attached;      // dma-bufs
  std::vector<int> vectors;            // of completion queues
  std::vector<ibv_qp_init_attr> made;  // queue pairs
  std::vector<ibv_qp_attr> modified;

 private:
  struct Context : ibv_context {
    MadeUpPort* at;
  };

  static MadeUpPort& at(ibv_context* context) { return *static_cast<Context*>(context)->at; }

  static ibv_mr* attach(int fd, bool directly, int rights) {
    machine->attached.push_back({fd, directly, rights});
    auto* const mr = new ibv_mr{};
    mr->lkey = mr->rkey = static_cast<uint32_t>(fd);
    return mr;
  }

  void fill_api() {
    fill_devices();
    fill_queues();
    fill_registrations();
  }

  void fill_devices() {
    api.get_device_list = [](int* count) -> ibv_device** {
      machine->listed_.clear();
      for (ibv_device& device : machine->devices_) machine->listed_.push_back(&device);
      *count = static_cast<int>(machine->listed_.size());
      return machine->listed_.data();
    };
    api.free_device_list = [](ibv_device**) {};
    api.get_device_name = [](ibv_device* device) -> const char* { return device->name; };
    api.open_device = [](ibv_device* device) -> ibv_context* {
      auto* const context = new Context{};
      context->device = device;
      context->num_comp_vectors = machine->num_vectors;
      context->async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
      for (size_t i = 0; i < machine->devices_.size(); ++i) {
        if (&machine->devices_[i] == device) context->at = &machine->ports_[i];
      }
      ++machine->num_opened;
      ++machine->num_open;
      return context;
    };
    api.close_device = [](ibv_context* context) {
      UniqueFd(context->async_fd).reset();
      --machine->num_open;
      delete static_cast<Context*>(context);
      return 0;
    };
    api.alloc_pd = [](ibv_context* context) {
      auto* const pd = new ibv_pd{};
      pd->context = context;
      return pd;
    };
    api.dealloc_pd = [](ibv_pd* pd) {
      delete pd;
      return 0;
    };
    api.query_device = [](ibv_context*, ibv_device_attr* device) {
      *device = {};
      device->phys_port_cnt = 1;
      device->max_sge = device->max_sge_rd = machine->max_sge;
      device->max_qp_wr = machine->max_wrs;
      device->max_qp_rd_atom = device->max_qp_init_rd_atom = 16;
      device->max_cqe = 1 << 20;
      return 0;
    };
    api.query_port = [](ibv_context* context, uint8_t, ibv_port_attr* port) {
      *port = at(context).attributes;
      port->gid_tbl_len = static_cast<int>(at(context).gids.size());
      port->pkey_tbl_len = static_cast<uint16_t>(at(context).pkeys.size());
      return 0;
    };
    api.query_gid = [](ibv_context* context, uint8_t, int index, ibv_gid* gid) {
      *gid = {};
      return ::inet_pton(AF_INET6, at(context).gids[static_cast<size_t>(index)].first.c_str(), gid->raw) == 1
                 ? 0
                 : -1;
    };
    api.query_pkey = [](ibv_context* context, uint8_t, int index, __be16* key) {
      *key = htobe16(at(context).pkeys[static_cast<size_t>(index)]);
      return 0;
    };
  }

  void fill_queues() {
    make_up_channels(api);
    api.create_cq = [](ibv_context*, int, void*, ibv_comp_channel*, int vector) {
      machine->vectors.push_back(vector);
      return new ibv_cq{};
    };
    api.destroy_cq = [](ibv_cq* cq) {
      delete cq;
      return 0;
    };
    api.create_qp = [](ibv_pd* pd, ibv_qp_init_attr* wanted) {
      machine->made.push_back(*wanted);
      auto* const qp = new ibv_qp{};
      qp->context = pd->context;
      qp->qp_num = 17;
      return qp;
    };
    api.query_ece = [](ibv_qp* qp, ibv_ece* ece) {
      if (machine->ece_known == 0) return EOPNOTSUPP;
      *ece = {kVendor, machine->ece_known, 0};
      for (const auto& [which, set] : machine->ece_set) {
        if (which == qp) ece->options = set.options & machine->ece_known;
      }
      return 0;
    };
    api.set_ece = [](ibv_qp* qp, ibv_ece* ece) {
      if (machine->ece_known == 0) return EOPNOTSUPP;
      if (ece->vendor_id != kVendor) return EINVAL;
      machine->ece_set.emplace_back(qp, *ece);
      return 0;
    };
    api.modify_qp = [](ibv_qp*, ibv_qp_attr* attributes, int) {
      machine->modified.push_back(*attributes);
      return 0;
    };
    api.destroy_qp = [](ibv_qp* qp) {
      delete qp;
      return 0;
    };
    api.get_async_event = [](ibv_context*, ibv_async_event*) { return -1; };
    api.event_type_str = [](ibv_event_type) { return "an event"; };
    api.wc_status_str = [](ibv_wc_status) { return "a status"; };
  }

  void fill_registrations() {
    static const Mlx5Api mlx5{
        [](ibv_pd*, uint64_t, size_t, uint64_t, int fd, int rights, int access) -> ibv_mr* {
          EXPECT_EQ(access, kDataDirect);
          if (machine->refuses_direct) return nullptr;
          return attach(fd, true, rights);
        },
        [](ibv_context*, char*, size_t) { return machine->reaches_directly ? 0 : ENODEV; }};
    api.mlx5 = &mlx5;
    api.reg_dmabuf_mr = [](ibv_pd*, uint64_t, size_t, uint64_t, int fd, int rights) {
      return attach(fd, false, rights);
    };
    api.dereg_mr = [](ibv_mr* mr) {
      delete mr;
      return 0;
    };
  }

  const std::filesystem::path root_ =
      std::filesystem::temp_directory_path() / ("kvlink-machine-" + std::to_string(::getpid()));
  std::deque<ibv_device> devices_;
  std::deque<MadeUpPort> ports_;
  std::vector<ibv_device*> listed_;
};

}  // namespace kvlink::verbs::testing

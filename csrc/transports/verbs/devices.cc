// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/devices.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/read_file.h"

namespace kvlink::verbs {
namespace {

constexpr const char* kAmazon = "0x1d0f";

/// Returns whether a port is active as far as the kernel shows it, and its device may be opened.
Status may_open(const Api& api, const ibv_device& device, uint8_t port) {
  if (Status status = connects_reliably(api, device); !status.ok()) return status;
  const std::string name = std::string(device.name) + ":" + std::to_string(port);
  const std::string state = read_line(port_folder(api, device.name, port) + "state");
  if (state.rfind(std::to_string(IBV_PORT_ACTIVE), 0) != 0) {
    return Status::Unavailable("RDMA port " + name + " is down",
                               "check the cable, its interface or the subnet manager");
  }
  const std::string node = api.nodes + device.dev_name;
  if (::access(node.c_str(), R_OK | W_OK) == 0) return {};
  return Status::Unavailable(
      "RDMA device " + std::string(device.name) + ": " + node + ": " + std::strerror(errno), kOpenNodes);
}

}  // namespace

std::string read_line(const std::string& path) {
  const std::string content = read_file(path).value_or("");  // fails for an empty entry
  std::string_view text = content;
  return std::string(take_line(text));
}

std::string port_folder(const Api& api, const std::string& device, uint8_t port) {
  return api.sysfs + device + "/ports/" + std::to_string(port) + "/";
}

bool has_port(const Api& api, const std::string& device, uint8_t port) {
  return port != 0 && ::access(port_folder(api, device, port).c_str(), F_OK) == 0;
}

/// Amazon's adapters have datagrams of their own (SRD) and no reliable connections. Other devices without
/// them have no transport type that is known here, either.
Status connects_reliably(const Api& api, const ibv_device& device) {
  const std::string name = device.name;
  if (read_line(api.sysfs + name + "/device/vendor") == kAmazon) {
    return Status::Unavailable(
        "RDMA device " + name + " is an Elastic Fabric Adapter (EFA), which has no reliable connections",
        "pulls take tcp here; leave EFA out of KVLINK_NICS");
  }
  if (device.transport_type == IBV_TRANSPORT_IB || device.transport_type == IBV_TRANSPORT_IWARP) return {};
  return Status::Unavailable(
      "RDMA device " + name + " is neither InfiniBand, RoCE nor iWARP and has no reliable connections",
      "leave it out of KVLINK_NICS");
}

Status no_device() {
  return Status::Unavailable(
      "this machine has no RDMA device",
      "load the NIC's driver (modprobe mlx5_ib), or try soft-RoCE: rdma link add rxe0 type rxe netdev eth0");
}

Status find_active_port(const Api& api) {
  const DeviceList list(api);
  Status last = no_device();
  for (int i = 0; i < list.count; ++i) {
    for (uint8_t port = 1; has_port(api, list.devices[i]->name, port); ++port) {
      last = may_open(api, *list.devices[i], port);
      if (last.ok()) return last;
    }
  }
  return last;
}

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
// The RDMA devices of this machine, as the library and the kernel's files show them without opening one.
#pragma once

#include <string>

#include "base/status.h"
#include "transports/verbs/ibverbs_api.h"

namespace kvlink::verbs {

/// The fix where a device may not be opened.
inline constexpr const char* kOpenNodes =
    "make /dev/infiniband/uverbs* readable and writable for this user; in a container pass "
    "--device=/dev/infiniband";

/// The devices that the library lists.
struct DeviceList {
  const Api& api;
  int count = 0;
  ibv_device** devices;

  explicit DeviceList(const Api& api) : api(api), devices(api.get_device_list(&count)) {}
  ~DeviceList() {
    if (devices) api.free_device_list(devices);
  }
  ibv_device* find(const std::string& name) const {
    for (int i = 0; i < count; ++i) {
      if (name == api.get_device_name(devices[i])) return devices[i];
    }
    return nullptr;
  }
  std::string names() const {
    std::string all;
    for (int i = 0; i < count; ++i) all += (i ? ", " : "") + std::string(api.get_device_name(devices[i]));
    return all.empty() ? "none" : all;
  }
};

/// Returns the first line of a file of the kernel, or "".
std::string read_line(const std::string& path);
/// Returns the folder of a port, with a slash behind it.
std::string port_folder(const Api& api, const std::string& device, uint8_t port);
bool has_port(const Api& api, const std::string& device, uint8_t port);
/// Refuses (kTransportUnavailable) a device without reliable connections, by name.
Status connects_reliably(const Api& api, const ibv_device& device);
Status no_device();
/// Returns whether this machine has an active port that this process may open, or the reason and the fix.
Status find_active_port(const Api& api);

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
#include <charconv>

#include "transports/verbs/devices.h"
#include "transports/verbs/nic.h"

namespace kvlink::verbs {
namespace {

Result<std::pair<std::string, uint8_t>> parse_name(const std::string& name) {
  const size_t colon = name.find(':');
  if (colon == std::string::npos) return std::pair{name, uint8_t{1}};
  uint8_t port = 0;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + colon + 1, end, port);
  if (error != std::errc{} || stop != end || port == 0) {
    return Status::Config("\"" + name + "\" names no RDMA port: write mlx5_0 or mlx5_0:1");
  }
  return std::pair{name.substr(0, colon), port};
}

Result<std::vector<std::shared_ptr<Nic>>> open_all(const Api& api, const Manner& manner) {
  std::vector<std::shared_ptr<Nic>> nics;
  const DeviceList list(api);
  Status last = no_device();
  for (int i = 0; i < list.count && nics.size() < kMaxNics; ++i) {
    const std::string device = api.get_device_name(list.devices[i]);
    for (uint8_t port = 1; has_port(api, device, port) && nics.size() < kMaxNics; ++port) {
      auto nic = open_active(api, {device, port, NicOption{}.mbps}, manner);
      nic.ok() ? nics.push_back(std::move(*nic)) : static_cast<void>(last = nic.status());
    }
  }
  if (nics.empty()) return last;
  return nics;
}

Result<std::shared_ptr<Nic>> open_wanted(const Api& api, const NicOption& option,
                                         const std::pair<std::string, uint8_t>& name, const Manner& manner,
                                         size_t num_open) {
  if (num_open < kMaxNics)
    return open_active(api, {name.first, name.second, option.mbps, option.named}, manner);
  const std::string what = option.port + " is beyond the " + std::to_string(kMaxNics) + " ports of a worker";
  return option.named ? Status{Code::kConfig, what, "name fewer in KVLINK_NICS"}
                      : Status::Unavailable(what, {});
}

}  // namespace

Result<std::vector<std::shared_ptr<Nic>>> open_nics(const Api& api,
                                                    const std::optional<std::vector<NicOption>>& wanted,
                                                    const Manner& manner, std::vector<PortState>& left_out) {
  if (!wanted) return open_all(api, manner);
  if (wanted->empty()) {
    return Status::Unavailable("no RDMA port of this machine serves this pool", "kvlink topology says why");
  }
  std::vector<std::shared_ptr<Nic>> nics;
  Status last;
  for (const NicOption& option : *wanted) {
    const auto parsed = parse_name(option.port);
    if (!parsed.ok()) return parsed.status();
    auto nic = open_wanted(api, option, *parsed, manner, nics.size());
    if (nic.ok()) {
      nics.push_back(std::move(*nic));
      continue;
    }
    last = nic.status();
    if (option.named || last.code() == Code::kConfig) return last;
    left_out.push_back({.name = option.port, .away = last.sentence(), .left_out = true});
  }
  if (nics.empty()) return last;
  return nics;
}

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
// verbs: RDMA READ over reliable connected queue pairs, libibverbs opened at run time.
#include <algorithm>
#include <cmath>

#include "transports/factories.h"
#include "transports/verbs/endpoint.h"
#include "transports/verbs/owner.h"
#include "transports/verbs/ports.h"
#include "transports/verbs/rails.h"

namespace kvlink {
namespace verbs {
namespace {

// One queue pair keeps at most 16 reads under way: with blocks of 4 KiB over 5 us that is 13 GB/s.
constexpr size_t kQpsPerRail = 4;
constexpr size_t kMaxLanes = 64;  // of one connection

/// Returns the path for Traits::path.
std::string path_of(const NicAddress& here, const NicAddress& there, const Rail& rail,
                    const std::vector<Rail>& all) {
  std::string path = here.name + "->" + there.name;
  if (all.size() == 1) return path;
  double mbps = 0;
  for (const Rail& each : all) mbps += each.mbps;
  return path.append(" ").append(std::to_string(std::lround(100 * rail.mbps / mbps))).append("%");
}

Rights rights_of(Access access) {
  switch (access) {
    case Access::kRead:
      return Rights::kPeersRead;
    case Access::kReadWords:
      return Rights::kPeersReadWords;
    case Access::kWriteWords:
      return Rights::kPeersWriteWords;
    case Access::kLocal:
      break;
  }
  return Rights::kLocal;
}

class Region final : public MemoryRegion {
 public:
  Region(std::shared_ptr<const Ports> ports, size_t region, Access access)
      : ports_(std::move(ports)), region_(region), access_(access) {}

  std::string remote_key() const override { return ports_->key(region_, access_).format(); }

 private:
  const std::shared_ptr<const Ports> ports_;
  const size_t region_;
  const Access access_;
};

class VerbsTransport final : public Transport {
 public:
  VerbsTransport(std::shared_ptr<Ports> ports, std::unique_ptr<Owner> owner, LivenessTimeouts timeouts)
      : ports_(std::move(ports)), owner_(std::move(owner)), timeouts_(timeouts) {}
  ~VerbsTransport() override { close(); }

  std::string address() const override { return ports_->address().format(); }

  const Capabilities& capabilities() const override { return capabilities_; }
  std::vector<PortState> ports() const override { return ports_->states(); }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>&) override {
    const auto region = ports_->register_everywhere(range, rights_of(access));
    if (!region.ok()) return region.status();
    if (access == Access::kLocal) return nullptr;
    return std::make_unique<Region>(ports_, *region, access);
  }
  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes) override;
  Result<std::string> accept(ReaderId reader, std::string_view hello) override {
    const auto parsed = Hello::parse(hello);
    if (!parsed) return Status::AccessDenied("the reader's hello is malformed");
    return owner_->admit(reader, *parsed);
  }
  bool fence(uint64_t connection_id) override { return owner_->fence(connection_id); }

  void serve() override { owner_->serve(); }
  void close() override {
    owner_->close();
    ports_->close();
  }

 private:
  Result<std::unique_ptr<Endpoint>> open_lane(const Address& own, const Address& owner,
                                              const std::vector<Rail>& rails, const Rail& rail);

  const std::shared_ptr<Ports> ports_;
  const std::unique_ptr<Owner> owner_;
  const LivenessTimeouts timeouts_;
  const Capabilities capabilities_{.reaches_device_memory = true,
                                   .needs_registered_target = true,
                                   .can_fence = true,
                                   .serve_fd = owner_->serve_fd()};
};

/// Lane i runs on the i-th rail, in rounds; lane 0, which carries small pulls alone, on the widest.
Result<Endpoints> VerbsTransport::open(std::string_view owner_address, uint32_t num_lanes) {
  const auto address = Address::parse(owner_address);
  if (!address) return Status::Unavailable("the owner's RDMA address is malformed", {});
  const Address own = ports_->address();
  const std::vector<Rail> rails = pair(own.nics, address->nics);
  if (rails.empty()) return why_apart(own.nics.front(), address->nics.front());
  const size_t chosen = rails.size() * std::clamp(kMaxLanes / rails.size(), size_t{1}, kQpsPerRail);
  return open_lanes(num_lanes > 0 ? num_lanes : static_cast<uint32_t>(chosen), [&](uint32_t lane) {
    return open_lane(own, *address, rails, rails[lane % rails.size()]);
  });
}

Result<std::unique_ptr<Endpoint>> VerbsTransport::open_lane(const Address& own, const Address& owner,
                                                            const std::vector<Rail>& rails,
                                                            const Rail& rail) {
  const auto opened = ports_->at(rail.local);
  if (!opened) return ports_->why_away(rail.local);
  if (Status status = opened->nic->check(); !status.ok()) return status;
  const std::string path = path_of(own.nics[rail.local], owner.nics[rail.remote], rail, rails);
  return open_endpoint(opened->nic, opened->cm, {rail.remote, path, rail.mbps / rails.front().mbps},
                       ports_->locals(rail.local), timeouts_);
}

Result<Way> parse_way(const std::string& name) {
  if (name.empty()) return Way::kByDevice;
  if (name == "direct") return Way::kDirect;
  if (name == "cm") return Way::kCm;
  return Status::Config("\"" + name + "\" is not a way to connect RDMA: write direct or cm, or nothing");
}

}  // namespace
}  // namespace verbs

Status verbs_probe() {
  const auto api = verbs::api();
  return api.ok() ? verbs::find_active_port(**api) : api.status();
}

Result<std::unique_ptr<Transport>> verbs_make(const TransportOptions& options) {
  const auto way = verbs::parse_way(options.rdma_connect);
  if (!way.ok()) return way.status();
  const verbs::Manner manner{*way, options.rdma_traffic_class};
  const auto api = verbs::api();
  if (!api.ok()) return api.status();
  auto nics = verbs::open_nics(**api, options.nics, manner);
  if (!nics.ok()) return nics.status();
  auto ports = verbs::Ports::make(std::move(*nics), [manner, &api = **api](const verbs::NicPlace& place) {
    return verbs::open_active(api, place, manner);
  });
  if (!ports.ok()) return ports.status();
  const verbs::LivenessTimeouts timeouts;
  auto owner = verbs::Owner::make(**ports, timeouts);
  if (!owner.ok()) return owner.status();
  return std::make_unique<verbs::VerbsTransport>(std::move(*ports), std::move(*owner), timeouts);
}

}  // namespace kvlink

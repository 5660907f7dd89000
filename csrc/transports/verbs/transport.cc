// SPDX-License-Identifier: Apache-2.0
// verbs: RDMA READ over reliable connected queue pairs, libibverbs opened at run time.
#include <algorithm>
#include <cmath>

#include "transports/factories.h"
#include "transports/verbs/devices.h"
#include "transports/verbs/endpoint.h"
#include "transports/verbs/owner.h"
#include "transports/verbs/ports.h"
#include "transports/verbs/rails.h"

namespace kvlink {
namespace verbs {
namespace {

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
  Region(std::shared_ptr<Ports> ports, size_t region, Access access)
      : ports_(std::move(ports)), region_(region), access_(access) {}
  ~Region() override { ports_->drop(region_); }

  std::string remote_key() const override { return ports_->key(region_, access_).format(); }

 private:
  const std::shared_ptr<Ports> ports_;
  const size_t region_;
  const Access access_;
};

class VerbsTransport final : public Transport {
 public:
  VerbsTransport(std::shared_ptr<Ports> ports, std::unique_ptr<Owner> owner, LivenessTimeouts timeouts,
                 uint32_t qps_per_rail, std::vector<PortState> unopened)
      : unopened_(std::move(unopened)),
        ports_(std::move(ports)),
        owner_(std::move(owner)),
        timeouts_(timeouts),
        qps_per_rail_(qps_per_rail) {}
  ~VerbsTransport() override { close(); }

  std::string address() const override { return ports_->address().format(); }

  const Capabilities& capabilities() const override { return capabilities_; }
  std::vector<PortState> ports() const override {
    std::vector<PortState> all = ports_->states(), unregistered = ports_->left_out();
    all.insert(all.end(), unopened_.begin(), unopened_.end());
    std::move(unregistered.begin(), unregistered.end(), std::back_inserter(all));
    return all;
  }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>&) override {
    const size_t num_ports = ports_->size();
    const auto region = ports_->register_everywhere(range, rights_of(access));
    if (ports_->size() != num_ports) owner_->watch_again();
    if (!region.ok()) return region.status();
    if (access == Access::kLocal) return nullptr;
    return std::make_unique<Region>(ports_, *region, access);
  }
  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes, const WorkerRun&) override;
  std::vector<Result<std::string>> accept(ReaderId reader, Hellos hellos) override {
    return owner_->admit(reader, hellos);
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

  const std::vector<PortState> unopened_;
  const std::shared_ptr<Ports> ports_;
  const std::unique_ptr<Owner> owner_;
  const LivenessTimeouts timeouts_;
  const size_t qps_per_rail_;
  const Capabilities capabilities_{.reaches_device_memory = true,
                                   .needs_registered_target = true,
                                   .can_fence = true,
                                   .serve_fd = owner_->serve_fd()};
};

/// Lane i runs on the i-th rail, in rounds; lane 0, which carries small pulls alone, on the widest.
Result<Endpoints> VerbsTransport::open(std::string_view owner_address, uint32_t num_lanes, const WorkerRun&) {
  const auto address = Address::parse(owner_address);
  if (!address) return Status::Unavailable("the owner's RDMA address is malformed", {});
  const Address own = ports_->address();
  const std::vector<Rail> rails = pair(own.nics, address->nics);
  if (rails.empty()) return why_apart(own.nics.front(), address->nics.front());
  const size_t chosen = rails.size() * std::clamp(kMaxLanes / rails.size(), size_t{1}, qps_per_rail_);
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
  const NicAddress& there = owner.nics[rail.remote];
  const std::string path = path_of(own.nics[rail.local], there, rail, rails);
  return open_endpoint(opened->nic, opened->cm,
                       {rail.remote, path, rail.mbps / rails.front().mbps, there.gid},
                       ports_->locals(rail.local), timeouts_);
}

/// A reader that gives up before its NIC has resent a packet in vain never waits for what it set.
Result<LivenessTimeouts> parse_timeouts(const RdmaOptions& options) {
  const LivenessTimeouts timeouts{options.timeout, options.retries, options.silence_ns};
  const auto ms = [](int64_t ns) { return std::to_string(ns / 1'000'000); };
  if (timeouts.timeout > 31 || timeouts.retries > 7) {
    return Status::Config("the timeout of a queue pair is at most 31, and it retries at most 7 times");
  }
  if (timeouts.resend_ns() <= timeouts.silence_ns) return timeouts;
  return Status{Code::kConfig,
                "a NIC resends for " + ms(timeouts.resend_ns()) + " ms, and readers give up after " +
                    ms(timeouts.silence_ns) + " ms",
                "lower KVLINK_RDMA_TIMEOUT or KVLINK_RDMA_RETRIES, or raise KVLINK_RDMA_SILENCE_S"};
}

Result<Way> parse_way(const std::string& name) {
  if (name.empty()) return Way::kByDevice;
  if (name == "direct") return Way::kDirect;
  if (name == "cm") return Way::kCm;
  return Status::Config("\"" + name + "\" is not a way to connect RDMA: write direct or cm, or nothing");
}

Result<Manner> parse_manner(const RdmaOptions& options) {
  const auto way = parse_way(options.connect);
  if (!way.ok()) return way.status();
  auto gid = GidChoice::parse(options.gid);
  if (!gid.ok()) return gid.status();
  if (options.service_level > 15) return Status::Config("a service level is at most 15");
  return Manner{*way,         options.traffic_class, options.service_level,
                options.pkey, std::move(*gid),       options.silence_ns > kSilenceNs};
}

}  // namespace
}  // namespace verbs

Status verbs_probe() {
  const auto api = verbs::api();
  return api.ok() ? verbs::find_active_port(**api) : api.status();
}

Result<std::unique_ptr<Transport>> verbs_make(const TransportOptions& options) {
  const auto manner = verbs::parse_manner(options.rdma);
  if (!manner.ok()) return manner.status();
  const auto timeouts = verbs::parse_timeouts(options.rdma);
  if (!timeouts.ok()) return timeouts.status();
  const auto api = verbs::api();
  if (!api.ok()) return api.status();
  std::vector<PortState> left_out;
  auto nics = verbs::open_nics(**api, options.nics, *manner, left_out);
  if (!nics.ok()) return nics.status();
  auto ports =
      verbs::Ports::make(std::move(*nics), [manner = *manner, &api = **api](const verbs::NicPlace& place) {
        return verbs::open_active(api, place, manner);
      });
  if (!ports.ok()) return ports.status();
  auto owner = verbs::Owner::make(**ports, *timeouts);
  if (!owner.ok()) return owner.status();
  return std::make_unique<verbs::VerbsTransport>(std::move(*ports), std::move(*owner), *timeouts,
                                                 options.rdma.qps_per_rail, std::move(left_out));
}

}  // namespace kvlink

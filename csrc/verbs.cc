// SPDX-License-Identifier: Apache-2.0
// verbs: RDMA READ over reliable connected queue pairs, libibverbs opened at run time.
#include <algorithm>
#include <cmath>
#include <mutex>

#include "transports.h"
#include "verbs_endpoint.h"
#include "verbs_memory.h"
#include "verbs_owner.h"
#include "verbs_rails.h"

namespace kvlink {
namespace verbs {
namespace {

// One queue pair keeps at most 16 reads under way: with blocks of 4 KiB over 5 us that is 13 GB/s.
constexpr size_t kQpsPerRail = 4;
constexpr size_t kMaxLanes = 64;  // of one connection

/// As Endpoint::path has it.
std::string path_of(const Nic& nic, const NicAddress& there, const Rail& rail, const std::vector<Rail>& all) {
  std::string path = nic.name() + "->" + there.name;
  if (all.size() == 1) return path;
  double mbps = 0;
  for (const Rail& each : all) mbps += each.mbps;
  return path.append(" ").append(std::to_string(std::lround(100 * rail.mbps / mbps))).append("%");
}

class Region final : public MemoryRegion {
 public:
  Region(std::shared_ptr<const Memory> memory, size_t num_nics, Access access)
      : memory_(std::move(memory)), num_nics_(num_nics), access_(access) {}

  std::string remote_key() const override {
    RemoteKey key{access_, memory_->iova(), memory_->range().bytes, kSliceBytes, {}};
    for (size_t nic = 0; nic < num_nics_; ++nic) key.rkeys.push_back(memory_->rkeys(nic));
    return key.format();
  }

 private:
  const std::shared_ptr<const Memory> memory_;
  const size_t num_nics_;
  const Access access_;
};

class VerbsTransport final : public Transport {
 public:
  VerbsTransport(std::vector<std::shared_ptr<Nic>> nics, std::vector<std::shared_ptr<CmPort>> cm_ports,
                 std::unique_ptr<Owner> owner, Patience patience)
      : nics_(std::move(nics)),
        cm_ports_(std::move(cm_ports)),
        owner_(std::move(owner)),
        patience_(patience) {}
  ~VerbsTransport() override { close(); }

  std::string address() const override { return own_address().format(); }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access) override {
    auto memory = enlist(range, access == Access::kRead ? Rights::kPeersRead : Rights::kPeersReadWrite);
    if (!memory.ok()) return memory.status();
    return std::unique_ptr<MemoryRegion>(new Region(*memory, nics_.size(), access));
  }
  bool reaches_devices() const override { return true; }
  Status register_scratch(const MemoryRange& range) override {
    return enlist(range, Rights::kLocal).status();
  }

  uint32_t lanes_to(std::string_view owner_address) const override;
  Result<std::unique_ptr<Endpoint>> open(std::string_view owner_address, uint32_t lane) override;
  Result<std::string> accept(uint64_t connection_id, std::string_view hello) override {
    const auto parsed = Hello::parse(hello);
    if (!parsed) return Status::AccessDenied("the reader's hello is malformed");
    return owner_->admit(connection_id, *parsed);
  }
  bool can_fence() const override { return true; }
  bool fence(uint64_t connection_id) override { return owner_->fence(connection_id); }

  int serve_fd() const override { return owner_->serve_fd(); }
  void serve() override { owner_->serve(); }
  void close() override {
    owner_->close();
    std::lock_guard lock(mutex_);
    memory_.clear();
  }

 private:
  Result<std::shared_ptr<const Memory>> enlist(const MemoryRange& range, Rights rights) {
    Result<std::shared_ptr<const Memory>> memory = Memory::enlist(nics_, range, rights);
    std::lock_guard lock(mutex_);
    if (memory.ok()) memory_.push_back(*memory);
    return memory;
  }
  std::vector<LocalRegion> locals(size_t nic) const;
  Address own_address() const;

  const std::vector<std::shared_ptr<Nic>> nics_;
  const std::vector<std::shared_ptr<CmPort>> cm_ports_;  // of nics_, null for those connected directly
  const std::unique_ptr<Owner> owner_;
  const Patience patience_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Memory>> memory_;  // in order of registration
};

std::vector<LocalRegion> VerbsTransport::locals(size_t nic) const {
  std::lock_guard lock(mutex_);
  std::vector<LocalRegion> regions;
  for (const auto& memory : memory_)
    regions.push_back({memory->range().base, memory->range().bytes, memory->iova(), memory->lkeys(nic)});
  return regions;
}

Address VerbsTransport::own_address() const {
  Address address;
  for (const auto& nic : nics_) address.nics.push_back(nic->address());
  return address;
}

uint32_t VerbsTransport::lanes_to(std::string_view owner_address) const {
  const auto address = Address::parse(owner_address);
  const size_t rails = address ? pair(own_address().nics, address->nics).size() : 0;
  if (rails == 0) return 1;  // open() says what is wrong
  return static_cast<uint32_t>(rails * std::clamp(kMaxLanes / rails, size_t{1}, kQpsPerRail));
}

/// Lane i runs on the i-th rail, in rounds; lane 0, which carries small pulls alone, on the widest.
Result<std::unique_ptr<Endpoint>> VerbsTransport::open(std::string_view owner_address, uint32_t lane) {
  const auto address = Address::parse(owner_address);
  if (!address) return Status::Unavailable("the owner's RDMA address is malformed", {});
  const Address own = own_address();
  const std::vector<Rail> rails = pair(own.nics, address->nics);
  if (rails.empty()) return why_apart(own.nics.front(), address->nics.front());
  const Rail& rail = rails[lane % rails.size()];
  const std::shared_ptr<Nic>& nic = nics_[rail.local];
  if (Status status = nic->check(); !status.ok()) return status;
  const std::string path = path_of(*nic, address->nics[rail.remote], rail, rails);
  return open_endpoint(nic, cm_ports_[rail.local], {rail.remote, path, rail.mbps / rails.front().mbps},
                       locals(rail.local), patience_);
}

Result<Way> parse_way(const std::string& name) {
  if (name.empty()) return Way::kByDevice;
  if (name == "direct") return Way::kDirect;
  if (name == "cm") return Way::kCm;
  return Status::Config("\"" + name + "\" is no way to connect RDMA: write direct or cm, or nothing");
}

}  // namespace
}  // namespace verbs

Status verbs_probe() {
  const auto nics = verbs::open_nics({}, verbs::Way::kByDevice);
  return nics.status();
}

Result<std::unique_ptr<Transport>> verbs_make(const TransportOptions& options) {
  const auto way = verbs::parse_way(options.rdma_connect);
  if (!way.ok()) return way.status();
  auto nics = verbs::open_nics(options.nics, *way);
  if (!nics.ok()) return nics.status();
  std::vector<std::shared_ptr<verbs::CmPort>> cm_ports;
  for (const auto& nic : *nics) {
    auto cm = nic->by_cm() ? verbs::open_cm_port(nic) : std::shared_ptr<verbs::CmPort>();
    if (!cm.ok()) return cm.status();
    cm_ports.push_back(*cm);
  }
  const verbs::Patience patience;
  auto owner = verbs::Owner::make(*nics, cm_ports, patience);
  if (!owner.ok()) return owner.status();
  return std::unique_ptr<Transport>(
      new verbs::VerbsTransport(std::move(*nics), std::move(cm_ports), std::move(*owner), patience));
}

}  // namespace kvlink

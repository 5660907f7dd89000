// SPDX-License-Identifier: Apache-2.0
// fabric: reads by a provider of libfabric, for networks that verbs does not reach. Readers also keep a tcp
// connection to the owner: it tells each end whether the other lives, which no reliable datagram
// endpoint does, and the owner whether anybody may read.
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "base/blob.h"
#include "base/clock.h"
#include "base/host_identity.h"
#include "base/sys.h"
#include "transports/fabric/endpoint.h"
#include "transports/factories.h"
#include "transports/registry.h"
#include "transports/tcp/owner.h"
#include "transports/tcp/reader.h"

namespace kvlink {
namespace fabric {
namespace {

constexpr size_t kServedOps = 16;  // of the queue that peers' operations do not complete into
constexpr int kMostRounds = 64;    // of progress in one serve()
// While readers are connected. New ones make the provider connect, which its descriptor may not tell.
constexpr int64_t kTickNs = 1'000'000, kNewNs = 2'000'000'000, kIdleTickNs = 100'000'000, kAtOnceNs = 1;

/// Peers read through it.
struct Served {
  std::shared_ptr<Domain> domain;
  Port port;
};

class Region final : public MemoryRegion {
 public:
  Region(std::shared_ptr<const Served> served, Owned<fid_mr> made, const RemoteRegion& region)
      : served_(std::move(served)), made_(std::move(made)), key_(format_key(region)) {}

  std::string remote_key() const override { return key_; }

 private:
  const std::shared_ptr<const Served> served_;  // destroyed after made_
  const Owned<fid_mr> made_;
  const std::string key_;
};

class FabricTransport final : public Transport {
 public:
  FabricTransport(std::shared_ptr<Served> served, std::shared_ptr<tcp::Owner> liveness)
      : served_(std::move(served)), liveness_(std::move(liveness)) {}
  ~FabricTransport() override { close(); }

  Status start();
  std::string address() const override { return address_; }
  const Capabilities& capabilities() const override { return capabilities_; }
  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>& through) override;
  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes, const WorkerRun& owner) override;
  std::vector<Result<std::string>> accept(ReaderId reader, Hellos hellos) override;
  /// No provider takes back the right to read from one peer, so reads of ended leases fail by validation.
  bool fence(uint64_t) override { return false; }
  void serve() override;
  void close() override;

 private:
  Domain& domain() const { return *served_->domain; }
  Status open_descriptors();
  bool drive() const;
  void set_timer(int64_t ns);

  const std::shared_ptr<Served> served_;  // regions that outlive the transport hold it too
  const std::shared_ptr<tcp::Owner> liveness_;
  std::string address_;
  const uint64_t nonce_ = random_u64();
  Owned<fid_mr> proof_region_;
  RemoteRegion proof_;
  UniqueFd epoll_, timer_;
  Capabilities capabilities_;
  // The serving thread's own.
  size_t num_readers_ = 0;
  int64_t changed_ns_ = 0, tick_ns_ = 0;
};

Status FabricTransport::open_descriptors() {
  static const std::string kDoing = "fabric cannot serve";
  Result<UniqueFd> epoll = sys::epoll(kDoing), timer = sys::timer(kDoing);
  if (!epoll.ok()) return epoll.status();
  if (!timer.ok()) return timer.status();
  epoll_ = std::move(*epoll);
  timer_ = std::move(*timer);
  const int queue = domain().manual() ? served_->port.wait_fd : -1;
  const bool watched = sys::watch(epoll_.get(), liveness_->serve_fd(), EPOLLIN, 0) &&
                       sys::watch(epoll_.get(), timer_.get(), EPOLLIN, 0) &&
                       (queue < 0 || sys::watch(epoll_.get(), queue, EPOLLIN, 0));
  return watched ? Status{} : sys::transport_failed(kDoing, "epoll_ctl", errno);
}

Status FabricTransport::start() {
  if (Status status = open_descriptors(); !status.ok()) return status;
  const auto name = domain().name_of(served_->port);
  if (!name.ok()) return name.status();
  address_ = Address{domain().provider(), *name, liveness_->address().encode()}.format();
  MemoryRange nonce;
  nonce.base = reinterpret_cast<std::byte*>(const_cast<uint64_t*>(&nonce_));  // peers only read it
  nonce.bytes = sizeof nonce_;
  auto made = domain().export_memory(nonce, Access::kReadWords, served_->port, proof_);
  if (!made.ok()) return made.status();
  proof_region_ = std::move(*made);
  capabilities_ = {.needs_registered_target = domain().needs_local(), .serve_fd = epoll_.get()};
  return {};
}

Result<std::unique_ptr<MemoryRegion>> FabricTransport::register_memory(const MemoryRange& range,
                                                                       Access access,
                                                                       const std::shared_ptr<Bounce>&) {
  if (range.base == nullptr || range.bytes == 0) return Status::Config("fabric cannot register empty memory");
  if (range.device) return Status::Unavailable("fabric does not reach GPU memory", "use verbs or tcp");
  if (Status status = domain().add_local(range); !status.ok()) return status;
  if (access == Access::kLocal) return nullptr;
  RemoteRegion region;
  auto made = domain().export_memory(range, access, served_->port, region);
  if (!made.ok()) return made.status();
  return std::make_unique<Region>(served_, std::move(*made), region);
}

Result<Endpoints> FabricTransport::open(std::string_view owner_address, uint32_t num_lanes,
                                        const WorkerRun&) {
  const auto address = Address::parse(owner_address);
  if (!address) return Status::Unavailable("the owner's fabric address is malformed", {});
  const auto liveness = tcp::Address::parse(address->liveness);
  if (!liveness.ok()) return liveness.status();
  if (address->provider != domain().provider()) {
    return Status::Unavailable("the owner uses the provider " + address->provider +
                                   " of libfabric, and this worker " + domain().provider(),
                               "set KVLINK_FABRIC_PROVIDER to the same at both ends");
  }
  return open_lanes(num_lanes, [&](uint32_t lane) {
    return open_endpoint(served_->domain, *address, tcp::make_reader(*liveness, lane));
  });
}

std::vector<Result<std::string>> FabricTransport::accept(ReaderId reader, Hellos hellos) {
  return accept_each(hellos, [&](std::string_view hello) -> Result<std::string> {
    if (Status known = tcp::check_hello(hello); !known.ok()) return known;
    return Reply{proof_, nonce_, liveness_->admit(reader).encode()}.format();
  });
}

/// Lets the provider answer peers. Returns false if it has more to do.
bool FabricTransport::drive() const {
  fid_cq* const queue = served_->port.cq.get();
  for (int round = 0; round < kMostRounds; ++round) {
    std::array<fi_cq_entry, kServedOps> entries;
    fi_cq_err_entry error{};
    if (::fi_cq_read(queue, entries.data(), entries.size()) == -FI_EAVAIL) ::fi_cq_readerr(queue, &error, 0);
    fid* queues[] = {&queue->fid};
    if (served_->port.wait_fd < 0 || ::fi_trywait(domain().fabric(), queues, 1) == FI_SUCCESS) return true;
  }
  return false;
}

void FabricTransport::set_timer(int64_t ns) {
  if (ns == tick_ns_) return;
  tick_ns_ = ns;
  const itimerspec every{{ns / 1'000'000'000, ns % 1'000'000'000}, {ns / 1'000'000'000, ns % 1'000'000'000}};
  ::timerfd_settime(timer_.get(), 0, &every, nullptr);
}

void FabricTransport::serve() {
  liveness_->serve();
  uint64_t ticks;
  [[maybe_unused]] const ssize_t ticked = ::read(timer_.get(), &ticks, sizeof ticks);
  if (!domain().manual()) return;
  const bool rests = drive();
  const int64_t now = now_ns();
  const size_t num_readers = liveness_->num_served();
  if (num_readers > num_readers_) changed_ns_ = now;
  num_readers_ = num_readers;
  const bool often = served_->port.wait_fd < 0 || now - changed_ns_ < kNewNs;
  set_timer(!rests ? kAtOnceNs : num_readers == 0 ? 0 : often ? kTickNs : kIdleTickNs);
}

void FabricTransport::close() {
  liveness_->close();
  proof_region_.reset();
  served_->port.close();
  timer_.reset();
  epoll_.reset();
}

}  // namespace
}  // namespace fabric

Status fabric_probe() {
  const auto domain = fabric::Domain::open({});
  return domain.status();
}

Result<std::vector<FabricProvider>> fabric_providers(const std::string& host) {
  TransportOptions options;
  options.host = host;
  const auto states = fabric::Domain::list(options);
  if (!states.ok()) return states.status();
  std::vector<FabricProvider> all;
  for (const auto& state : *states) all.push_back({state.name, state.facts, state.why_not.sentence()});
  return all;
}

Result<std::unique_ptr<Transport>> fabric_make(const TransportOptions& options) {
  auto domain = fabric::Domain::open(options);
  if (!domain.ok()) return domain.status();
  auto port = (*domain)->open_port(fabric::kServedOps);
  if (!port.ok()) return port.status();
  TransportOptions at_any_port = options;
  at_any_port.port = 0;  // tcp's own has that one
  auto liveness = tcp::Owner::listen(at_any_port);
  if (!liveness.ok()) return liveness.status();
  auto served = std::make_shared<fabric::Served>(fabric::Served{std::move(*domain), std::move(*port)});
  auto made = std::make_unique<fabric::FabricTransport>(std::move(served), std::move(*liveness));
  if (Status status = made->start(); !status.ok()) return status;
  return Result<std::unique_ptr<Transport>>(std::move(made));
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// tcp: reads are frames over a socket that a thread of the owner answers. It works between any hosts.
#include <sys/socket.h>

#include <cerrno>

#include "base/sys.h"
#include "base/unique_fd.h"
#include "transports/factories.h"
#include "transports/tcp/owner.h"
#include "transports/tcp/reader.h"

namespace kvlink {
namespace {

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(std::shared_ptr<tcp::Owner> owner) : owner_(std::move(owner)) {}
  ~TcpTransport() override { close(); }

  std::string address() const override { return owner_->address().encode(); }

  const Capabilities& capabilities() const override { return capabilities_; }

  Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access,
                                                        const std::shared_ptr<Bounce>& through) override {
    if (access == Access::kLocal) return nullptr;
    if (range.base == nullptr || range.bytes == 0) return Status::Config("tcp cannot export empty memory");
    if (Status status = owner_->send_through(through); !status.ok()) return status;
    return owner_->register_region(range, access);
  }

  Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes, const WorkerRun&) override {
    const Result<tcp::Address> address = tcp::Address::parse(owner_address);
    if (!address.ok()) return address.status();
    return open_lanes(num_lanes, [&](uint32_t lane) {
      return Result<std::unique_ptr<Endpoint>>(tcp::make_reader(*address, lane));
    });
  }

  std::vector<Result<std::string>> accept(ReaderId reader, Hellos hellos) override {
    return accept_each(hellos, [&](std::string_view hello) -> Result<std::string> {
      const Status known = tcp::check_hello(hello);
      if (!known.ok()) return known;
      return owner_->admit(reader).encode();
    });
  }

  bool fence(uint64_t connection_id) override { return owner_->fence(connection_id); }
  void serve() override { owner_->serve(); }
  void close() override { owner_->close(); }

 private:
  std::shared_ptr<tcp::Owner> owner_;  // regions that outlive the transport hold it too
  const Capabilities capabilities_{
      .exports_through_bounce = true, .guards = true, .can_fence = true, .serve_fd = owner_->serve_fd()};
};

}  // namespace

Status tcp_probe() {
  for (const int family : {AF_INET, AF_INET6}) {
    if (UniqueFd(sys::socket(family, SOCK_STREAM))) return {};
  }
  return sys::failed(Code::kTransportUnavailable, "this process cannot open tcp sockets", "socket", errno);
}

Result<std::unique_ptr<Transport>> tcp_make(const TransportOptions& options) {
  Result<std::shared_ptr<tcp::Owner>> owner = tcp::Owner::listen(options);
  if (!owner.ok()) return owner.status();
  return std::make_unique<TcpTransport>(std::move(*owner));
}

}  // namespace kvlink

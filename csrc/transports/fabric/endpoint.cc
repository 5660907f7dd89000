// SPDX-License-Identifier: Apache-2.0
#include "transports/fabric/endpoint.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/poll_timer.h"
#include "base/sys.h"
#include "transports/fabric/fi_wire.h"

namespace kvlink::fabric {
namespace {

// While operations are under way, a provider is polled at least so often: a descriptor tells neither of all
// its work nor of an operation that it could not take.
constexpr int64_t kFirstLookNs = 50'000, kLastLookNs = 1'000'000;
constexpr int64_t kLongerBy = 4;
constexpr int64_t kTcpLookNs = 1'000'000;  // between two polls of the socket, a system call each
constexpr int64_t kCheckNs = 100'000'000;  // the same while nothing is under way
constexpr int64_t kGoodbyeNs = 5'000'000;  // a round trip of any fabric, to an owner that has to wake
constexpr Window kWindow{.chunk_bytes = 1 << 20, .chunk_ops = 1024, .depth = 8, .bytes = 8 << 20};

class FabricEndpoint final : public Endpoint {
 public:
  FabricEndpoint(std::unique_ptr<FiWire> wire, std::unique_ptr<Endpoint> liveness)
      : wire_(std::move(wire)), liveness_(std::move(liveness)), queue_(*wire_, wire_->domain().limits()) {}
  ~FabricEndpoint() override { close(); }

  Status watch();
  std::string hello() const override { return liveness_->hello(); }
  Status establish(std::string_view reply, const Patience& patience) override;
  Result<uint32_t> import_region(std::string_view remote_key) override;
  const Traits& traits() const override { return traits_; }
  Status post_read(uint64_t token, const Chunk& chunk) override;
  Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) override;
  PollResult poll(int64_t now, bool waiting, std::vector<Completion>& ended) override;
  bool cancel(uint64_t token) override { return !open_ || queue_.cancel(token); }
  bool arm() override;
  void close() override;

 private:
  bool busy() const { return queue_.under_way() > 0 || queue_.waits(); }
  void say_goodbye();
  Status prove(const Reply& reply, const Patience& patience);
  Status check_read(const ReadOp& op, const Segment* segments) const;

  const std::unique_ptr<FiWire> wire_;
  const std::unique_ptr<Endpoint> liveness_;
  PostQueue queue_;
  PollTimer timer_{kFirstLookNs, kLastLookNs, kLongerBy};
  UniqueFd epoll_;
  Traits traits_{.path = wire_->domain().provider(), .window = kWindow};
  std::vector<RemoteRegion> remotes_;
  Status broken_ = Status::Unreachable("the owner is not connected");
  bool open_ = true;
  int64_t looked_ns_ = 0;  // at the tcp connection
};

/// Before establish(), which connects by tcp.
Status FabricEndpoint::watch() {
  static const std::string kDoing = "fabric cannot watch a connection";
  Result<UniqueFd> epoll = sys::epoll(kDoing, Code::kTransportUnavailable);
  if (!epoll.ok()) return epoll.status();
  epoll_ = std::move(*epoll);
  if (wire_->wait_fd() >= 0 && !sys::watch(epoll_.get(), wire_->wait_fd(), EPOLLIN, 0))
    return sys::failed(Code::kTransportUnavailable, kDoing, "epoll_ctl", errno);
  if (Status status = timer_.open(epoll_.get()); !status.ok()) return status;
  traits_.wake_fd = timer_.fd();
  return {};
}

Status FabricEndpoint::establish(std::string_view reply, const Patience& patience) {
  const auto parsed = Reply::parse(reply);
  if (!parsed) return Status::Unreachable("protocol error: the owner admitted us with a malformed reply");
  if (Status status = liveness_->establish(parsed->invitation, patience); !status.ok()) return status;
  if (Status status = prove(*parsed, patience); !status.ok()) return status;
  // A tcp connection that is not watched is still polled now and then.
  static_cast<void>(sys::watch(epoll_.get(), liveness_->traits().wake_fd, EPOLLIN | EPOLLRDHUP, 0));
  broken_ = {};
  return {};
}

/// Reads the nonce of the reply from the address of the card. So this address leads to the owner, and the way
/// there is open before a pull needs it.
Status FabricEndpoint::prove(const Reply& reply, const Patience& patience) {
  uint64_t& found = wire_->own_word();
  const std::vector<RemoteRegion> from{reply.proof};
  const ReadOp op{.bytes = sizeof found, .num_segments = 1};
  const Segment into{reinterpret_cast<std::byte*>(&found), sizeof found, FiWire::kOwnWord};
  queue_.read(0, {std::span(&op, 1), &into});
  std::vector<Completion> ended;
  Status status;
  for (bool progressed = false; status.ok() && ended.empty();) {
    status = queue_.drive(from, ended, progressed);
    if (status.ok() && ended.empty() && patience.over())
      status = patience.why_over(
          Status::Unreachable(wire_->domain().provider() + ": the owner's endpoint did not answer in time"));
    if (!progressed) std::this_thread::sleep_for(std::chrono::nanoseconds(kFirstLookNs));
    progressed = false;
  }
  if (status.ok() ? found != reply.nonce : status.code() == Code::kAccessDenied)
    status = Status::Unreachable("another process answers at the owner's address; its card is out of date");
  if (!status.ok()) close();  // before `op` and `into` go
  return status;
}

Result<uint32_t> FabricEndpoint::import_region(std::string_view remote_key) {
  const auto key = parse_key(remote_key);
  if (!key) return Status::AccessDenied("the key of a region of the owner is malformed");
  remotes_.push_back(*key);
  return static_cast<uint32_t>(remotes_.size() - 1);
}

Status FabricEndpoint::check_read(const ReadOp& op, const Segment* segments) const {
  if (!wire_->domain().needs_local()) return kvlink::check_read(op, segments, remotes_);
  const std::vector<LocalRegion>& locals = wire_->locals();
  const auto is_registered = [&locals](const Segment& segment) {
    if (segment.region >= locals.size() || segment.local < locals[segment.region].base) return false;
    const LocalRegion& local = locals[segment.region];
    return fits(static_cast<uint64_t>(segment.local - local.base), segment.bytes, local.bytes);
  };
  return kvlink::check_read(op, segments, remotes_, is_registered,
                            "a read lands outside its registered region");
}

Status FabricEndpoint::post_read(uint64_t token, const Chunk& chunk) {
  if (!broken_.ok()) return broken_;
  if (chunk.ops.empty()) return Status::Config("a read has no operations");
  for (const ReadOp& op : chunk.ops) {
    if (Status status = check_read(op, chunk.segments); !status.ok()) return status;
  }
  queue_.read(token, chunk);
  return {};
}

Status FabricEndpoint::post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) {
  if (!broken_.ok()) return broken_;
  if (Status status = check_store(region, offset, remotes_); !status.ok()) return status;
  queue_.write(token, region, offset, value);
  return {};
}

PollResult FabricEndpoint::poll(int64_t now, bool waiting, std::vector<Completion>& ended) {
  PollResult result;
  if (broken_.ok()) broken_ = queue_.drive(remotes_, ended, result.progressed);
  if (result.progressed) timer_.progressed();
  if (broken_.ok() && !result.progressed && now - looked_ns_ >= kTcpLookNs) {
    looked_ns_ = now;
    std::vector<Completion> none;
    broken_ = liveness_->poll(now, waiting, none).status;
  }
  if (waiting) result.next_check_ns = now + kCheckNs;
  result.status = broken_;
  return result;
}

bool FabricEndpoint::arm() {
  if (!broken_.ok()) return false;
  if (busy() && !wire_->may_sleep()) return false;
  timer_.arm(busy());
  return true;
}

/// Sends the settles of pulls that have ended.
void FabricEndpoint::say_goodbye() {
  std::vector<Completion> none;
  for (const int64_t end = now_ns() + kGoodbyeNs; broken_.ok() && queue_.only_writes() && now_ns() < end;) {
    bool progressed = false;
    broken_ = queue_.drive(remotes_, none, progressed);
  }
}

void FabricEndpoint::close() {
  if (!std::exchange(open_, false)) return;
  say_goodbye();
  if (broken_.ok()) broken_ = Status::Unreachable("the connection is closed");
  wire_->close();
  timer_.close();
  epoll_.reset();
  liveness_->close();
}

}  // namespace

Result<std::unique_ptr<Endpoint>> open_endpoint(std::shared_ptr<const Domain> domain, const Address& owner,
                                                std::unique_ptr<Endpoint> liveness) {
  auto wire = FiWire::open(std::move(domain), owner.endpoint);
  if (!wire.ok()) return wire.status();
  auto made = std::make_unique<FabricEndpoint>(std::move(*wire), std::move(liveness));
  if (Status status = made->watch(); !status.ok()) return status;
  return Result<std::unique_ptr<Endpoint>>(std::move(made));
}

}  // namespace kvlink::fabric

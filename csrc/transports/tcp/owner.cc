// SPDX-License-Identifier: Apache-2.0
#include "transports/tcp/owner.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>
#include <vector>

#include "base/blob.h"
#include "base/clock.h"
#include "base/host_identity.h"
#include "base/sys.h"

namespace kvlink::tcp {
namespace {

constexpr uint64_t kListenerSerial = 0, kHelloSerial = 1, kDeferSerial = 2, kCopySerial = 3, kFirstSerial = 4;
constexpr int kMaxEvents = 64;
constexpr int kMaxAcceptsPerRound = 16;
constexpr size_t kMaxPending =
    64;  // one more, and the oldest is closed: honest readers send their hello at once
constexpr int64_t kDeferNs = 500'000;
constexpr int64_t kCopyPollNs =
    10'000;  // half of what a slot of the bounce buffer takes; doubles when in vain
constexpr uint32_t kMaxDoublings = 5;
constexpr int64_t kHelloNs = 5'000'000'000;
constexpr int64_t kNoDescriptorsPauseNs = 100'000'000;

class Region final : public MemoryRegion {
 public:
  Region(std::shared_ptr<Owner> owner, uint64_t key, uint64_t bytes, Access access)
      : owner_(std::move(owner)), key_(key), bytes_(bytes), access_(access) {}
  ~Region() override { owner_->revoke(key_); }

  std::string remote_key() const override {
    return BlobWriter().u64(key_).u64(bytes_).u32(static_cast<uint32_t>(access_)).take();
  }

 private:
  std::shared_ptr<Owner> owner_;
  uint64_t key_, bytes_;
  Access access_;
};

Status cannot_watch(const std::string& doing) {
  return sys::failed(Code::kConfig, doing, "epoll_ctl", errno);
}

uint32_t events_of(Wants wants) {
  if (wants == Wants::kCopies) return 0;  // hanging up is told all the same
  return wants == Wants::kSpace ? EPOLLOUT : EPOLLIN;
}

void set_timer(const UniqueFd& timer, int64_t delay_ns) {
  itimerspec after{};
  after.it_value = {delay_ns / 1'000'000'000, delay_ns % 1'000'000'000};
  ::timerfd_settime(timer.get(), 0, &after, nullptr);
}

bool take_expiry(const UniqueFd& timer) {
  uint64_t expirations;
  return ::read(timer.get(), &expirations, sizeof expirations) == sizeof expirations;
}

}  // namespace

void ServeLock::lock() {
  waiting_.fetch_add(1);
  mutex_.lock();
  waiting_.fetch_sub(1);
}

void ServeLock::lock_serving() {
  while (waiting_.load() > 0) std::this_thread::yield();
  mutex_.lock();
}

Result<std::shared_ptr<Owner>> Owner::listen(const TransportOptions& options) {
  const std::string& advertised = options.advertise;
  if (!advertised.empty() && !can_be_dialled(advertised)) {
    return Status::Config("tcp cannot advertise '" + advertised +
                          "': it is not an address that peers can dial");
  }
  Result<UniqueFd> listener = listen_on(options.host, options.port, !advertised.empty());
  if (!listener.ok()) return listener.status();
  Result<Address> address = local_address(listener->get());
  if (!address.ok()) return address.status();
  if (!advertised.empty()) address->host = advertised;
  address->instance = random_u64();
  auto owner = std::make_shared<Owner>(std::move(*listener), std::move(*address));
  if (Status status = owner->open_descriptors(); !status.ok()) return status;
  return owner;
}

Owner::Owner(UniqueFd listener, Address address)
    : address_(std::move(address)), listener_(std::move(listener)), next_serial_(kFirstSerial) {}

Status Owner::open_descriptors() {
  static const std::string kDoing = "tcp cannot serve";
  Result<UniqueFd> epoll = sys::epoll(kDoing);
  if (!epoll.ok()) return epoll.status();
  epoll_ = std::move(*epoll);
  if (!watch(listener_.get(), EPOLLIN, kListenerSerial)) return cannot_watch(kDoing);
  for (const auto& [timer, serial] :
       {std::pair(&hello_timer_, kHelloSerial), {&defer_timer_, kDeferSerial}, {&copy_timer_, kCopySerial}}) {
    Result<UniqueFd> made = sys::timer(kDoing);
    if (!made.ok()) return made.status();
    *timer = std::move(*made);
    if (!watch(timer->get(), EPOLLIN, serial)) return cannot_watch(kDoing);
  }
  return {};
}

bool Owner::watch(int fd, uint32_t events, uint64_t serial) {
  return sys::watch(epoll_.get(), fd, events, serial);
}

bool Owner::rewatch(int fd, uint32_t events, uint64_t serial) {
  return sys::rewatch(epoll_.get(), fd, events, serial);
}

/// To be called before close(): a forked child's copy of the descriptor would keep the socket in the set.
void Owner::unwatch(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Owner::dismiss(std::map<uint64_t, PendingSocket>::iterator pending) {
  unwatch(pending->second.socket.get());
  pending_.erase(pending);
}

size_t Owner::cut_served(const std::function<bool(const ServedConnection&)>& which) {
  return std::erase_if(served_, [&](const auto& entry) {
    const ServedConnection& connection = entry.second;
    if (!which(connection)) return false;
    unwatch(connection.socket());
    cut(connection.socket());
    return true;
  });
}

Status Owner::send_through(const std::shared_ptr<Bounce>& bounce) {
  std::lock_guard lock(lock_);
  if (!bounce || bounce == device_.bounce) return {};
  Result<std::unique_ptr<CopyQueue>> queue = bounce->copier().open_queue();
  if (!queue.ok()) return queue.status();
  device_ = {bounce, std::move(*queue)};
  return {};
}

std::unique_ptr<MemoryRegion> Owner::register_region(const MemoryRange& range, Access access) {
  std::lock_guard lock(lock_);
  uint64_t key = random_u64();
  while (regions_.contains(key)) key = random_u64();
  regions_[key] = {range.base, range.bytes, access, range.device};
  return std::make_unique<Region>(shared_from_this(), key, range.bytes, access);
}

void Owner::revoke(uint64_t key) {
  std::lock_guard lock(lock_);
  const ExportedRegion region = regions_.at(key);
  regions_.erase(key);
  cut_served([&](const ServedConnection& connection) { return connection.sends_from(region); });
}

Invitation Owner::admit(ReaderId reader) {
  std::lock_guard lock(lock_);
  return invitations_.issue(reader.caller, reader.connection_id, now_ns());
}

bool Owner::fence(uint64_t connection_id) {
  std::lock_guard lock(lock_);  // what is being sent meanwhile is sent before
  for (auto& [serial, connection] : served_) connection.enforce_guard();
  const bool invited = invitations_.withdraw(connection_id);
  const auto admitted = [=](const ServedConnection& connection) {
    return connection.connection_id() == connection_id;
  };
  return cut_served(admitted) > 0 || invited;
}

size_t Owner::num_served() {
  std::lock_guard lock(lock_);
  return served_.size();
}

void Owner::close() {
  std::lock_guard lock(lock_);
  pending_.clear();
  served_.clear();
  device_.queue.reset();
  device_.bounce.reset();
  listener_.reset();
  hello_timer_.reset();
  defer_timer_.reset();
  copy_timer_.reset();
  epoll_.reset();
}

void Owner::serve() {
  epoll_event events[kMaxEvents];
  const int ready = ::epoll_wait(epoll_.get(), events, kMaxEvents, 0);
  for (int index = 0; index < ready; ++index) {
    lock_.lock_serving();
    std::lock_guard lock(lock_, std::adopt_lock);
    dispatch(events[index].data.u64);
  }
}

void Owner::dispatch(uint64_t serial) {
  if (const auto found = served_.find(serial); found != served_.end()) return serve(serial, found->second);
  switch (serial) {
    case kListenerSerial:
      return accept_ready();
    case kHelloSerial:
      return on_hello_timer();
    case kDeferSerial:
      return on_defer_timer();
    case kCopySerial:
      return on_copy_timer();
    default:
      return read_hello(serial);
  }
}

void Owner::serve(uint64_t serial, ServedConnection& connection) {
  const Wants wants = connection.serve();
  const bool armed = wants == Wants::kEnd || wants == connection.armed ||
                     rewatch(connection.socket(), events_of(wants), serial);
  if (wants == Wants::kEnd || !armed) {
    unwatch(connection.socket());
    served_.erase(serial);
    return;
  }
  connection.armed = wants;
  if (wants == Wants::kCopies) await_copies(serial);
  if (connection.expects_write() && !connection.deferred()) defer_settle(serial, connection);
}

/// Waking a sleeping thread costs the reader 10-25 us (2-core VM), and a settle is not urgent. A lone settle
/// within kDeferNs waits until then, or for the next request. Nothing stays deferred.
void Owner::defer_settle(uint64_t serial, ServedConnection& connection) {
  connection.set_deferred(true);
  if (deferred_.empty()) set_timer(defer_timer_, kDeferNs);
  deferred_.push_back(serial);
}

void Owner::on_defer_timer() {
  if (!take_expiry(defer_timer_)) return;
  for (const uint64_t serial : deferred_) {
    const auto found = served_.find(serial);
    if (found != served_.end()) found->second.set_deferred(false);
  }
  serve_again(deferred_);
}

void Owner::await_copies(uint64_t serial) {
  if (std::find(copying_.begin(), copying_.end(), serial) != copying_.end()) return;
  if (copying_.empty()) set_timer(copy_timer_, kCopyPollNs << std::min(vain_polls_, kMaxDoublings));
  copying_.push_back(serial);
}

void Owner::on_copy_timer() {
  if (!take_expiry(copy_timer_)) return;
  const size_t num_waiting = copying_.size();
  serve_again(copying_);
  vain_polls_ = copying_.size() == num_waiting ? vain_polls_ + 1 : 0;
}

void Owner::serve_again(std::vector<uint64_t>& serials) {
  std::swap(serials, waking_);
  for (const uint64_t serial : waking_) {
    const auto found = served_.find(serial);
    if (found != served_.end()) serve(serial, found->second);
  }
  waking_.clear();
}

void Owner::accept_ready() {
  for (int count = 0; count < kMaxAcceptsPerRound; ++count) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) listen_again(false);
      return;
    }
    if (pending_.size() == kMaxPending) dismiss_oldest();
    if (pending_.empty()) set_timer(hello_timer_, kHelloNs);
    const uint64_t serial = next_serial_++;
    // A socket that cannot be watched is closed, which its reader sees at once.
    const Greeting greeting{kHelloMagic, kVersion, 0, address_.instance};  // a fresh socket has room for it
    const bool sent = ::send(socket.get(), &greeting, sizeof greeting, MSG_DONTWAIT | MSG_NOSIGNAL) ==
                      static_cast<ssize_t>(sizeof greeting);
    if (!sent || !tune(socket.get()) || !watch(socket.get(), EPOLLIN, serial)) continue;
    leave_unpaced_in_host(socket.get());
    pending_.emplace(serial, PendingSocket{std::move(socket), now_ns() + kHelloNs, {}, 0});
  }
}

/// A listener that stays readable without descriptors would spin, so it pauses, and one socket makes room.
void Owner::listen_again(bool enabled) {
  rewatch(listener_.get(), enabled ? uint32_t{EPOLLIN} : 0, kListenerSerial);
  if (enabled) return;
  if (!pending_.empty()) dismiss_oldest();
  set_timer(hello_timer_, kNoDescriptorsPauseNs);
}

void Owner::on_hello_timer() {
  if (!take_expiry(hello_timer_)) return;
  const int64_t now = now_ns();
  while (!pending_.empty() && pending_.begin()->second.deadline_ns <= now) dismiss_oldest();
  if (!pending_.empty()) set_timer(hello_timer_, pending_.begin()->second.deadline_ns - now);
  listen_again(true);
}

void Owner::read_hello(uint64_t serial) {
  const auto found = pending_.find(serial);
  if (found == pending_.end()) return;
  PendingSocket& pending = found->second;
  auto* into = reinterpret_cast<std::byte*>(&pending.hello) + pending.got;
  const ssize_t got = ::recv(pending.socket.get(), into, sizeof(Hello) - pending.got, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return dismiss(found);
  pending.got += static_cast<size_t>(got);
  if (pending.got >= sizeof(uint64_t) && pending.hello.magic != kHelloMagic) return dismiss(found);
  if (pending.got < sizeof(Hello)) return;

  uint64_t connection_id = 0;
  const HelloReply reply{kHelloMagic, kVersion, authenticate(pending.hello, connection_id)};
  const bool sent =
      ::send(pending.socket.get(), &reply, sizeof reply, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof reply;
  if (sent && reply.verdict == Verdict::kAdmitted) {
    served_.try_emplace(serial, std::move(pending.socket), connection_id, regions_,
                        device_.queue ? &device_ : nullptr);
    pending_.erase(found);  // its socket stays watched under the same serial
  } else {
    dismiss(found);
  }
}

Verdict Owner::authenticate(const Hello& hello, uint64_t& connection_id) {
  if (hello.version != kVersion) return Verdict::kRefused;
  const std::string secret(reinterpret_cast<const char*>(hello.secret.data()), hello.secret.size());
  const auto redeemed = invitations_.redeem({hello.invitation, secret}, now_ns());
  connection_id = redeemed.value_or(0);
  return redeemed ? Verdict::kAdmitted : Verdict::kRefused;
}

}  // namespace kvlink::tcp

// SPDX-License-Identifier: Apache-2.0
#include "channel/channel.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/host_identity.h"
#include "base/sys.h"

namespace kvlink::channel {
namespace {

constexpr char kDoing[] = "cannot start the native channel";
constexpr uint64_t kWakeSerial = 0, kListenerSerial = 1;
constexpr int kMaxEvents = 64, kMaxAcceptsPerRound = 16, kNumAccepts = 2;
constexpr size_t kMostUnsent = 256 << 10;           // more, and no further request of the link is read
constexpr size_t kMostAnswers = 2 * kMaxCardBytes;  // at once: honest readers take what they ask for
constexpr int kTickMs = 100;
constexpr int64_t kFarewellNs = 1'000'000'000;  // for the other end to read why the channel ends
constexpr int64_t kNoDescriptorsPauseNs = 100'000'000;

/// One for each process of this host, and one for each other host.
uint64_t caller_of(const sockaddr_storage& peer) {
  std::string_view host;
  uint16_t port = 0;
  bool here = false;
  if (peer.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
    host = {reinterpret_cast<const char*>(&v4.sin_addr), sizeof v4.sin_addr};
    port = v4.sin_port;
    here = host.front() == 127;
  } else {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(peer);
    host = {reinterpret_cast<const char*>(&v6.sin6_addr), sizeof v6.sin6_addr};
    port = v6.sin6_port;
    here = IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr) ||
           (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr) && v6.sin6_addr.s6_addr[12] == 127);
  }
  return std::hash<std::string_view>{}(host) ^ (here ? uint64_t{port} << 40 : 0);
}

std::string refused(uint32_t id, const Refusal& refusal) {
  return encode(Type::kRefused, id, encode_refusal(refusal));
}

std::string encode_notified(uint64_t number) {
  return encode(Type::kNotified, kNoticeId, {reinterpret_cast<const char*>(&number), sizeof number});
}

Status of_channel(const Status& status) {
  return {status.code(), "the native channel: " + status.what(), status.fix()};
}

/// A contract that is broken in one request costs only that request.
Result<Accepted> accept_by(const Serving& serving, const ConnectRequest& request, uint64_t caller) {
  try {
    return serving.accept(request, caller);
  } catch (const std::exception& broken) {
    return Status{Code::kPeerUnreachable, broken.what()};
  }
}

bool wait_for(int socket, short events, const Patience& patience) {
  pollfd polled{socket, events, 0};
  while (!patience.over()) {
    if (wait_ready({&polled, 1}, patience.piece_ns()) > 0) return true;
  }
  return false;
}

}  // namespace

Serving serving(Engine& engine) {
  return {[&engine](const ConnectRequest& request, uint64_t caller) {
            return engine.accept(request.transport, request.hellos, request.takes_keys, caller);
          },
          [&engine](const SeatRef& seat) { return engine.leases().settle(seat.slot, seat.settle_nonce); },
          [&engine](const SeatRef& seat) {
            return engine.leases().renew(seat.slot, seat.settle_nonce, now_ns());
          }};
}

Result<std::shared_ptr<Channel>> Channel::make(const Limits& limits) {
  uint64_t drawn;
  if (Status status = fill_random(&drawn, sizeof drawn); !status.ok()) return status;
  std::shared_ptr<Channel> channel(new Channel(limits), DeleteOwn());
  if (Status status = channel->start(); !status.ok()) return status;
  return channel;
}

Status Channel::start() {
  Result<UniqueFd> epoll = sys::epoll(kDoing), wake = sys::event_fd(kDoing);
  if (!epoll.ok()) return epoll.status();
  if (!wake.ok()) return wake.status();
  epoll_ = std::move(*epoll);
  wake_ = std::move(*wake);
  if (!sys::watch(epoll_.get(), wake_.get(), EPOLLIN, kWakeSerial)) {
    return sys::failed(Code::kConfig, kDoing, "epoll_ctl", errno);
  }
  Result<std::unique_ptr<Jobs>> farewells = Jobs::make("kvlink-farewell", 1);
  if (!farewells.ok()) return farewells.status();
  farewells_ = std::move(*farewells);
  Result<std::thread> thread = sys::start_thread(kDoing, "kvlink-channel", [this] { run(); });
  if (!thread.ok()) return thread.status();
  thread_ = std::move(*thread);
  return {};
}

Result<ChannelAddress> Channel::listen(Serving serving, const std::string& host, uint16_t port,
                                       const std::string& advertise) {
  if (Status status = process_.check(); !status.ok()) return status;
  if (!advertise.empty() && !tcp::can_be_dialled(advertise)) {
    return Status::Config("the native channel cannot advertise '" + advertise +
                          "': it is not an address that peers can dial");
  }
  Result<UniqueFd> listener = tcp::listen_on(host, port, !advertise.empty());
  if (!listener.ok()) return of_channel(listener.status());
  Result<tcp::Address> at = tcp::local_address(listener->get());
  if (!at.ok()) return of_channel(at.status());
  if (!advertise.empty()) at->host = advertise;
  Result<std::unique_ptr<Jobs>> accepts = Jobs::make("kvlink-accept", kNumAccepts);
  if (!accepts.ok()) return accepts.status();
  const std::lock_guard lock(mutex_);
  if (closing_) return Status::Config("the native channel is closed");
  if (accepts_) return Status::Config("the native channel listens already");
  if (!sys::watch(epoll_.get(), listener->get(), EPOLLIN, kListenerSerial)) {
    return sys::failed(Code::kConfig, kDoing, "epoll_ctl", errno);
  }
  serving_ = std::move(serving);
  accepts_ = std::move(*accepts);
  listener_ = std::move(*listener);
  return ChannelAddress{{at->text()}, own_};
}

Status Channel::publish(std::string card) {
  if (Status status = process_.check(); !status.ok()) return status;
  if (card.empty() || card.size() > kMaxCardBytes) {
    return Status::Config("a card has 1 to " + std::to_string(kMaxCardBytes) + " bytes");
  }
  const std::lock_guard lock(mutex_);
  card_ = std::make_shared<const std::string>(std::move(card));
  return {};
}

void Channel::run() {
  epoll_event events[kMaxEvents];
  Interval tick(kTickMs * int64_t{1'000'000});
  bool sleeps = true;
  while (!closing_) {
    const int ready = ::epoll_wait(epoll_.get(), events, kMaxEvents, sleeps ? -1 : kTickMs);
    const int64_t now = now_ns();
    const std::lock_guard lock(mutex_);
    for (int index = 0; index < ready; ++index) dispatch(events[index].data.u64, events[index].events, now);
    if (ticks_ && tick.due(now)) drop_late(now);
    sleeps = !ticks_;
  }
}

/// Wakes the thread if it sleeps until something happens, because something is due now.
void Channel::look_at(const Link& link) {
  if (ticks_ || late_at(link) == INT64_MAX) return;
  ticks_ = true;
  set_event(wake_.get());
}

void Channel::dispatch(uint64_t serial, uint32_t events, int64_t now) {
  if (serial == kWakeSerial) return clear_event(wake_.get());
  if (serial == kListenerSerial) return accept_ready(now);
  auto link = links_.find(serial);
  if (link == links_.end()) return;
  if ((events & EPOLLOUT) != 0 && !flush(link, now)) return;
  if ((events & ~uint32_t{EPOLLOUT}) != 0) return receive(link, now);
  arm(link);
}

void Channel::accept_ready(int64_t now) {
  for (int count = 0; count < kMaxAcceptsPerRound; ++count) {
    sockaddr_storage peer{};
    socklen_t bytes = sizeof peer;
    UniqueFd socket(
        ::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&peer), &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) pause_listening(now);
      return;
    }
    if (pending_.size() >= limits_.pending) erase(links_.find(*pending_.begin()), {});
    const bool full = links_.size() >= limits_.links;
    const uint64_t serial = next_serial_++;
    if (!tcp::tune(socket.get())) continue;
    const auto link = links_
                          .emplace(serial, Link{.socket = std::move(socket),
                                                .caller = caller_of(peer),
                                                .session = OwnerSession(own_, now, limits_.frame_ns)})
                          .first;
    pending_.insert(serial);
    if (!sys::watch(epoll_.get(), link->second.socket.get(), 0, serial)) {
      erase(link, {});
    } else if (full) {
      OwnerSession::Actions actions;
      actions.send = refused(0, {Reason::kTooMany, "this worker has too many readers", "retry in a moment"});
      actions.end = true;
      serve(link, std::move(actions), now);
    } else {
      queue(link, std::get<OwnerSession>(link->second.session).greeting(), now);
    }
  }
}

/// A listener that stays readable without descriptors would spin, so it pauses, and one link makes room.
void Channel::pause_listening(int64_t now) {
  sys::rewatch(epoll_.get(), listener_.get(), 0, kListenerSerial);
  listen_again_ns_ = now + kNoDescriptorsPauseNs;
  ticks_ = true;
  if (!pending_.empty()) erase(links_.find(*pending_.begin()), {});
}

void Channel::receive(Links::iterator link, int64_t now) {
  const ssize_t got = ::recv(link->second.socket.get(), inbox_.data(), inbox_.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got > 0) return on_bytes(link, {inbox_.data(), static_cast<size_t>(got)}, now);
  erase(link,
        Status::Unreachable(link->second.where + ": the worker's process has ended, or its host is gone"));
}

void Channel::on_bytes(Links::iterator link, std::string_view bytes, int64_t now) {
  if (link->second.ending) return;
  if (auto* const owner = std::get_if<OwnerSession>(&link->second.session)) {
    OwnerSession::Actions actions;
    owner->on_bytes(bytes, now, actions);
    return serve(link, std::move(actions), now);
  }
  auto& reader = std::get<ReaderSession>(link->second.session);
  std::vector<ReaderSession::Answer> answers;
  std::string nothing;  // the hello was said when the channel was dialled
  reader.on_bytes(bytes, nothing, answers);
  for (ReaderSession::Answer& each : answers) link->second.calls->answer(std::move(each));
  if (!reader.ended().ok()) erase(link, reader.ended());
}

void Channel::serve(Links::iterator link, OwnerSession::Actions actions, int64_t now) {
  const uint64_t serial = link->first;
  if (!actions.end && std::get<OwnerSession>(link->second.session).admitted()) pending_.erase(serial);
  for (Request& request : actions.requests) {
    if (auto* const notice = std::get_if<Notice>(&request.body)) {
      if (!take_notice(serial, link->second, std::move(*notice), actions.send)) return erase(link, {});
      continue;
    }
    actions.send += answer(serial, link->second, std::move(request));
    if (actions.send.size() > kMostAnswers) return erase(link, {});
  }
  link->second.ending = actions.end;
  if (actions.end) {
    pending_.insert(serial);
    link->second.late_ns = now + kFarewellNs;
  }
  queue(link, actions.send, now);
}

/// Returns false if the link ends. Appends what is to be sent.
bool Channel::take_notice(uint64_t serial, const Link& link, Notice notice, std::string& send) {
  if (!serving_.notify) return false;
  const auto& caller = std::get<OwnerSession>(link.session).caller();
  const NoticeVerdict verdict = serving_.notify(caller, serial, std::move(notice));
  if (verdict.taken > 0) send += encode_notified(verdict.taken);
  return verdict.fits;
}

void Channel::notified(uint64_t link, uint64_t number) { send(link, encode_notified(number)); }

/// Returns the frame that answers at once, or nothing if another thread will.
std::string Channel::answer(uint64_t serial, const Link& link, Request request) {
  if (!card_) {
    return refused(request.id, {Reason::kNotReady, "the worker is starting or closing", "retry in a moment"});
  }
  if (std::holds_alternative<CardRequest>(request.body)) return encode(Type::kCardIs, request.id, *card_);
  if (auto* const connect = std::get_if<ConnectRequest>(&request.body)) {
    return start_accept(serial, link.caller, request.id, std::move(*connect));
  }
  try {
    if (const auto* seat = std::get_if<SeatRef>(&request.body)) {
      const uint32_t settled = serving_.settle(*seat);
      return encode(Type::kSettled, request.id, {reinterpret_cast<const char*>(&settled), sizeof settled});
    }
    std::vector<uint32_t> ended;
    for (const SeatRef& seat : std::get<std::vector<SeatRef>>(request.body)) {
      if (!serving_.renew(seat)) ended.push_back(seat.slot);
    }
    return encode(Type::kRenewed, request.id, encode_numbers(ended));
  } catch (const BrokenContract& broken) {
    return refused(request.id, {Reason::kFailed, broken.what(), ""});
  }
}

std::string Channel::start_accept(uint64_t serial, uint64_t caller, uint32_t id, ConnectRequest request) {
  const auto of_one = connects_.find(caller);
  if (num_connects_ >= limits_.connects ||
      (of_one != connects_.end() && of_one->second >= limits_.connects_of_one)) {
    return refused(id, {Reason::kTooMany,
                        "the worker is already admitting " + std::to_string(num_connects_) + " readers",
                        "retry in a moment"});
  }
  ++num_connects_;
  ++connects_[caller];
  accepts_->add(
      [this, serial, caller, id, asked = std::make_shared<const ConnectRequest>(std::move(request))] {
        accept_for(serial, caller, id, *asked);
      });
  return {};
}

void Channel::accept_for(uint64_t serial, uint64_t caller, uint32_t id, const ConnectRequest& request) {
  const ConnectReply reply = reply_of(accept_by(serving_, request, caller));
  const std::string body = write_connect_reply(reply);
  const Status why = body.size() <= kMaxConnectedBytes
                         ? reply.refusal
                         : Status::Config("the pool has too many regions for the native channel");
  const std::lock_guard lock(mutex_);
  --num_connects_;
  if (--connects_[caller] == 0) connects_.erase(caller);
  const auto link = links_.find(serial);
  if (link == links_.end() || link->second.ending) return;
  queue(link, why.ok() ? encode(Type::kConnected, id, body) : refused(id, refusal_of(why)), now_ns());
}

void Channel::queue(Links::iterator link, std::string_view frames, int64_t now) {
  link->second.unsent.append(frames);
  if (!flush(link, now)) return;
  count_held(link);
  if (held_ > limits_.held_bytes) return erase(link, {});
  look_at(link->second);
  arm(link);
}

/// Sends what the socket takes. Returns false if the link is gone.
bool Channel::flush(Links::iterator at, int64_t now) {
  Link& link = at->second;
  while (link.sent < link.unsent.size()) {
    const ssize_t put = ::send(link.socket.get(), &link.unsent[link.sent], link.unsent.size() - link.sent,
                               MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && errno == EAGAIN) {
      if (link.late_ns == INT64_MAX) link.late_ns = now + limits_.frame_ns;
      return true;
    }
    if (put <= 0) {
      erase(at, Status::Unreachable(link.where + ": the worker's process has ended, or its host is gone"));
      return false;
    }
    link.sent += static_cast<size_t>(put);
    if (!link.ending) link.late_ns = INT64_MAX;
  }
  link.unsent = {};
  link.sent = 0;
  if (link.ending) ::shutdown(link.socket.get(), SHUT_WR);
  return true;
}

bool Channel::arm(Links::iterator at) {
  Link& link = at->second;
  const size_t unsent = link.unsent.size() - link.sent;
  const uint32_t wanted =
      (unsent > kMostUnsent ? 0 : uint32_t{EPOLLIN}) | (unsent > 0 ? uint32_t{EPOLLOUT} : 0);
  if (wanted == link.armed) return true;
  if (!sys::rewatch(epoll_.get(), link.socket.get(), wanted, at->first)) {
    erase(at, Status::Unreachable("the native channel cannot watch its socket"));
    return false;
  }
  link.armed = wanted;
  return true;
}

void Channel::count_held(Links::iterator link) {
  const auto* const owner = std::get_if<OwnerSession>(&link->second.session);
  const size_t held = link->second.unsent.capacity() + (owner ? owner->held_bytes() : 0);
  held_ += held - link->second.held;
  link->second.held = held;
}

void Channel::erase(Links::iterator link, const Status& why) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link->second.socket.get(), nullptr);  // a forked child may have it
  held_ -= link->second.held;
  pending_.erase(link->first);
  if (link->second.calls) {
    auto connections = link->second.calls->end(why);
    const bool lost = why.code() != Code::kCancelled;
    for (auto& each : connections) {
      if (!lost) break;  // whoever closes a client keeps its connections
      farewells_->add([each = std::move(each), why = why.what()] {
        if (const std::shared_ptr<Connection> connection = each.lock()) connection->close(why);
      });
    }
  }
  links_.erase(link);
}

int64_t Channel::late_at(const Link& link) const {
  const auto* const owner = std::get_if<OwnerSession>(&link.session);
  return owner && !link.ending ? std::min(link.late_ns, owner->deadline_ns()) : link.late_ns;
}

void Channel::drop_late(int64_t now) {
  if (now >= listen_again_ns_) {
    listen_again_ns_ = INT64_MAX;
    sys::rewatch(epoll_.get(), listener_.get(), EPOLLIN, kListenerSerial);
  }
  ticks_ = listen_again_ns_ != INT64_MAX;
  for (auto link = links_.begin(); link != links_.end();) {
    const auto each = link++;
    const int64_t late_ns = late_at(each->second);
    ticks_ |= late_ns != INT64_MAX;
    if (now < late_ns) continue;
    erase(each, Status::Unreachable(each->second.where + ": the worker takes nothing from its channel"));
  }
}

void Channel::send(uint64_t serial, std::string_view frame) {
  const std::lock_guard lock(mutex_);
  const auto link = links_.find(serial);
  if (link != links_.end()) queue(link, frame, now_ns());
}

void Channel::drop(uint64_t serial, const Status& why) {
  const std::lock_guard lock(mutex_);
  const auto link = links_.find(serial);
  if (link != links_.end()) erase(link, why);
}

Result<std::pair<UniqueFd, ReaderSession>> Channel::meet(const tcp::Address& at, const ChannelAddress& to,
                                                         const Patience& patience) const {
  Result<UniqueFd> socket = tcp::start_connect(at);
  if (!socket.ok()) return socket.status();
  const std::string where = at.text();
  const auto late = [&] { return patience.why_over(Status::Timeout(where + " does not answer")); };
  if (!wait_for(socket->get(), POLLOUT, patience)) return late();
  int error = 0;
  socklen_t bytes = sizeof error;
  ::getsockopt(socket->get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  if (error != 0) return Status::Unreachable("cannot connect to " + where + ": " + std::strerror(error));
  ReaderSession session(to.credentials, own_.instance, where);
  while (!session.admitted()) {
    if (!wait_for(socket->get(), POLLIN, patience)) return late();
    char piece[4096];
    const ssize_t got = ::recv(socket->get(), piece, sizeof piece, MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) return Status::Unreachable(where + " closed the native channel");
    std::vector<ReaderSession::Answer> none;  // nothing was asked yet
    std::string hello;                        // a fresh socket has room for it
    session.on_bytes({piece, static_cast<size_t>(got)}, hello, none);
    if (!session.ended().ok()) return session.ended();
    ::send(socket->get(), hello.data(), hello.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  return std::pair(std::move(*socket), std::move(session));
}

Result<std::shared_ptr<Client>> Channel::dial(const ChannelAddress& to, const Patience& patience) {
  if (Status status = process_.check(); !status.ok()) return status;
  if (to.flags & kNeedsTls) {
    return Status::Unavailable("the worker's card asks for TLS, and the native channel has none",
                               "connect through the worker's agent");
  }
  if (to.flags != 0) {
    return Status::Unavailable("the worker's card has flags " + std::to_string(to.flags) +
                                   " for its native channel, which this release does not know",
                               "run the same release at both ends");
  }
  if (to.addresses.empty() || to.addresses.size() > kMaxAddresses) {
    return Status::Config("the native channel of a card has 1 to 4 addresses");
  }
  Status why;
  for (size_t index = 0; index < to.addresses.size(); ++index) {
    const Result<tcp::Address> at = parse_address(to.addresses[index]);
    if (!at.ok()) return at.status();
    auto met = meet(*at, to, patience.part(to.addresses.size() - index));
    if (met.ok()) return adopt(std::move((*met).first), std::move((*met).second), at->text());
    // That another process has one of the addresses says more than that nothing answers at another.
    if (why.code() != Code::kStaleBlocks) why = met.status();
  }
  return why;
}

Result<std::shared_ptr<Client>> Channel::adopt(UniqueFd socket, ReaderSession session,
                                               const std::string& where) {
  const std::lock_guard lock(mutex_);
  if (closing_) return Status::Cancelled("the native channel is closed");
  const uint64_t serial = next_serial_++;
  const auto calls = std::make_shared<Calls>();
  const auto link = links_
                        .emplace(serial, Link{.socket = std::move(socket),
                                              .session = std::move(session),
                                              .calls = calls,
                                              .where = where})
                        .first;
  if (!sys::watch(epoll_.get(), link->second.socket.get(), 0, serial)) {
    const Status why = sys::failed(Code::kConfig, "cannot use the native channel", "epoll_ctl", errno);
    erase(link, why);
    return why;
  }
  if (!arm(link)) return calls->ended();
  return std::shared_ptr<Client>(new Client(shared_from_this(), serial, calls, where), DeleteOwn());
}

Counts Channel::counts() {
  const std::lock_guard lock(mutex_);
  return {links_.size(), pending_.size(), num_connects_, held_};
}

void Channel::close() {
  if (process_.inherited()) return;
  const std::lock_guard closing(closing_mutex_);
  closing_ = true;
  if (wake_) set_event(wake_.get());
  if (thread_.joinable()) thread_.join();
  Jobs* accepts = nullptr;
  {
    const std::lock_guard lock(mutex_);  // listen() may be running
    accepts = accepts_.get();
  }
  if (accepts) accepts->close();
  {
    const std::lock_guard lock(mutex_);
    while (!links_.empty()) erase(links_.begin(), Status::Cancelled("the native channel was closed"));
    listener_.reset();
    card_.reset();
  }
  if (farewells_) farewells_->close();
}

}  // namespace kvlink::channel

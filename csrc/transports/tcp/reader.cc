// SPDX-License-Identifier: Apache-2.0
#include "transports/tcp/reader.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/blob.h"
#include "base/invitations.h"
#include "transports/tcp/response_queue.h"

namespace kvlink::tcp {
namespace {

constexpr size_t kSliceBytes = 1 << 20;  // received in one poll()
constexpr int kSendBytes = 256 << 10;    // the kernel holds a whole window of requests
constexpr Window kWindow{.chunk_bytes = 1 << 20, .chunk_ops = kMaxFrameOps, .depth = 8};

struct RemoteRegion {
  uint64_t key = 0;
  uint64_t bytes = 0;
  Access access = Access::kRead;
};

Result<RemoteRegion> parse_key(std::string_view blob) {
  BlobReader reader(blob);
  const RemoteRegion region{.key = reader.u64(), .bytes = reader.u64()};
  const uint32_t access = reader.u32();
  if (!reader.done() || access > kLastAccess) {
    return Status::AccessDenied("the owner's tcp region key is malformed");
  }
  return RemoteRegion{region.key, region.bytes, static_cast<Access>(access)};
}

class Reader final : public Endpoint {
 public:
  Reader(Address owner, uint32_t lane)
      : owner_(std::move(owner)), peer_("owner " + owner_.text()), lane_(lane), expected_(peer_) {}
  ~Reader() override { close(); }

  std::string hello() const override { return encode_hello(lane_); }
  Status establish(std::string_view reply, const Patience& patience) override;
  Result<uint32_t> import_region(std::string_view remote_key) override;
  const Traits& traits() const override { return traits_; }
  Status post_read(uint64_t token, const Chunk& chunk) override;
  Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) override;
  PollResult poll(int64_t now_ns, bool waiting, std::vector<Completion>& ended) override;
  bool cancel(uint64_t token) override;
  void close() override;

 private:
  /// A posted write. It is done once the kernel has all bytes of the stream up to `end`.
  struct Write {
    uint64_t token;
    uint64_t end;
  };

  Status wait_for(short events, const Patience& patience) const;
  Status receive_whole(void* into, size_t bytes, const Patience& patience) const;
  Status greet(const Invitation& invitation, const Patience& patience);
  Status check_ops(const Chunk& chunk, uint64_t& bytes) const;
  void append(const void* from, size_t bytes);
  void append_frame(const Chunk& chunk, size_t& op, uint64_t& in_op);
  Status flush(std::vector<Completion>& ended, bool& progressed);
  Status receive(std::vector<Completion>& ended, bool& progressed);
  uint64_t appended() const { return sent_ + (outbox_.size() - outbox_sent_); }

  const Address owner_;
  const std::string peer_;
  const uint32_t lane_;
  UniqueFd socket_;
  Traits traits_{.window = kWindow, .ordered = true};
  Status broken_ = Status::Unreachable(peer_ + " is not connected");
  std::vector<RemoteRegion> regions_;
  std::vector<std::byte> outbox_;
  size_t outbox_sent_ = 0;
  uint64_t sent_ = 0;  // bytes of the stream that the kernel has taken
  uint32_t next_id_ = 0;
  bool awaiting_ = false;  // responses to what earlier polls sent
  std::vector<Write> writes_;
  ResponseQueue expected_;
};

Status Reader::wait_for(short events, const Patience& patience) const {
  for (;;) {
    pollfd watched{socket_.get(), events, 0};
    const int ready = ::poll(&watched, 1, static_cast<int>((patience.piece_ns() + 999'999) / 1'000'000));
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return Status::Unreachable(errno_text("waiting for " + peer_));
    if (patience.over()) return patience.why_over(Status::Unreachable(peer_ + " did not answer in time"));
  }
}

Status Reader::establish(std::string_view reply, const Patience& patience) {
  const auto invitation = Invitation::parse(reply, sizeof(Secret));
  if (!invitation)
    return Status::Unreachable("protocol error: " + peer_ + " admitted us with a malformed reply");
  Result<UniqueFd> socket = start_connect(owner_);
  if (!socket.ok()) return socket.status();
  socket_ = std::move(*socket);
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDBUF, &kSendBytes, sizeof kSendBytes);
  Status status = wait_for(POLLOUT, patience);
  if (status.ok()) status = greet(*invitation, patience);
  if (!status.ok()) {
    socket_.reset();
    return status;
  }
  // No post waits for room to send: unanswered requests will have a response, and the rest leaves with that
  // poll(). Writes, which have no response, are small compared with kSendBytes.
  traits_.wake_fd = socket_.get();
  broken_ = {};
  return {};
}

Status Reader::receive_whole(void* into, size_t bytes, const Patience& patience) const {
  for (size_t got = 0; got < bytes;) {
    if (Status ready = wait_for(POLLIN, patience); !ready.ok()) return ready;
    const ssize_t more = ::recv(socket_.get(), static_cast<std::byte*>(into) + got, bytes - got, 0);
    if (more < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (more <= 0) return Status::Unreachable(peer_ + " closed the connection while it was being set up");
    got += static_cast<size_t>(more);
  }
  return {};
}

/// Says nothing before the other end has shown that it is the owner of the card.
Status Reader::greet(const Invitation& invitation, const Patience& patience) {
  socklen_t bytes = sizeof errno;
  int failed = 0;
  ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &failed, &bytes);
  errno = failed;
  if (failed != 0) return Status::Unreachable(errno_text("cannot connect to " + peer_));

  Greeting greeting{};
  if (Status received = receive_whole(&greeting, sizeof greeting, patience); !received.ok()) return received;
  if (greeting.magic != kHelloMagic || greeting.version != kVersion) {
    return Status::Unreachable("protocol error: " + peer_ + " is not a kvlink tcp owner of this version");
  }
  if (greeting.instance != owner_.instance) {
    return Status::Unreachable(peer_ + " is another process now; its card is out of date");
  }
  Hello hello{kHelloMagic, kVersion, 0, invitation.id, {}};
  std::memcpy(hello.secret.data(), invitation.secret.data(), sizeof(Secret));
  // A fresh socket has room for it.
  if (::send(socket_.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
    return Status::Unreachable(errno_text("cannot send the hello to " + peer_));
  }
  HelloReply reply{};
  if (Status received = receive_whole(&reply, sizeof reply, patience); !received.ok()) return received;
  if (reply.magic != kHelloMagic || reply.version != kVersion || reply.verdict > Verdict::kRefused) {
    return Status::Unreachable("protocol error: " + peer_ + " answers with a malformed verdict");
  }
  if (reply.verdict == Verdict::kRefused) {
    return Status::AccessDenied(peer_ + " refused the connection: the secret is wrong, used or expired");
  }
  return {};
}

Result<uint32_t> Reader::import_region(std::string_view remote_key) {
  const Result<RemoteRegion> region = parse_key(remote_key);
  if (!region.ok()) return region.status();
  regions_.push_back(*region);
  return static_cast<uint32_t>(regions_.size() - 1);
}

Status Reader::check_ops(const Chunk& chunk, uint64_t& bytes) const {
  if (chunk.ops.empty() || chunk.ops.size() > kMaxFrameOps) {
    return Status::Config("a tcp read takes 1 to " + std::to_string(kMaxFrameOps) + " operations");
  }
  for (const ReadOp& op : chunk.ops) {
    if (Status status = kvlink::check_read(op, chunk.segments, regions_); !status.ok()) return status;
    bytes += op.bytes;
  }
  return {};
}

void Reader::append(const void* from, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(from);
  outbox_.insert(outbox_.end(), begin, begin + bytes);
}

Status Reader::post_read(uint64_t token, const Chunk& chunk) {
  if (!broken_.ok()) return broken_;
  uint64_t bytes = 0;
  const Status allowed = check_ops(chunk, bytes);
  if (!allowed.ok()) return allowed;
  if (chunk.guard.value != 0 && chunk.guard.region >= regions_.size()) {
    return Status::AccessDenied("the guard of a read is outside the regions of " + peer_);
  }
  expected_.expect(token, next_id_, chunk, bytes);
  uint64_t in_op = 0;
  for (size_t op = 0; op < chunk.ops.size();) append_frame(chunk, op, in_op);
  return {};
}

/// Requests kMaxFrameBytes from there on, or the rest.
void Reader::append_frame(const Chunk& chunk, size_t& op, uint64_t& in_op) {
  const Guard& guard = chunk.guard;
  const size_t begin = outbox_.size();
  RequestHeader header{kFrameMagic, FrameKind::kRead, 0, next_id_++};
  append(&header, sizeof header);
  if (guard.value != 0) {
    header.kind = FrameKind::kGuardedRead;
    const GuardEntry entry{regions_[guard.region].key, guard.offset, guard.value};
    append(&entry, sizeof entry);
  }
  for (uint64_t room = kMaxFrameBytes; op < chunk.ops.size() && room > 0;) {
    const ReadOp& from = chunk.ops[op];
    const ReadEntry entry{regions_[from.region].key, from.offset + in_op, std::min(from.bytes - in_op, room)};
    append(&entry, sizeof entry);
    ++header.count;
    room -= entry.bytes;
    in_op += entry.bytes;
    if (in_op < from.bytes) break;
    in_op = 0;
    ++op;
  }
  std::memcpy(&outbox_[begin], &header, sizeof header);
}

Status Reader::post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) {
  if (!broken_.ok()) return broken_;
  if (Status status = check_store(region, offset, regions_); !status.ok()) return status;
  const RequestHeader header{kFrameMagic, FrameKind::kWrite, 0, value};
  const WriteEntry entry{regions_[region].key, offset};
  append(&header, sizeof header);
  append(&entry, sizeof entry);
  writes_.push_back({token, appended()});
  return {};
}

PollResult Reader::poll(int64_t, bool, std::vector<Completion>& ended) {
  PollResult result;
  if (broken_.ok()) broken_ = flush(ended, result.progressed);
  // The answer to a request sent just now cannot be here yet.
  const bool too_early = result.progressed && !awaiting_;
  if (broken_.ok() && !too_early) broken_ = receive(ended, result.progressed);
  awaiting_ = !expected_.empty();
  result.status = broken_;
  return result;
}

/// Sends everything posted since the last poll at once.
Status Reader::flush(std::vector<Completion>& ended, bool& progressed) {
  if (outbox_.empty()) return {};
  const size_t left = outbox_.size() - outbox_sent_;
  const ssize_t sent = ::send(socket_.get(), outbox_.data() + outbox_sent_, left, MSG_NOSIGNAL);
  if (sent < 0 && errno != EAGAIN && errno != EINTR)
    return Status::Unreachable(errno_text(peer_ + " is gone"));
  if (sent > 0) {
    progressed = true;
    sent_ += static_cast<uint64_t>(sent);
    outbox_sent_ += static_cast<size_t>(sent);
  }
  if (outbox_sent_ == outbox_.size()) {
    outbox_.clear();
    outbox_sent_ = 0;
  }
  size_t done = 0;
  for (; done < writes_.size() && writes_[done].end <= sent_; ++done)
    ended.push_back({writes_[done].token, {}});
  writes_.erase(writes_.begin(), writes_.begin() + static_cast<ptrdiff_t>(done));
  return {};
}

Status Reader::receive(std::vector<Completion>& ended, bool& progressed) {
  for (size_t budget = kSliceBytes; budget > 0;) {
    msghdr message{};
    const std::span<iovec> places = expected_.places(budget);
    message.msg_iov = places.data();
    message.msg_iovlen = places.size();
    const ssize_t got = ::recvmsg(socket_.get(), &message, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return {};
    if (got < 0) return Status::Unreachable(errno_text(peer_ + " is gone"));
    if (got == 0) return Status::Unreachable(peer_ + " closed the connection");
    progressed = true;
    const Status status = expected_.landed(static_cast<size_t>(got), ended);
    if (!status.ok() || expected_.empty()) return status;
    budget -= std::min(budget, static_cast<size_t>(got));
  }
  return {};
}

bool Reader::cancel(uint64_t token) {
  expected_.forget(token);
  std::erase_if(writes_, [token](const Write& write) { return write.token == token; });
  return true;
}

void Reader::close() {
  expected_.forget_all();
  writes_.clear();
  socket_.reset();
  broken_ = Status::Unreachable("the connection to " + peer_ + " is closed");
}

}  // namespace

std::unique_ptr<Endpoint> make_reader(const Address& owner, uint32_t lane) {
  return std::make_unique<Reader>(owner, lane);
}

std::string encode_hello(uint32_t lane) { return BlobWriter().u32(kVersion).u32(lane).take(); }

Status check_hello(std::string_view hello) {
  BlobReader reader(hello);
  const uint32_t version = reader.u32();
  reader.u32();  // lane
  if (reader.done() && version == kVersion) return {};
  return Status::Unavailable("the reader speaks another version of kvlink's tcp",
                             "run the same kvlink release at both ends");
}

}  // namespace kvlink::tcp

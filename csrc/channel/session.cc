// SPDX-License-Identifier: Apache-2.0
#include "channel/session.h"

#include <array>
#include <cstring>
#include <utility>

#include "base/host_identity.h"

namespace kvlink::channel {
namespace {

template <size_t size>
std::string_view view(const std::array<char, size>& bytes) {
  return {bytes.data(), size};
}

std::string refused(const Refusal& refusal, uint32_t id = 0) {
  return encode(Type::kRefused, id, encode_refusal(refusal));
}

Result<RequestBody> parse(const Frame& frame) {
  const Status malformed = Status::Config(
      "a frame of type " + std::to_string(static_cast<uint16_t>(frame.type)) + " is malformed");
  if (frame.id == 0) return malformed;
  if (frame.type == Type::kCard) return RequestBody(CardRequest{});
  if (frame.type == Type::kConnect) {
    Result<ConnectRequest> connect = read_connect_request(frame.body);
    if (!connect.ok()) return connect.status();
    return RequestBody(std::move(*connect));
  }
  if (frame.type == Type::kSettle) {
    if (const auto seat = parse_seat(frame.body)) return RequestBody(*seat);
  } else if (frame.type == Type::kRenew) {
    if (auto seats = parse_seats(frame.body)) return RequestBody(std::move(*seats));
  } else if (frame.type == Type::kNotify) {
    if (auto notice = parse_notice(frame.body)) return RequestBody(std::move(*notice));
  }
  return malformed;
}

}  // namespace

Credentials Credentials::draw() {
  Credentials drawn;
  const std::string random = random_bytes(drawn.instance.size() + drawn.secret.size());
  std::memcpy(drawn.instance.data(), random.data(), drawn.instance.size());
  std::memcpy(drawn.secret.data(), random.data() + drawn.instance.size(), drawn.secret.size());
  return drawn;
}

OwnerSession::OwnerSession(const Credentials& own, int64_t now_ns, int64_t frame_ns)
    : own_(own), frame_ns_(frame_ns), deadline_ns_(now_ns + frame_ns) {}

std::string OwnerSession::greeting() const { return encode(Type::kGreeting, 0, view(own_.instance)); }

void OwnerSession::on_bytes(std::string_view bytes, int64_t now_ns, Actions& actions) {
  while (state_ != State::kEnded) {
    const bool was_inside = frames_.is_inside();
    std::optional<Frame> frame = frames_.take(bytes, admitted() ? of_requests : of_hellos);
    if (frame && admitted()) {
      on_request(std::move(*frame), actions);
    } else if (frame) {
      on_hello(*frame, actions);
    } else if (!frames_.failed().ok()) {
      refuse({Reason::kMalformed, frames_.failed().what(), "run the same kvlink at both ends"}, actions);
    }
    if (admitted() && !frames_.is_inside()) deadline_ns_ = INT64_MAX;
    if (admitted() && frames_.is_inside() && !was_inside) deadline_ns_ = now_ns + frame_ns_;
    if (!frame) return;
  }
}

void OwnerSession::on_hello(const Frame& frame, Actions& actions) {
  Hello hello;
  std::memcpy(&hello, frame.body.data(), sizeof hello);
  if (!same_secret(view(hello.secret), view(own_.secret))) {
    refuse({Reason::kDenied, "the secret of the native channel is not that of this worker's card", ""},
           actions);
  } else {
    caller_ = hello.caller;
    state_ = State::kAdmitted;
    actions.send += encode(Type::kAdmitted, 0);
  }
}

void OwnerSession::on_request(Frame frame, Actions& actions) {
  Result<RequestBody> body = parse(frame);
  if (!body.ok()) return refuse({Reason::kMalformed, body.status().what(), ""}, actions);
  actions.requests.push_back({frame.id, std::move(*body)});
}

void OwnerSession::refuse(const Refusal& refusal, Actions& actions) {
  actions.send += refused(refusal);
  actions.end = true;
  state_ = State::kEnded;
}

ReaderSession::ReaderSession(const Credentials& owner, const Instance& own, std::string where)
    : owner_(owner.instance), hello_{own, owner.secret}, where_(std::move(where)) {}

BoundsOf ReaderSession::expected() const {
  if (state_ == State::kGreeting) return of_greetings;
  return admitted() ? of_answers : of_verdicts;
}

void ReaderSession::on_bytes(std::string_view bytes, std::string& send, std::vector<Answer>& answers) {
  while (ended_.ok()) {
    std::optional<Frame> frame = frames_.take(bytes, expected());
    if (!frame && !frames_.failed().ok()) {
      ended_ = {Code::kPeerUnreachable, where_ + ": " + frames_.failed().what(),
                "run the same kvlink at both ends"};
    }
    if (!frame) return;
    if (frame->id != 0 && admitted()) {
      answers.push_back({frame->id, frame->type, std::move(frame->body)});
    } else {
      on_frame(*frame, send);
    }
  }
}

void ReaderSession::on_frame(const Frame& frame, std::string& send) {
  if (frame.type == Type::kGreeting && frame.body == view(owner_)) {
    state_ = State::kVerdict;
    send += encode(Type::kHello, 0, {reinterpret_cast<const char*>(&hello_), sizeof hello_});
  } else if (frame.type == Type::kGreeting) {
    ended_ = Status::Stale(StaleReason::kRestarted,
                           "another process answers at " + where_ + ": the worker has restarted or ended");
  } else if (frame.type == Type::kAdmitted) {
    state_ = State::kAdmitted;
  } else if (const auto refusal = frame.type == Type::kRefused ? parse_refusal(frame.body) : std::nullopt) {
    const Status said = status_of(*refusal);
    ended_ = {said.code(), where_ + ": " + said.what(), said.fix()};
  } else {
    ended_ = Status::Unreachable(where_ + " sent a frame of the native channel that answers nothing");
  }
}

}  // namespace kvlink::channel

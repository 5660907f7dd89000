// SPDX-License-Identifier: Apache-2.0
#include "channel/client.h"

#include <chrono>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "channel/channel.h"

namespace kvlink::channel {
uint32_t Calls::begin() {
  const std::lock_guard lock(mutex_);
  if (++last_id_ == 0) ++last_id_;
  waiting_[last_id_];
  return last_id_;
}

void Calls::answer(ReaderSession::Answer answer) {
  const std::lock_guard lock(mutex_);
  if (answer.type == Type::kNotified) {
    uint64_t number;
    std::memcpy(&number, answer.body.data(), sizeof number);
    if (on_taken_) on_taken_(number);
    return;
  }
  const auto found = waiting_.find(answer.id);
  if (found == waiting_.end() || found->second) return;
  found->second = std::move(answer);
  changed_.notify_all();
}

std::vector<std::weak_ptr<Connection>> Calls::end(const Status& why) {
  const std::lock_guard lock(mutex_);
  if (ended_.ok()) ended_ = why;
  changed_.notify_all();
  on_taken_ = {};
  if (const auto on_end = std::exchange(on_end_, {})) on_end();
  return std::exchange(connections_, {});
}

Result<ReaderSession::Answer> Calls::wait(uint32_t id, const Patience& patience, const Status& late) {
  std::unique_lock lock(mutex_);
  const auto waiting = waiting_.find(id);
  while (!waiting->second && ended_.ok() && !patience.over()) {
    changed_.wait_for(lock, std::chrono::nanoseconds(patience.piece_ns()));
  }
  const std::optional<ReaderSession::Answer> answer = std::move(waiting->second);
  waiting_.erase(waiting);
  if (answer) return *answer;
  return ended_.ok() ? patience.why_over(late) : ended_;
}

void Calls::watch(std::function<void(uint64_t number)> taken, std::function<void()> ended) {
  const std::lock_guard lock(mutex_);
  if (!ended_.ok()) return ended();
  on_taken_ = std::move(taken);
  on_end_ = std::move(ended);
}

Status Calls::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

bool Calls::keep(std::weak_ptr<Connection> connection) {
  const std::lock_guard lock(mutex_);
  std::erase_if(connections_, [](const auto& known) { return known.expired(); });
  if (ended_.ok()) connections_.push_back(std::move(connection));
  return ended_.ok();
}

Status Client::malformed() const {
  return {Code::kPeerUnreachable, where_ + " sent a malformed answer on the native channel",
          "run the same kvlink at both ends"};
}

Result<std::string> Client::ask(Type request, const std::string& body, Type answer,
                                const Patience& patience) {
  if (Status status = process_.check(); !status.ok()) return status;
  const uint32_t id = calls_->begin();
  channel_->send(serial_, encode(request, id, body));
  const Status late =
      Status::Timeout(where_ + " has not answered on the native channel; its process may be stopped");
  Result<ReaderSession::Answer> answered = calls_->wait(id, patience, late);
  if (!answered.ok()) return answered.status();
  if (answered->type == answer) return std::move(answered->body);
  const std::optional<Refusal> refusal =
      answered->type == Type::kRefused ? parse_refusal(answered->body) : std::nullopt;
  if (!refusal) return malformed();
  const Status said = status_of(*refusal);
  return Status{said.code(), where_ + ": " + said.what(), said.fix()};
}

Result<std::string> Client::card(const Patience& patience) {
  return ask(Type::kCard, {}, Type::kCardIs, patience);
}

Result<Accepted> Client::connect(const ConnectRequest& request, const Patience& patience) {
  const std::string body = write_connect_request(request);
  if (request.hellos.empty() || request.hellos.size() > kMaxHellos || body.size() > kMaxConnectBytes) {
    return Status::Config("a connection over " + request.transport + " has 1 to 64 lanes, and their hellos " +
                          std::to_string(kMaxConnectBytes) + " bytes at most");
  }
  const Result<std::string> answer = ask(Type::kConnect, body, Type::kConnected, patience);
  if (!answer.ok()) return answer.status();
  Result<ConnectReply> reply = read_connect_reply(*answer);
  if (!reply.ok() || !reply->refusal.ok()) return malformed();
  return accepted_of(std::move(*reply));
}

Result<bool> Client::settle(const SeatRef& seat, const Patience& patience) {
  const Result<std::string> answer = ask(Type::kSettle, encode_seat(seat), Type::kSettled, patience);
  if (!answer.ok()) return answer.status();
  return answer->find_first_not_of('\0') != std::string::npos;
}

Result<std::vector<uint32_t>> Client::renew(std::span<const SeatRef> seats, const Patience& patience) {
  KVLINK_CHECK(seats.size() <= kMaxSeats);
  const Result<std::string> answer = ask(Type::kRenew, encode_seats(seats), Type::kRenewed, patience);
  if (!answer.ok()) return answer.status();
  std::optional<std::vector<uint32_t>> ended = parse_numbers(*answer);
  if (!ended) return malformed();
  return std::move(*ended);
}

void Client::notify(uint64_t number, std::string_view sender, std::string_view message) {
  KVLINK_CHECK(sender.size() <= kMaxSenderBytes && message.size() <= kMaxNoticeBytes);
  channel_->send(serial_, encode(Type::kNotify, kNoticeId, encode_notice(number, sender, message)));
}

void Client::end_with_owner(const std::shared_ptr<Connection>& connection) {
  if (!calls_->keep(connection)) connection->close(ended().what());
}

void Client::close() {
  if (process_.inherited()) return;
  channel_->drop(serial_, Status::Cancelled("the channel to " + where_ + " was closed"));
}

}  // namespace kvlink::channel

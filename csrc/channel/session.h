// SPDX-License-Identifier: Apache-2.0
// Both ends of one channel as state machines: bytes and the time in, what is to be done out. No I/O, no
// locks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "channel/frame.h"
#include "channel/messages.h"

namespace kvlink::channel {

/// How long a caller may take to say who it is, and how long one frame may take to arrive.
inline constexpr int64_t kFrameNs = 10'000'000'000;

/// Random for each process. A secret that leaks to whoever took the port of a dead owner opens nothing.
struct Credentials {
  Instance instance{};
  Secret secret{};
  /// REQUIRES that fill_random() works here.
  static Credentials draw();
};

struct CardRequest {};
using RequestBody = std::variant<CardRequest, ConnectRequest, SeatRef, std::vector<SeatRef>, Notice>;
struct Request {
  uint32_t id;
  RequestBody body;
};

/// The owner's end.
class OwnerSession {
 public:
  OwnerSession(const Credentials& own, int64_t now_ns, int64_t frame_ns = kFrameNs);
  /// Returns what is to be sent first. A reader says nothing to a port that has not shown the card's
  /// instance: a false card makes it say nothing to other services, and its secret stays with its owner.
  std::string greeting() const;

  struct Actions {
    std::string send;  // before the answers of the requests
    std::vector<Request> requests;
    bool end = false;  // after what is sent: nothing that comes later counts
  };
  void on_bytes(std::string_view bytes, int64_t now_ns, Actions& actions);
  bool admitted() const { return state_ == State::kAdmitted; }
  /// Returns when the caller has taken too long; INT64_MAX if nothing is due.
  int64_t deadline_ns() const { return deadline_ns_; }
  size_t held_bytes() const { return frames_.held_bytes(); }
  const Instance& caller() const { return caller_; }

 private:
  enum class State : uint8_t { kHello, kAdmitted, kEnded };

  void on_hello(const Frame& frame, Actions& actions);
  void on_request(Frame frame, Actions& actions);
  void refuse(const Refusal& refusal, Actions& actions);

  const Credentials own_;
  const int64_t frame_ns_;
  State state_ = State::kHello;
  int64_t deadline_ns_;
  Instance caller_{};
  FrameReader frames_;
};

/// The reader's end. Ids of requests count from 1 on.
class ReaderSession {
 public:
  /// `where` names the owner in errors.
  ReaderSession(const Credentials& owner, const Instance& own, std::string where);

  struct Answer {
    uint32_t id;
    Type type;
    std::string body;
  };
  /// Appends to `send` what is to be said.
  void on_bytes(std::string_view bytes, std::string& send, std::vector<Answer>& answers);
  bool admitted() const { return state_ == State::kAdmitted; }
  /// Returns why nothing that comes later counts; kOk while the channel works.
  const Status& ended() const { return ended_; }

 private:
  enum class State : uint8_t { kGreeting, kVerdict, kAdmitted };

  BoundsOf expected() const;
  void on_frame(const Frame& frame, std::string& send);

  const Instance owner_;
  const Hello hello_;
  const std::string where_;
  State state_ = State::kGreeting;
  Status ended_;
  FrameReader frames_;
};

}  // namespace kvlink::channel

// SPDX-License-Identifier: Apache-2.0
// Calls on the data path return a Status: success, or a kind of failure with a message. They throw no
// exceptions; bindings/module.cc turns each Code into the Python exception of the same name.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

namespace kvlink {

enum class Code : uint8_t {
  kOk,
  kConfig,                // refused at the edge: the caller's argument or option is wrong
  kLayoutMismatch,        // the two ends describe their blocks differently
  kTransportUnavailable,  // this transport cannot work here or towards this peer
  kPeerUnreachable,       // the owner died, restarted, or its connection broke
  kAccessDenied,          // key, bounds or right refused by the owner or the kernel
  kTimeout,               // the deadline passed; no late byte will land
  kCancelled,             // the caller gave up; no late byte will land
  kStaleBlocks,           // the lease ended before the read did; the bytes must not be used
};

/// Says why blocks are stale: the value found in the slot instead of the ticket's nonce (1 to 4 are
/// tombstones, see LeaseEnd), or what is known of the worker.
enum class StaleReason : uint8_t {
  kUnknown,
  kSettled,       // another reader of the seat settled it
  kExpired,       // its time to live ran out
  kAborted,       // the owner took the offer back
  kEvicted,       // the owner gave the blocks new content
  kReused,        // a new lease has the slot
  kNeverGranted,  // no lease has had the slot yet
  kRestarted,     // the worker restarted
};

/// `what` says what failed and where; `fix` says what to do next and may be empty.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string what, std::string fix = {})
      : code_(code), what_(std::move(what)), fix_(std::move(fix)) {}

  static Status Config(std::string what) { return {Code::kConfig, std::move(what)}; }
  static Status LayoutMismatch(std::string what) { return {Code::kLayoutMismatch, std::move(what)}; }
  static Status Unavailable(std::string what, std::string fix) {
    return {Code::kTransportUnavailable, std::move(what), std::move(fix)};
  }
  static Status Unreachable(std::string what) { return {Code::kPeerUnreachable, std::move(what)}; }
  static Status AccessDenied(std::string what) { return {Code::kAccessDenied, std::move(what)}; }
  static Status Timeout(std::string what) { return {Code::kTimeout, std::move(what)}; }
  static Status Cancelled(std::string what) { return {Code::kCancelled, std::move(what)}; }
  static Status Stale(StaleReason why, std::string what) {
    Status status{Code::kStaleBlocks, std::move(what)};
    status.stale_ = why;
    return status;
  }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& what() const { return what_; }
  const std::string& fix() const { return fix_; }
  StaleReason stale() const { return stale_; }  // of kStaleBlocks
  /// Returns `what` and `fix` in one line.
  std::string sentence() const { return fix_.empty() ? what_ : what_ + "; " + fix_; }

 private:
  Code code_ = Code::kOk;
  StaleReason stale_ = StaleReason::kUnknown;
  std::string what_, fix_;
};

/// Holds a value, or the Status that explains its absence. `*` and `->` REQUIRE ok(); std::get checks it.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : held_(std::move(value)) {}  // NOLINT: implicit by design
  template <typename Other>                     // such as a pointer to a derived class
    requires(std::is_convertible_v<Other, T> && !std::is_same_v<std::remove_cvref_t<Other>, T>)
  Result(Other&& value) : held_(T(std::forward<Other>(value))) {}  // NOLINT: implicit by design
  Result(Status status) : held_(std::move(status)) {}              // NOLINT: implicit by design

  bool ok() const { return held_.index() == 0; }
  Status status() const { return ok() ? Status{} : std::get<1>(held_); }
  T& operator*() & { return std::get<0>(held_); }
  const T& operator*() const& { return std::get<0>(held_); }
  T operator*() && { return std::get<0>(std::move(held_)); }
  T* operator->() { return &std::get<0>(held_); }
  const T* operator->() const { return &std::get<0>(held_); }

 private:
  std::variant<T, Status> held_;
};

}  // namespace kvlink

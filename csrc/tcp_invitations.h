// SPDX-License-Identifier: Apache-2.0
// Who may connect: one-time secrets, handed out over the control plane and shown in the first frame of a
// socket.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "status.h"
#include "tcp_wire.h"

namespace kvlink::tcp {

/// What a reader gets in accept()'s reply.
struct Invitation {
  uint64_t id = 0;
  Secret secret{};

  std::string encode() const;
  /// Nothing when `blob` is malformed.
  static std::optional<Invitation> parse(std::string_view blob);
};

/// Not thread safe: the owner's lock guards it. Times are now_ns().
class Invitations {
 public:
  /// Refuses when too many are still unused.
  Result<Invitation> issue(uint64_t connection_id, int64_t now_ns);
  /// The connection id that `shown` admits to; it admits no second time.
  std::optional<uint64_t> redeem(const Invitation& shown, int64_t now_ns);
  /// False: none was left for this id.
  bool withdraw(uint64_t connection_id);

  static constexpr size_t kMaxUnused = 4096;
  static constexpr int64_t kLifetimeNs = 30'000'000'000;

 private:
  struct Unused {
    uint64_t connection_id;
    Secret secret;
    int64_t expires_ns;
  };
  std::unordered_map<uint64_t, Unused> unused_;
};

}  // namespace kvlink::tcp

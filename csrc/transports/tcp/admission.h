// SPDX-License-Identifier: Apache-2.0
// Who may connect: one-time secrets, handed out over the control plane and shown in the first frame of a
// socket.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/caller_quota.h"
#include "transport_api/transport.h"
#include "transports/tcp/protocol.h"

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
  /// When too many are unused, those of the same caller lapse first.
  Invitation issue(ReaderId reader, int64_t now_ns);
  /// The connection id that `shown` admits to; it admits no second time.
  std::optional<uint64_t> redeem(const Invitation& shown, int64_t now_ns);
  /// False: none was left for this id.
  bool withdraw(uint64_t connection_id);

  static constexpr size_t kMaxUnused = 4096;
  static constexpr size_t kMaxUnusedOfOne = 1024;  // 16 connections that have not come yet, of 64 lanes each
  static constexpr int64_t kLifetimeNs = 30'000'000'000;

 private:
  struct Unused {
    uint64_t connection_id, caller;
    Secret secret;
    int64_t expires_ns;
  };
  template <typename Which>
  size_t erase_if(Which which);

  std::unordered_map<uint64_t, Unused> unused_;  // by Invitation::id
  CallerQuota quota_{kMaxUnusedOfOne, kMaxUnused};
};

}  // namespace kvlink::tcp

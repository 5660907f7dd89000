// SPDX-License-Identifier: Apache-2.0
// Controls who may connect: an owner gives out one-time secrets over the control plane, and a reader shows
// one when it connects.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace kvlink {

struct Invitation {
  uint64_t id = 0;  // finds the secret without comparing it
  std::string secret;

  std::string encode() const;
  /// Returns nothing if `blob` is malformed or has a secret of another length.
  static std::optional<Invitation> parse(std::string_view blob, size_t secret_bytes);
};

/// Not thread safe. Times are now_ns().
class Invitations {
 public:
  struct Limits {
    size_t secret_bytes, most_of_one, most;
    int64_t lifetime_ns;  // INT64_MAX: no end
  };

  explicit Invitations(const Limits& limits) : limits_(limits) {}

  /// One caller's flood costs no other caller anything: a caller that has its share loses its oldest, and
  /// when all places are taken, the caller that has most does.
  Invitation issue(uint64_t caller, uint64_t connection_id, int64_t now_ns);
  /// Returns the connection id that an invitation admits to. It admits no second time.
  std::optional<uint64_t> redeem(const Invitation& shown, int64_t now_ns);
  /// Returns false if none was left for this connection id.
  bool withdraw(uint64_t connection_id);
  void clear();

 private:
  struct Unused {
    uint64_t connection_id, caller;
    std::string secret;
    int64_t expires_ns;
  };
  void make_room(uint64_t caller);
  void erase(uint64_t id);
  template <typename Which>
  size_t erase_if(Which which);

  const Limits limits_;
  std::unordered_map<uint64_t, Unused> unused_;                   // by Invitation::id
  std::unordered_map<uint64_t, std::deque<uint64_t>> by_caller_;  // their ids, oldest first; never empty
};

}  // namespace kvlink

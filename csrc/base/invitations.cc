// SPDX-License-Identifier: Apache-2.0
#include "base/invitations.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/blob.h"
#include "base/host_identity.h"

namespace kvlink {

std::string Invitation::encode() const { return BlobWriter().u64(id).bytes(secret).take(); }

std::optional<Invitation> Invitation::parse(std::string_view blob, size_t secret_bytes) {
  BlobReader from(blob);
  Invitation parsed{from.u64(), std::string(from.bytes(secret_bytes))};
  if (!from.done() || parsed.secret.size() != secret_bytes) return std::nullopt;
  return parsed;
}

Invitation Invitations::issue(uint64_t caller, uint64_t connection_id, int64_t now_ns) {
  if (unused_.size() >= limits_.most) {
    erase_if([now_ns](const Unused& unused) { return unused.expires_ns <= now_ns; });
  }
  make_room(caller);
  const Invitation issued{random_u64(), random_bytes(limits_.secret_bytes)};
  const bool ends = limits_.lifetime_ns < INT64_MAX - now_ns;
  unused_[issued.id] = {connection_id, caller, issued.secret,
                        ends ? now_ns + limits_.lifetime_ns : INT64_MAX};
  by_caller_[caller].push_back(issued.id);
  return issued;
}

void Invitations::make_room(uint64_t caller) {
  auto from = by_caller_.find(caller);
  if (from == by_caller_.end() || from->second.size() < limits_.most_of_one) {
    if (unused_.size() < limits_.most) return;
    from = std::max_element(by_caller_.begin(), by_caller_.end(), [](const auto& one, const auto& other) {
      return one.second.size() < other.second.size();
    });
  }
  erase(from->second.front());
}

void Invitations::erase(uint64_t id) {
  const auto found = unused_.find(id);
  const auto of_caller = by_caller_.find(found->second.caller);
  std::erase(of_caller->second, id);
  if (of_caller->second.empty()) by_caller_.erase(of_caller);
  unused_.erase(found);
}

std::optional<uint64_t> Invitations::redeem(const Invitation& shown, int64_t now_ns) {
  const auto found = unused_.find(shown.id);
  if (found == unused_.end() || !same_secret(found->second.secret, shown.secret)) return std::nullopt;
  const auto [connection_id, expires_ns] = std::pair(found->second.connection_id, found->second.expires_ns);
  erase(shown.id);
  if (expires_ns <= now_ns) return std::nullopt;
  return connection_id;
}

bool Invitations::withdraw(uint64_t connection_id) {
  return erase_if([=](const Unused& unused) { return unused.connection_id == connection_id; }) > 0;
}

void Invitations::clear() {
  unused_.clear();
  by_caller_.clear();
}

template <typename Which>
size_t Invitations::erase_if(Which which) {
  std::vector<uint64_t> ids;
  for (const auto& [id, unused] : unused_) {
    if (which(unused)) ids.push_back(id);
  }
  for (const uint64_t id : ids) erase(id);
  return ids.size();
}

}  // namespace kvlink

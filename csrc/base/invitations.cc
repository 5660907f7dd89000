// SPDX-License-Identifier: Apache-2.0
#include "base/invitations.h"

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
  if (quota_.size() >= limits_.most) {
    erase_if([now_ns](const Unused& unused) { return unused.expires_ns <= now_ns; });
  }
  const Invitation issued{random_u64(), random_bytes(limits_.secret_bytes)};
  if (const auto dropped = quota_.add(caller, issued.id)) unused_.erase(*dropped);
  const int64_t expires_ns =
      limits_.lifetime_ns < INT64_MAX - now_ns ? now_ns + limits_.lifetime_ns : INT64_MAX;
  unused_[issued.id] = {connection_id, caller, issued.secret, expires_ns};
  return issued;
}

std::optional<uint64_t> Invitations::redeem(const Invitation& shown, int64_t now_ns) {
  const auto found = unused_.find(shown.id);
  if (found == unused_.end() || !same_secret(found->second.secret, shown.secret)) return std::nullopt;
  const Unused invitation = found->second;
  quota_.remove(invitation.caller, shown.id);
  unused_.erase(found);
  if (invitation.expires_ns <= now_ns) return std::nullopt;
  return invitation.connection_id;
}

bool Invitations::withdraw(uint64_t connection_id) {
  return erase_if([=](const Unused& unused) { return unused.connection_id == connection_id; }) > 0;
}

void Invitations::clear() {
  unused_.clear();
  quota_.clear();
}

template <typename Which>
size_t Invitations::erase_if(Which which) {
  return std::erase_if(unused_, [&](const auto& entry) {
    const bool goes = which(entry.second);
    if (goes) quota_.remove(entry.second.caller, entry.first);
    return goes;
  });
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
#include "tcp_invitations.h"

#include <cstring>

#include "host.h"
#include "wire.h"

namespace kvlink::tcp {
namespace {

std::string_view view(const Secret& secret) {
  return {reinterpret_cast<const char*>(secret.data()), secret.size()};
}

Secret random_secret() {
  Secret secret;
  std::memcpy(secret.data(), random_bytes(secret.size()).data(), secret.size());
  return secret;
}

}  // namespace

std::string Invitation::encode() const { return BlobWriter().u64(id).bytes(view(secret)).take(); }

std::optional<Invitation> Invitation::parse(std::string_view blob) {
  Invitation parsed;
  BlobReader reader(blob);
  parsed.id = reader.u64();
  const std::string_view secret = reader.bytes(parsed.secret.size());
  if (!reader.done() || secret.size() != parsed.secret.size()) return std::nullopt;
  std::memcpy(parsed.secret.data(), secret.data(), secret.size());
  return parsed;
}

Result<Invitation> Invitations::issue(uint64_t connection_id, int64_t now_ns) {
  if (unused_.size() >= kMaxUnused) {
    std::erase_if(unused_, [now_ns](const auto& entry) { return entry.second.expires_ns <= now_ns; });
  }
  if (unused_.size() >= kMaxUnused) {
    return Status::Unavailable(
        std::to_string(kMaxUnused) + " readers were admitted over tcp and have not connected",
        "check that readers can reach this owner's tcp port, then retry in 30 s");
  }
  const Invitation issued{random_u64(), random_secret()};
  unused_[issued.id] = {connection_id, issued.secret, now_ns + kLifetimeNs};
  return issued;
}

std::optional<uint64_t> Invitations::redeem(const Invitation& shown, int64_t now_ns) {
  const auto found = unused_.find(shown.id);
  if (found == unused_.end() || !same_secret(view(found->second.secret), view(shown.secret)))
    return std::nullopt;
  const Unused invitation = found->second;
  unused_.erase(found);
  if (invitation.expires_ns <= now_ns) return std::nullopt;
  return invitation.connection_id;
}

bool Invitations::withdraw(uint64_t connection_id) {
  return std::erase_if(unused_,
                       [=](const auto& entry) { return entry.second.connection_id == connection_id; }) > 0;
}

}  // namespace kvlink::tcp

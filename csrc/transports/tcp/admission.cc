// SPDX-License-Identifier: Apache-2.0
#include "transports/tcp/admission.h"

#include <cstring>

#include "base/blob.h"
#include "base/host_identity.h"

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

Invitation Invitations::issue(ReaderId reader, int64_t now_ns) {
  if (quota_.size() >= kMaxUnused) {
    erase_if([now_ns](const Unused& unused) { return unused.expires_ns <= now_ns; });
  }
  const Invitation issued{random_u64(), random_secret()};
  if (const auto dropped = quota_.add(reader.caller, issued.id)) unused_.erase(*dropped);
  unused_[issued.id] = {reader.connection_id, reader.caller, issued.secret, now_ns + kLifetimeNs};
  return issued;
}

std::optional<uint64_t> Invitations::redeem(const Invitation& shown, int64_t now_ns) {
  const auto found = unused_.find(shown.id);
  if (found == unused_.end() || !same_secret(view(found->second.secret), view(shown.secret)))
    return std::nullopt;
  const Unused invitation = found->second;
  quota_.remove(invitation.caller, shown.id);
  unused_.erase(found);
  if (invitation.expires_ns <= now_ns) return std::nullopt;
  return invitation.connection_id;
}

bool Invitations::withdraw(uint64_t connection_id) {
  return erase_if([=](const Unused& unused) { return unused.connection_id == connection_id; }) > 0;
}

template <typename Which>
size_t Invitations::erase_if(Which which) {
  return std::erase_if(unused_, [&](const auto& entry) {
    const bool goes = which(entry.second);
    if (goes) quota_.remove(entry.second.caller, entry.first);
    return goes;
  });
}

}  // namespace kvlink::tcp

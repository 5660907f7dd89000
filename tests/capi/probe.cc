// SPDX-License-Identifier: Apache-2.0
// The codecs of csrc/codec, for tests in Python, which call them by ctypes. Each function reads bytes and
// writes what it has read again; it returns the length, or -1 if it refuses, and then writes why.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "codec/card.h"
#include "codec/connect.h"
#include "codec/digest.h"
#include "codec/ticket.h"

namespace {

int64_t give(const std::string& bytes, char* out, uint64_t capacity) {
  if (bytes.size() > capacity) return -2;
  std::copy(bytes.begin(), bytes.end(), out);
  return static_cast<int64_t>(bytes.size());
}

int64_t refuse(const kvlink::Status& status, char* out, uint64_t capacity) {
  const std::string text = status.sentence() + '\0';
  give(text.substr(0, capacity), out, capacity);
  return -1;
}

template <typename Read, typename Write>
int64_t again(const char* bytes, uint64_t length, char* out, uint64_t capacity, Read read, Write write) {
  const auto found = read({bytes, length});
  return found.ok() ? give(write(*found), out, capacity) : refuse(found.status(), out, capacity);
}

}  // namespace

#define PROBE extern "C" [[gnu::visibility("default")]]

PROBE int64_t probe_card(const char* bytes, uint64_t length, char* out, uint64_t capacity) {
  return again(bytes, length, out, capacity, kvlink::read_card, kvlink::write_card);
}

PROBE int64_t probe_sealed(const char* bytes, uint64_t length, char* out, uint64_t capacity) {
  return again(bytes, length, out, capacity, kvlink::unseal_card, kvlink::seal_card);
}

PROBE int64_t probe_request(const char* bytes, uint64_t length, char* out, uint64_t capacity) {
  return again(bytes, length, out, capacity, kvlink::read_connect_request, kvlink::write_connect_request);
}

PROBE int64_t probe_reply(const char* bytes, uint64_t length, char* out, uint64_t capacity) {
  return again(bytes, length, out, capacity, kvlink::read_connect_reply, kvlink::write_connect_reply);
}

PROBE int64_t probe_ticket(const char* bytes, uint64_t length, char* out, uint64_t capacity) {
  return again(bytes, length, out, capacity, kvlink::read_ticket,
               [](const kvlink::Ticket& ticket) { return *kvlink::write_ticket(ticket); });
}

/// Signs the ticket with `key`, a text.
PROBE int64_t probe_sign(const char* bytes, uint64_t length, const char* key, char* out, uint64_t capacity) {
  auto ticket = kvlink::read_ticket({bytes, length});
  if (!ticket.ok()) return refuse(ticket.status(), out, capacity);
  kvlink::sign_ticket(*ticket, key);
  return give(*kvlink::write_ticket(*ticket), out, capacity);
}

/// Returns 0 if the key signed the ticket.
PROBE int64_t probe_check(const char* bytes, uint64_t length, const char* key, char* out, uint64_t capacity) {
  const auto ticket = kvlink::read_ticket({bytes, length});
  if (!ticket.ok()) return refuse(ticket.status(), out, capacity);
  const std::string keys[] = {key};
  const kvlink::Status status = kvlink::check_signature(*ticket, keys);
  return status.ok() ? 0 : refuse(status, out, capacity);
}

PROBE int64_t probe_hmac(const char* key, uint64_t key_length, const char* bytes, uint64_t length,
                         char* out) {
  const kvlink::Sha256 digest = kvlink::hmac_sha256({key, key_length}, {bytes, length});
  std::memcpy(out, digest.data(), digest.size());
  return digest.size();
}

PROBE int64_t probe_crc(const char* bytes, uint64_t length) { return kvlink::crc32({bytes, length}); }

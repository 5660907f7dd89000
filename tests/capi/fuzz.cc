// SPDX-License-Identifier: Apache-2.0
// kvlink_fuzz NUMBER [SEED]: gives the codecs of csrc/codec that many malformed cards, hellos, replies and
// tickets. What a codec takes, it must write and read again to the same bytes.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "codec/card.h"
#include "codec/connect.h"
#include "codec/digest.h"
#include "codec/ticket.h"

namespace kvlink {
namespace {

using Random = std::mt19937_64;

WorkerCard some_card() {
  WorkerCard card;
  card.worker_id = "prefill-0";
  card.epoch = 1'700'000'000'000'000'000;
  card.incarnation = std::string(kIncarnationBytes, 'i');
  card.agent = "127.0.0.1:7000";
  card.host = {"boot", 1, 2, 3, 4};
  card.region_bytes = {1 << 20, 300, 0};
  card.protocol_version = kProtocolVersion;
  card.channel = {
      {"127.0.0.1:7001"}, std::string(kChannelInstanceBytes, 'i'), std::string(kChannelSecretBytes, 's'), 1};
  for (int group = 0; group < 2; ++group) {
    CardLayout layout;
    layout.model = "model";
    layout.dtype = "float16";
    layout.total_heads = layout.tp_size = layout.context_tp_ranks = 1;
    layout.memory = {16, 16, 0, 1, 64, 1024, 64, 64, {}, {}};
    for (uint32_t plane = 0; plane < 4; ++plane)
      layout.memory.planes.push_back({plane % 2, plane, plane * 4096});
    layout.pipeline.bounds = {0, 2, 4};
    card.layouts.push_back(layout);
  }
  card.transports.push_back({"shm", "address", {"key", "other key"}, {"slots", "words"}, "", false});
  card.transports.push_back({"tcp", "", {}, {}, "why not", true});
  return card;
}

Ticket some_ticket() {
  Ticket ticket;
  ticket.request_id = "request";
  ticket.worker_id = "prefill-0";
  ticket.agent = "127.0.0.1:7000";
  ticket.epoch = 3;
  ticket.seats = {{1, 1 << 20, 1 << 21}, {2, 1 << 22, 1 << 23}};
  ticket.block_ids = {5, 6, 7};
  ticket.num_tokens = 64;
  ticket.groups = {{1, 64}, {2, 32}};
  ticket.ready_unit = ReadyUnit::kTokens;
  ticket.signature = std::string(kSignatureBytes, 's');
  ticket.trace = std::string(kTraceBytes, 't');
  ticket.digest_bytes = 16;
  ticket.digests = std::string(32, 'd');
  ticket.model = 99;
  return ticket;
}

/// Changes some bytes: others in their place, some away, some twice, or a number at its limit.
void damage(std::string& blob, Random& random) {
  constexpr uint64_t kLimits[] = {0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0xFFFFFFFF, UINT64_MAX};
  for (uint64_t times = 1 + random() % 4; times > 0 && !blob.empty(); --times) {
    const size_t at = random() % blob.size(), size = std::min<size_t>(1 + random() % 8, blob.size() - at);
    switch (random() % 5) {
      case 0:
        blob[at] = static_cast<char>(random());
        break;
      case 1:
        blob.erase(at, size);
        break;
      case 2:
        blob.insert(at, blob.substr(at, size));
        break;
      case 3:
        blob.resize(at);
        break;
      default:
        const uint64_t limit = kLimits[random() % std::size(kLimits)];
        blob.replace(at, size, reinterpret_cast<const char*>(&limit), size);
    }
  }
}

/// A checksum would refuse nearly all of what damage() makes.
void mend_ticket(std::string& blob) {
  constexpr size_t kPrefix = 12;
  if (blob.size() < kPrefix) return;
  const uint32_t checksum = crc32(std::string_view(blob).substr(kPrefix));
  blob.replace(kPrefix - sizeof checksum, sizeof checksum, reinterpret_cast<const char*>(&checksum),
               sizeof checksum);
}

[[noreturn]] void fail(const char* what, const std::string& blob, const std::string& why) {
  std::printf("%s: %s\n", what, why.c_str());
  for (const char byte : blob) std::printf("%02x", static_cast<uint8_t>(byte));
  std::printf("\n");
  std::exit(1);
}

template <typename Read, typename Write>
bool agrees(const char* what, const std::string& blob, Read read, Write write) {
  const auto found = read(blob);
  if (!found.ok()) {
    if (found.status().code() != Code::kConfig) fail(what, blob, "refused by " + found.status().what());
    return false;
  }
  const std::string written = write(*found);
  const auto again = read(written);
  if (!again.ok()) fail(what, blob, "taken, and refused when written again: " + again.status().what());
  if (write(*again) != written) fail(what, blob, "written twice in two ways");
  return true;
}

int fuzz(uint64_t number, uint64_t seed) {
  Random random(seed);
  const auto ticket_bytes = [](const Ticket& ticket) {
    const auto written = write_ticket(ticket);
    if (!written.ok()) fail("ticket", {}, "read, and not written: " + written.status().what());
    return *written;
  };
  const std::string card = write_card(some_card()), ticket = ticket_bytes(some_ticket());
  const std::string request =
      write_connect_request({"prefill-0", 3, "tcp", {"hello", std::string(200, 'h')}});
  const std::string reply = write_connect_reply({7, {"reply"}, {"key"}, {"slots", "words"}, {}});
  const std::string refusal = write_connect_reply({0, {}, {}, {}, Status::Config("no")});
  uint64_t taken = 0;
  for (uint64_t at = 0; at < number; ++at) {
    const std::string* const whole[] = {&card, &ticket, &request, &reply, &refusal};
    const uint64_t kind = random() % std::size(whole);
    std::string blob = *whole[kind];
    damage(blob, random);
    if (kind == 0) taken += agrees("card", blob, read_card, write_card);
    if (kind == 1) {
      if (random() % 8 != 0) mend_ticket(blob);
      taken += agrees("ticket", blob, read_ticket, ticket_bytes);
    }
    if (kind == 2) taken += agrees("request", blob, read_connect_request, write_connect_request);
    if (kind > 2) taken += agrees("reply", blob, read_connect_reply, write_connect_reply);
  }
  std::printf("%llu inputs, %llu taken, seed %llu\n", static_cast<unsigned long long>(number),
              static_cast<unsigned long long>(taken), static_cast<unsigned long long>(seed));
  return taken > 0 && taken < number ? 0 : 1;
}

}  // namespace
}  // namespace kvlink

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  return kvlink::fuzz(std::strtoull(argv[1], nullptr, 10),
                      argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
}

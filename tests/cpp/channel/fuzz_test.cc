// SPDX-License-Identifier: Apache-2.0
// Whatever bytes come, both ends of a channel hold little, hand out only what is within its bounds, and do
// nothing after their end. KVLINK_FUZZ_INPUTS=10000000: so many inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "channel/session.h"

namespace kvlink::channel {
namespace {

constexpr size_t kMostHeld = 2 * kMaxConnectBytes;

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  size_t below(size_t end) { return random_() % end; }
  bool once_in(size_t n) { return below(n) == 0; }

  std::string bytes(size_t most) {
    std::string made(below(most + 1), '\0');
    for (char& each : made) each = static_cast<char>(random_());
    return made;
  }

  std::vector<std::string> strings(size_t most) {
    std::vector<std::string> made(below(most + 1));
    for (std::string& each : made) each = bytes(40);
    return made;
  }

  std::vector<SeatRef> seats(size_t most) {
    std::vector<SeatRef> made(below(most + 1));
    for (SeatRef& each : made) each = {static_cast<uint32_t>(random_()), random_()};
    return made;
  }

  std::string request() {
    const auto id = static_cast<uint32_t>(below(4));
    switch (below(5)) {
      case 0:
        return encode(Type::kCard, id);
      case 1:
        return encode(Type::kConnect, id,
                      write_connect_request({"owner", 1, "tcp", strings(70), once_in(2)}));
      case 2:
        return encode(Type::kSettle, id, encode_seat({1, random_()}));
      case 3:
        return encode(Type::kRenew, id, encode_seats(seats(once_in(50) ? kMaxSeats + 2 : 5)));
      default:
        return encode(static_cast<Type>(below(16)), id, bytes(80));
    }
  }

  std::string answer() {
    const auto id = static_cast<uint32_t>(below(4));
    switch (below(5)) {
      case 0:
        return encode(Type::kConnected, id,
                      write_connect_reply({1, strings(70), strings(9), strings(3), {}}));
      case 1:
        return encode(Type::kRefused, id,
                      encode_refusal({static_cast<Reason>(below(9)), bytes(50), bytes(9)}));
      case 2:
        return encode(Type::kRenewed, id, encode_numbers(std::vector<uint32_t>(below(6))));
      case 3:
        return encode(Type::kCardIs, id, bytes(200));
      default:
        return encode(static_cast<Type>(below(16)), id, bytes(80));
    }
  }

  /// Changes, drops, doubles and swaps some of it.
  void spoil(std::string& stream) {
    for (size_t changes = below(4); changes > 0 && !stream.empty(); --changes) {
      const size_t at = below(stream.size()), size = below(std::min<size_t>(stream.size() - at, 90) + 1);
      switch (below(5)) {
        case 0:
          stream[at] = static_cast<char>(random_());
          break;
        case 1:
          stream.erase(at, size);
          break;
        case 2:
          stream.insert(at, stream.substr(at, size));
          break;
        case 3: {
          const uint32_t number = once_in(2) ? UINT32_MAX : static_cast<uint32_t>(below(1 << 17));
          if (at + sizeof number <= stream.size()) std::memcpy(&stream[at], &number, sizeof number);
          break;
        }
        default:
          std::rotate(stream.begin(), stream.begin() + static_cast<ptrdiff_t>(at), stream.end());
      }
    }
  }

 private:
  std::mt19937_64 random_;
};

void expect_within_bounds(const Request& request) {
  EXPECT_NE(request.id, 0u);
  if (const auto* connect = std::get_if<ConnectRequest>(&request.body)) {
    EXPECT_TRUE(!connect->hellos.empty() && connect->hellos.size() <= 64);
    EXPECT_LE(write_connect_request(*connect).size(), size_t{kMaxConnectBytes});
  } else if (const auto* seats = std::get_if<std::vector<SeatRef>>(&request.body)) {
    EXPECT_LE(seats->size(), size_t{kMaxSeats});
  }
}

/// Returns the number of requests.
size_t give_owner(Generator& generator, const Credentials& own) {
  OwnerSession session(own, 0);
  std::string stream;
  std::vector<ReaderSession::Answer> none;
  ReaderSession(own, {}, "the owner").on_bytes(session.greeting(), stream, none);
  for (size_t count = generator.below(5); count > 0; --count) stream += generator.request();
  if (!generator.once_in(4)) generator.spoil(stream);
  size_t num_requests = 0;
  bool ended = false;
  for (std::string_view rest = stream; !rest.empty();) {
    const size_t size = 1 + generator.below(rest.size());
    OwnerSession::Actions actions;
    session.on_bytes(rest.substr(0, size), 1, actions);
    rest.remove_prefix(size);
    EXPECT_TRUE(!ended || (actions.send.empty() && actions.requests.empty()));
    EXPECT_LE(session.held_bytes(), session.admitted() ? kMostHeld : 2 * sizeof(Hello));
    ended |= actions.end;
    num_requests += actions.requests.size();
    for (const Request& request : actions.requests) expect_within_bounds(request);
  }
  return num_requests;
}

size_t give_reader(Generator& generator, const Credentials& owner) {
  std::string stream = OwnerSession(owner, 0).greeting() + encode(Type::kAdmitted, 0);
  for (size_t count = generator.below(5); count > 0; --count) stream += generator.answer();
  if (!generator.once_in(4)) generator.spoil(stream);
  ReaderSession session(owner, {}, "the owner");
  std::vector<ReaderSession::Answer> answers;
  std::string said;
  for (std::string_view rest = stream; !rest.empty();) {
    const size_t size = 1 + generator.below(rest.size());
    session.on_bytes(rest.substr(0, size), said, answers);
    rest.remove_prefix(size);
  }
  EXPECT_LE(said.size(), sizeof(FrameHeader) + sizeof(Hello));
  size_t num_parsed = 0;
  for (const ReaderSession::Answer& answer : answers) {
    EXPECT_NE(answer.id, 0u);
    if (const auto refusal = parse_refusal(answer.body)) num_parsed += !status_of(*refusal).ok();
    if (const auto reply = read_connect_reply(answer.body); reply.ok()) {
      EXPECT_TRUE(reply->replies.size() <= 64 && reply->lease_keys.size() <= 2);
      ++num_parsed;
    }
    const auto numbers = parse_numbers(answer.body);
    num_parsed += numbers && numbers->size() <= kMaxSeats;
  }
  return num_parsed;
}

TEST(ChannelFuzz, NothingLeavesItsBounds) {
  const char* const given = std::getenv("KVLINK_FUZZ_INPUTS");
  const size_t num_inputs = given ? std::strtoull(given, nullptr, 10) : 100'000;
  Generator generator(55);
  const Credentials own{{'i'}, {'s'}};
  size_t num_requests = 0, num_answers = 0;
  for (size_t input = 0; input < num_inputs && !::testing::Test::HasFailure(); ++input) {
    num_requests += give_owner(generator, own);
    num_answers += give_reader(generator, own);
  }
  EXPECT_GT(num_requests, num_inputs / 8) << "the generator finds too few requests that are whole";
  EXPECT_GT(num_answers, num_inputs / 8);
}

}  // namespace
}  // namespace kvlink::channel

// SPDX-License-Identifier: Apache-2.0
#include "channel/session.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace kvlink::channel {
namespace {

constexpr int64_t kNow = 1'000;

Credentials credentials(char instance = 'i', char secret = 's') {
  Credentials made;
  made.instance.fill(instance);
  made.secret.fill(secret);
  return made;
}

const Instance kCaller = credentials('c').instance;

std::string greeting(const Credentials& own = credentials()) { return OwnerSession(own, kNow).greeting(); }

std::string hello(const Credentials& shown = credentials()) {
  std::string said;
  std::vector<ReaderSession::Answer> answers;
  ReaderSession(shown, kCaller, "the owner").on_bytes(greeting(), said, answers);
  return said;
}

using Actions = OwnerSession::Actions;

Actions feed(OwnerSession& session, std::string_view bytes, int64_t now = kNow) {
  Actions actions;
  session.on_bytes(bytes, now, actions);
  return actions;
}

OwnerSession admitted() {
  OwnerSession session(credentials(), kNow);
  EXPECT_EQ(feed(session, hello()).send, encode(Type::kAdmitted, 0));
  return session;
}

/// Gives what an owner sends to a reader, and returns why the reader's channel ended.
Status told(const std::string& sent, const std::string& first = greeting()) {
  ReaderSession reader(credentials(), kCaller, "10.0.0.1:7000");
  std::string said;
  std::vector<ReaderSession::Answer> answers;
  reader.on_bytes(first + sent, said, answers);
  EXPECT_TRUE(answers.empty());
  EXPECT_EQ(said.empty(), first != greeting());
  return reader.ended();
}

const ConnectRequest kConnectOverTcp{"owner", 3, "tcp", {"first lane", "second lane"}};
const std::vector<SeatRef> kSeats{{1, 70}, {9, 71}};

/// Each kind of request, after a hello.
std::string all_requests() {
  return hello() + encode(Type::kCard, 1) +
         encode(Type::kConnect, 2, write_connect_request(kConnectOverTcp)) +
         encode(Type::kSettle, 3, encode_seat(kSeats[0])) + encode(Type::kRenew, 4, encode_seats(kSeats));
}

void expect_all_requests(const Actions& actions) {
  EXPECT_EQ(actions.send, encode(Type::kAdmitted, 0));
  EXPECT_FALSE(actions.end);
  ASSERT_EQ(actions.requests.size(), 4u);
  for (uint32_t index = 0; index < 4; ++index) EXPECT_EQ(actions.requests[index].id, index + 1);
  const auto& connect = std::get<ConnectRequest>(actions.requests[1].body);
  EXPECT_EQ(connect.transport, "tcp");
  EXPECT_TRUE(connect.takes_keys);
  EXPECT_EQ(connect.hellos, kConnectOverTcp.hellos);
  EXPECT_EQ(std::get<SeatRef>(actions.requests[2].body), kSeats[0]);
  EXPECT_EQ(std::get<std::vector<SeatRef>>(actions.requests[3].body), kSeats);
}

TEST(OwnerSession, HandsOutEachRequestInItsOrder) {
  OwnerSession session(credentials(), kNow);
  expect_all_requests(feed(session, all_requests()));
  EXPECT_EQ(session.caller(), kCaller);
}

TEST(OwnerSession, FindsTheSameRequestsWhereverTheBytesAreCut) {
  const std::string whole = all_requests();
  for (size_t cut = 0; cut <= whole.size(); ++cut) {
    OwnerSession session(credentials(), kNow);
    Actions actions;
    session.on_bytes(std::string_view(whole).substr(0, cut), kNow, actions);
    session.on_bytes(std::string_view(whole).substr(cut), kNow, actions);
    expect_all_requests(actions);
  }
  OwnerSession session(credentials(), kNow);
  Actions actions;
  for (const char& each : whole) session.on_bytes({&each, 1}, kNow, actions);
  expect_all_requests(actions);
}

TEST(OwnerSession, DoesNothingForAFrameThatIsCutOff) {
  const std::string whole = all_requests();
  const size_t connect = hello().size() + encode(Type::kCard, 1).size();
  const size_t end = connect + encode(Type::kConnect, 2, write_connect_request(kConnectOverTcp)).size();
  for (size_t cut = connect; cut < end; ++cut) {
    OwnerSession session(credentials(), kNow);
    EXPECT_EQ(feed(session, whole.substr(0, cut)).requests.size(), 1u);
  }
}

TEST(OwnerSession, AdmitsOnlyWhoHasItsCard) {
  OwnerSession session(credentials(), kNow);
  Credentials almost = credentials();
  almost.secret.back() ^= 1;
  const Actions wrong = feed(session, hello(almost) + encode(Type::kCard, 1));
  EXPECT_TRUE(wrong.end && wrong.requests.empty());
  EXPECT_EQ(told(wrong.send).code(), Code::kAccessDenied);
  EXPECT_FALSE(session.admitted());
}

TEST(OwnerSession, ServesNoRequestBeforeTheHelloAndNoHelloAfterIt) {
  OwnerSession before(credentials(), kNow);
  const Actions early = feed(before, encode(Type::kCard, 1) + hello());
  EXPECT_TRUE(early.end && early.requests.empty());
  OwnerSession after = admitted();
  const Actions again = feed(after, hello() + encode(Type::kCard, 1));
  EXPECT_TRUE(again.end && again.requests.empty());
  EXPECT_FALSE(told(again.send).ok());
}

TEST(OwnerSession, ServesARequestThatComesTwiceTwice) {
  OwnerSession session = admitted();
  const std::string settle = encode(Type::kSettle, 3, encode_seat(kSeats[0]));
  EXPECT_EQ(feed(session, settle + settle).requests.size(), 2u);
}

FrameHeader header(Type type, uint32_t bytes) {
  return {kMagic, kVersion, static_cast<uint16_t>(type), bytes, 1};
}

std::string_view view(const FrameHeader& header) {
  return {reinterpret_cast<const char*>(&header), sizeof header};
}

void expect_refused(OwnerSession session, const FrameHeader& header, const std::string& why) {
  const Actions actions = feed(session, view(header));
  EXPECT_TRUE(actions.end);
  EXPECT_LE(session.held_bytes(), sizeof(std::string));
  EXPECT_NE(told(actions.send).what().find(why), std::string::npos) << told(actions.send).what();
  EXPECT_TRUE(feed(session, hello() + encode(Type::kCard, 1)).send.empty()) << "it goes on after its end";
}

TEST(OwnerSession, RefusesAFrameByItsHeader) {
  const OwnerSession fresh(credentials(), kNow);
  expect_refused(fresh, header(Type::kHello, sizeof(Hello) + 1), "49 bytes, and may have 48");
  expect_refused(fresh, header(Type::kHello, sizeof(Hello) - 1), "47 bytes");
  expect_refused(fresh, header(Type::kConnect, 100), "type 7 is not expected");
  expect_refused(admitted(), header(Type::kConnect, kMaxConnectBytes + 1), "65537 bytes");
  expect_refused(admitted(), header(Type::kConnect, UINT32_MAX), "4294967295 bytes");
  expect_refused(admitted(), header(Type::kCard, 1), "1 bytes");
  expect_refused(admitted(), header(Type::kSettle, 13), "13 bytes");
  expect_refused(admitted(), header(Type::kRenew, 4 + 12 * kMaxSeats + 1), "12293 bytes");
  expect_refused(admitted(), header(static_cast<Type>(77), 0), "type 77 is not expected");
  expect_refused(admitted(), header(Type::kConnected, 16), "type 8 is not expected");
  FrameHeader newer = header(Type::kCard, 0), foreign = newer;
  newer.version = 2;
  foreign.magic = 0x20544547;  // "GET "
  expect_refused(admitted(), newer, "version 2");
  expect_refused(fresh, foreign, "no frame");
}

TEST(OwnerSession, GivesAHelloAndEachFrameTenSeconds) {
  OwnerSession session(credentials(), kNow);
  EXPECT_EQ(session.deadline_ns(), kNow + 10'000'000'000);
  feed(session, hello().substr(0, 30), kNow + 5);
  EXPECT_EQ(session.deadline_ns(), kNow + 10'000'000'000) << "a byte now and then buys no time";
  feed(session, hello().substr(30), kNow + 6);
  EXPECT_EQ(session.deadline_ns(), INT64_MAX);
  const std::string settle = encode(Type::kSettle, 3, encode_seat(kSeats[0]));
  feed(session, settle + settle.substr(0, 1), kNow + 7);
  EXPECT_EQ(session.deadline_ns(), kNow + 7 + kFrameNs);
  feed(session, settle.substr(1, 20), kNow + 8);
  EXPECT_EQ(session.deadline_ns(), kNow + 7 + kFrameNs);
  feed(session, settle.substr(21), kNow + 9);
  EXPECT_EQ(session.deadline_ns(), INT64_MAX);
}

TEST(OwnerSession, RefusesMalformedBodies) {
  const std::string seat = encode_seat(kSeats[0]);
  const std::string connect = write_connect_request(kConnectOverTcp);
  ConnectRequest many = kConnectOverTcp, nameless = kConnectOverTcp, silent = kConnectOverTcp;
  many.hellos.resize(kMaxHellos + 1, "x"), nameless.transport.clear(), silent.hellos.clear();
  for (const std::string& body : {connect + "x", write_connect_request(many), write_connect_request(nameless),
                                  write_connect_request(silent)}) {
    OwnerSession session = admitted();
    const Actions actions = feed(session, encode(Type::kConnect, 1, body));
    EXPECT_TRUE(actions.end && actions.requests.empty());
    EXPECT_EQ(told(actions.send).code(), Code::kConfig);
  }
  OwnerSession unnumbered = admitted();
  EXPECT_TRUE(feed(unnumbered, encode(Type::kSettle, 0, seat)).end);
}

TEST(ReaderSession, SaysNothingToAnotherProcess) {
  const Status restarted = told("", greeting(credentials('j')));
  EXPECT_EQ(restarted.code(), Code::kStaleBlocks);
  EXPECT_EQ(restarted.stale(), StaleReason::kRestarted);
  EXPECT_NE(restarted.what().find("10.0.0.1:7000"), std::string::npos);
  for (const std::string& other : {std::string("SSH-2.0-OpenSSH_9.2p1 Debian"), encode(Type::kAdmitted, 0),
                                   encode(Type::kHello, 0, "x")}) {
    EXPECT_EQ(told("", other).code(), Code::kPeerUnreachable);
  }
  const std::string full = encode(Type::kRefused, 0, encode_refusal({Reason::kTooMany, "many", ""}));
  EXPECT_EQ(told("", full).what(), "10.0.0.1:7000: many");
  EXPECT_TRUE(told("", greeting().substr(0, 31)).ok());
}

TEST(ReaderSession, MatchesAnswersByTheirIds) {
  ReaderSession reader(credentials(), kCaller, "10.0.0.1:7000");
  std::vector<ReaderSession::Answer> answers;
  const std::string refusal = encode_refusal({Reason::kTooMany, "too many", "retry"});
  const std::string whole = greeting() + encode(Type::kAdmitted, 0) +
                            encode(Type::kSettled, 2, std::string(4, '\1')) +
                            encode(Type::kRefused, 1, refusal);
  std::string said;
  for (const char& each : whole) reader.on_bytes({&each, 1}, said, answers);
  EXPECT_EQ(said, hello());
  EXPECT_TRUE(reader.admitted() && reader.ended().ok());
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_EQ(answers[0].id, 2u);
  EXPECT_EQ(answers[1].type, Type::kRefused);
  EXPECT_EQ(status_of(*parse_refusal(answers[1].body)).code(), Code::kPeerUnreachable);
}

TEST(ReaderSession, EndsWithASentenceThatNamesTheOwner) {
  const std::string busy = encode_refusal({Reason::kTooMany, "20,000 \x1b[31mreaders", "retry"});
  const Status status = told(encode(Type::kRefused, 0, busy));
  EXPECT_EQ(status.sentence(), "10.0.0.1:7000: 20,000  [31mreaders; retry");
  for (const std::string& sent : {std::string("HTTP/1.1 400 Bad Request"), encode(Type::kSettled, 1, "1234"),
                                  encode(Type::kHello, 0), encode(Type::kRefused, 0, std::string(12, '\xff')),
                                  encode(Type::kAdmitted, 0) + encode(Type::kSettled, 0, "1234"),
                                  encode(Type::kRefused, 1, encode_refusal({}))}) {
    const Status ended = told(sent);
    EXPECT_EQ(ended.code(), Code::kPeerUnreachable) << ended.what();
    EXPECT_NE(ended.what().find("10.0.0.1:7000"), std::string::npos);
  }
}

TEST(Messages, KeepWhatTheyCarry) {
  const Accepted accepted{5, {"one", ""}, {"pool", "more"}, {"slots", "words"}};
  const auto parsed = accepted_of(reply_of(accepted));
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->connection_id, 5u);
  EXPECT_EQ(parsed->replies, accepted.replies);
  EXPECT_EQ(parsed->pool_keys, accepted.pool_keys);
  EXPECT_EQ(parsed->lease_keys, accepted.lease_keys);
  EXPECT_EQ(accepted_of(reply_of(Status::AccessDenied("why"))).status().code(), Code::kAccessDenied);
  EXPECT_EQ(parse_numbers(encode_numbers(std::vector<uint32_t>{3, 4})), (std::vector<uint32_t>{3, 4}));
  EXPECT_FALSE(parse_numbers(encode_numbers(std::vector<uint32_t>{3, 4}).substr(0, 8)).has_value());
}

TEST(Messages, ARefusalKeepsItsKind) {
  for (const Status& status :
       {Status::Config("why"), Status::Unavailable("why", "fix"), Status::AccessDenied("why")}) {
    EXPECT_EQ(status_of(refusal_of(status)).code(), status.code());
    EXPECT_EQ(status_of(refusal_of(status)).sentence(), status.sentence());
  }
  EXPECT_EQ(status_of(refusal_of(Status::Timeout("why"))).code(), Code::kPeerUnreachable);
  EXPECT_EQ(parse_refusal(encode_refusal({Reason::kFailed, std::string(9000, 'w'), ""}))->what.size(),
            size_t{kMaxTextBytes});
}

}  // namespace
}  // namespace kvlink::channel

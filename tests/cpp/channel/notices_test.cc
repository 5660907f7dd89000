// SPDX-License-Identifier: Apache-2.0
// Notices: order, bounds, and links that break while some are under way.
#include "channel/notices.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "channel/channel.h"

namespace kvlink::channel {
namespace {

using Texts = std::vector<std::pair<std::string, std::string>>;
constexpr int64_t kSecond = 1'000'000'000;

Instance caller(char name) {
  Instance made;
  made.fill(name);
  return made;
}

Texts taken(Inbox& inbox, const Inbox::Tell& tell = [](uint64_t, uint64_t) {}) {
  Texts texts;
  inbox.take(texts, tell);
  return texts;
}

TEST(Notices, ComeInOrderAndOnce) {
  Inbox inbox;
  Texts told;
  const auto tell = [&](uint64_t link, uint64_t number) {
    told.emplace_back(std::to_string(link), std::to_string(number));
  };
  EXPECT_TRUE(inbox.add(caller('a'), 5, {1, "a", "one"}).fits);
  EXPECT_TRUE(inbox.add(caller('b'), 6, {1, "b", "uno"}).fits);
  EXPECT_TRUE(inbox.add(caller('a'), 5, {2, "a", "two"}).fits);
  EXPECT_EQ(inbox.add(caller('a'), 7, {1, "a", "one"}).taken, 0U);  // again over another link
  EXPECT_TRUE(told.empty());
  EXPECT_EQ(taken(inbox, tell), (Texts{{"a", "one"}, {"b", "uno"}, {"a", "two"}}));
  EXPECT_EQ(told, (Texts{{"7", "2"}, {"6", "1"}}));
  EXPECT_EQ(inbox.add(caller('a'), 8, {2, "a", "two"}).taken, 2U);
  EXPECT_TRUE(taken(inbox).empty());
}

TEST(Notices, ACallerHasABound) {
  Inbox inbox;
  EXPECT_TRUE(inbox.add(caller('a'), 1, {1, "a", std::string(kMaxNoticeBytes, 'x')}).fits);
  EXPECT_FALSE(inbox.add(caller('a'), 1, {2, "a", "x"}).fits);
  EXPECT_TRUE(inbox.add(caller('b'), 2, {1, "b", "x"}).fits);  // another's is its own
  EXPECT_EQ(taken(inbox).size(), 2U);
  EXPECT_TRUE(inbox.add(caller('a'), 1, {2, "a", "x"}).fits);
  // Empty ones count as well.
  uint64_t number = 2;
  while (inbox.add(caller('a'), 1, {++number, "a", ""}).fits) ASSERT_LT(number, 1U << 20);
}

TEST(Notices, SilentCallersAreForgottenAndOthersKept) {
  Inbox inbox;
  EXPECT_TRUE(inbox.add(caller('a'), 1, {1, "a", "kept"}).fits);
  for (uint32_t other = 0; other < 10'000; ++other) {
    Instance who{};
    std::memcpy(who.data(), &other, sizeof other);
    EXPECT_TRUE(inbox.add(who, 2, {1, "other", ""}).fits);
    if (other % 8 == 7) {
      taken(inbox);
      EXPECT_TRUE(inbox.add(caller('a'), 1, {2 + other, "a", "kept"}).fits);
    }
  }
  EXPECT_TRUE(inbox.add(caller('a'), 1, {2, "a", "known"}).fits);
  for (const auto& [sender, text] : taken(inbox)) EXPECT_NE(text, "known");
}

TEST(Notices, AreSentAgainOverTheNextLink) {
  Outbox outbox;
  std::vector<uint64_t> first, second;
  EXPECT_TRUE(outbox.add("one").ok());
  outbox.attach([&](uint64_t number, std::string_view) { first.push_back(number); });
  EXPECT_TRUE(outbox.add("two").ok());
  EXPECT_TRUE(outbox.add("three").ok());
  outbox.taken(1);
  outbox.detach();
  EXPECT_TRUE(outbox.add("four").ok());
  EXPECT_EQ(first, (std::vector<uint64_t>{1, 2, 3}));
  outbox.attach([&](uint64_t number, std::string_view) { second.push_back(number); });
  EXPECT_EQ(second, (std::vector<uint64_t>{2, 3, 4}));
  EXPECT_FALSE(outbox.empty());
  outbox.taken(4);
  EXPECT_TRUE(outbox.empty());
}

TEST(Notices, TooManyAreRefusedBeforeTheyAreKept) {
  Outbox outbox;
  EXPECT_TRUE(outbox.add(std::string(kMaxNoticeBytes, 'x')).ok());
  EXPECT_EQ(outbox.add("x").code(), Code::kConfig);
  outbox.taken(1);
  EXPECT_TRUE(outbox.add("x").ok());
}

/// An owner whose user takes what arrives.
struct Owner {
  Inbox inbox;
  std::shared_ptr<Channel> channel = *Channel::make();
  ChannelAddress address;
  Inbox::Tell tell = [this](uint64_t link, uint64_t number) { channel->notified(link, number); };

  Owner() {
    Serving serving{[](const ConnectRequest&, uint64_t) { return Result<Accepted>(Status::Config("none")); },
                    [](const SeatRef&) { return false; }, [](const SeatRef&) { return false; },
                    [this](const Instance& from, uint64_t link, Notice notice) {
                      return inbox.add(from, link, std::move(notice));
                    }};
    address = *channel->listen(std::move(serving), "127.0.0.1", 0);
  }
  ~Owner() { channel->close(); }

  Texts take(size_t count) {
    Texts texts;
    for (const int64_t until = now_ns() + 20 * kSecond; texts.size() < count && now_ns() < until;) {
      inbox.take(texts, tell);
      std::this_thread::yield();
    }
    return texts;
  }
};

TEST(Notices, CrossTheChannel) {
  Owner owner;
  const auto channel = *Channel::make();
  const auto client = *channel->dial(owner.address, 10 * kSecond);
  Outbox outbox;
  client->watch([&](uint64_t number) { outbox.taken(number); }, [] {});
  outbox.attach([&](uint64_t number, std::string_view text) { client->notify(number, "me", text); });
  Texts wanted;
  for (int index = 0; index < 1000; ++index) {
    wanted.emplace_back("me", std::string(static_cast<size_t>(index), 'x') + std::to_string(index));
    ASSERT_TRUE(outbox.add(wanted.back().second).ok());
  }
  EXPECT_EQ(owner.take(wanted.size()), wanted);
  while (!outbox.empty()) std::this_thread::yield();  // the answers come
  channel->close();
}

TEST(Notices, ALinkThatEndsIsTold) {
  Owner owner;
  const auto channel = *Channel::make();
  const auto client = *channel->dial(owner.address, 10 * kSecond);
  std::atomic<int> ended{0};
  client->watch([](uint64_t) {}, [&] { ++ended; });
  client->notify(1, "me", std::string(kMaxNoticeBytes, 'x'));
  EXPECT_EQ(ended, 0);
  client->notify(2, "me", "more than may be queued");  // an honest caller would not send it
  while (ended == 0) std::this_thread::yield();
  client->watch([](uint64_t) {}, [&] { ++ended; });
  EXPECT_EQ(ended, 2);
  channel->close();
}

TEST(Notices, MalformedOnesAreRefused) {
  const std::string good = encode_notice(1, "me", "text");
  EXPECT_EQ(parse_notice(good), (Notice{1, "me", "text"}));
  EXPECT_FALSE(parse_notice(good.substr(0, good.size() - 1)));
  EXPECT_FALSE(parse_notice(good + "x"));
  EXPECT_FALSE(parse_notice(encode_notice(0, "me", "text")));
  EXPECT_FALSE(parse_notice(encode_notice(1, std::string(kMaxSenderBytes + 1, 'x'), "text")));
}

}  // namespace
}  // namespace kvlink::channel

// SPDX-License-Identifier: Apache-2.0
// Reads by way of staging buffers: when they are used, and what they do.

#include "staging/staged_read.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "staging/staging_policy.h"

namespace kvlink {
namespace {

constexpr uint32_t kSlotBytes = 4096, kSlotRegion = 5;
std::byte* const kPool = reinterpret_cast<std::byte*>(uintptr_t{1} << 40);
std::byte* const kSlot = reinterpret_cast<std::byte*>(uintptr_t{1} << 41);

struct Reads {
  std::vector<ReadOp> ops;
  std::vector<Segment> segments;

  void add(uint32_t region, uint64_t offset, const std::vector<std::pair<uint64_t, uint32_t>>& places) {
    ReadOp op{offset, 0, region, static_cast<uint32_t>(segments.size()),
              static_cast<uint32_t>(places.size())};
    for (const auto& [at, bytes] : places) {
      op.bytes += bytes;
      segments.push_back({kPool + at, bytes, 0});
    }
    ops.push_back(op);
  }
  StagedPost post() const { return {.chunk = {.ops = ops, .segments = segments.data()}, .lands = true}; }
};

using Source = std::pair<uint32_t, uint64_t>;       // region, offset
using Landed = std::map<const std::byte*, Source>;  // by place in the pool

Landed wanted(const Reads& reads) {
  Landed landed;
  for (const ReadOp& op : reads.ops) {
    uint64_t from = op.offset;
    for (uint32_t i = 0; i < op.num_segments; ++i) {
      const Segment& to = reads.segments[op.first_segment + i];
      for (uint32_t byte = 0; byte < to.bytes; ++byte) landed[to.local + byte] = {op.region, from++};
    }
  }
  return landed;
}

/// The bytes of the slot after the part has arrived.
std::map<const std::byte*, Source> arrived(const StagedPart& part) {
  std::map<const std::byte*, Source> slot;
  for (const ReadOp& op : part.ops) {
    EXPECT_EQ(op.num_segments, 1u);
    const Segment& to = part.segments[op.first_segment];
    EXPECT_EQ(to.bytes, op.bytes);
    EXPECT_EQ(to.region, kSlotRegion);
    EXPECT_TRUE(kSlot <= to.local && to.local + to.bytes <= kSlot + kSlotBytes);
    for (uint32_t byte = 0; byte < op.bytes; ++byte) {
      EXPECT_TRUE(slot.emplace(to.local + byte, Source(op.region, op.offset + byte)).second);
    }
  }
  return slot;
}

/// Part after part, until all is asked for.
std::vector<StagedPart> parts_of(StagedPost post, const PartLimits& limits) {
  std::vector<StagedPart> parts;
  while (!post.asked) {
    StagedPart& part = parts.emplace_back();
    post.fill(part, {kSlot, kSlotBytes, kSlotRegion}, limits);
    EXPECT_FALSE(part.pieces.empty()) << "a part that brings nothing would be asked for again and again";
    EXPECT_LE(part.ops.size(), limits.ops);
    EXPECT_LE(part.pieces.size(), limits.pieces);
    if (part.pieces.empty()) break;
  }
  return parts;
}

Landed landed_by(const std::vector<StagedPart>& parts) {
  Landed landed;
  for (const StagedPart& part : parts) {
    const auto slot = arrived(part);
    for (const CopyPiece& piece : part.pieces) {
      for (uint64_t byte = 0; byte < piece.bytes; ++byte) {
        EXPECT_TRUE(landed.emplace(piece.device + byte, slot.at(piece.slot + byte)).second);
      }
    }
  }
  return landed;
}

TEST(StagedPost, BringsEveryByteOnceWhateverTheLimits) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    Reads reads;
    uint64_t from = 0, to = 0;
    for (uint64_t ops = 1 + random() % 30; ops > 0; --ops) {
      std::vector<std::pair<uint64_t, uint32_t>> places;
      uint32_t bytes = 0;
      for (uint64_t count = 1 + random() % 6; count > 0; --count) {
        const auto size = static_cast<uint32_t>(1 + random() % (random() % 9 == 0 ? 9000 : 300));
        places.emplace_back(to, size);
        to += size + random() % 3 * 10;
        bytes += size;
      }
      from = random() % 4 == 0 ? random() % 100'000 : from + random() % 3 * 100;
      reads.add(static_cast<uint32_t>(random() % 5 == 0), from, places);
      from += bytes;
    }
    const PartLimits limits{static_cast<uint32_t>(1 + random() % 20),
                            static_cast<uint32_t>(1 + random() % 20),
                            static_cast<uint32_t>(random() % 3 * 150)};
    ASSERT_EQ(landed_by(parts_of(reads.post(), limits)), wanted(reads)) << "round " << round;
  }
}

/// Heads 2 and 3 of 8, of 16 tokens: with what lies between them it is one range of the owner.
TEST(StagedPost, ReadsShortGapsAlong) {
  Reads reads;
  for (uint64_t token = 0; token < 16; ++token) reads.add(0, token * 256 + 64, {{token * 64, 64}});
  const auto along = parts_of(reads.post(), {100, 100, 192});
  ASSERT_EQ(along.size(), 1u);
  EXPECT_EQ(along[0].ops.size(), 1u);
  EXPECT_EQ(along[0].ops[0].bytes, 15u * 256 + 64);
  EXPECT_EQ(along[0].pieces.size(), 16u);
  const auto around = parts_of(reads.post(), {100, 100, 191});
  EXPECT_EQ(around[0].ops.size(), 16u);
  EXPECT_EQ(around[0].pieces.size(), 1u) << "what adjoins in the slot and in the pool is one copy";
}

TEST(StagedPost, DoesNotReadAlongBackwardsNorAcrossRegions) {
  Reads reads;
  reads.add(0, 1000, {{0, 100}});
  reads.add(0, 900, {{200, 100}});
  reads.add(1, 1000, {{400, 100}});
  const auto parts = parts_of(reads.post(), {100, 100, 4096});
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].ops.size(), 3u);
}

TEST(StagedPost, ReadsRangesThatAdjoinAsOne) {
  Reads reads;
  reads.add(0, 1000, {{0, 100}});
  reads.add(0, 1100, {{200, 100}});
  const auto parts = parts_of(reads.post(), {100, 100, 0});
  ASSERT_EQ(parts.size(), 1u);
  ASSERT_EQ(parts[0].ops.size(), 1u);
  EXPECT_EQ(parts[0].ops[0].bytes, 200u);
}

TEST(StagedPost, PassesOnEachReadWithItsOwnSegments) {
  Reads reads;
  reads.add(1, 0, {{0, 8}, {100, 8}});
  reads.add(1, 64, {{200, 16}});
  StagedPost post{.chunk = {.ops = reads.ops, .segments = reads.segments.data()}};
  StagedPart part;
  post.pass_on(part, 0);
  ASSERT_EQ(part.segments.size(), 3u);
  ASSERT_EQ(part.ops.size(), 2u);
  EXPECT_EQ(part.segments[part.ops[1].first_segment].local, kPool + 200);
  EXPECT_EQ(part.segments[part.ops[1].first_segment].bytes, 16u);
}

TEST(StagedPost, PassesOnAsTheInnerEndpointNumbersThem) {
  std::vector<Segment> segments = {{kPool, 8, 3}};
  std::vector<ReadOp> ops = {{64, 8, 1, 0, 1}};
  StagedPost post{.chunk = {.ops = ops, .segments = segments.data()}};
  StagedPart part;
  post.pass_on(part, 3);
  EXPECT_TRUE(post.asked);
  EXPECT_EQ(part.segments[0].region, 1u) << "0 are the slots";
}

constexpr double kGib = 1 << 30;
// Direct, an operation takes as long as 4 KiB do.
constexpr StagingCosts kCosts = {.direct = {10, 4096 / (50 * kGib) * 1e9, 1, 50}, .staged = {30, 80, 1, 50}};

/// `count` ranges of `bytes`, each `gap` behind the last.
std::vector<ReadOp> ranges(uint32_t count, uint32_t bytes, uint32_t gap) {
  std::vector<ReadOp> ops;
  for (uint32_t i = 0; i < count; ++i) ops.push_back({uint64_t{i} * (bytes + gap), bytes, 0, i, 1});
  return ops;
}

StagingPolicy::Choice choose(const StagingPolicy& policy, const std::vector<ReadOp>& ops) {
  return policy.choose(ops, ops.size(), ops.size() * uint64_t{ops.front().bytes});
}

TEST(StagingPolicy, StagesWhatWouldShatter) {
  const StagingPolicy policy(kCosts, 4096);
  EXPECT_FALSE(choose(policy, ranges(4096, 16 << 10, 16 << 10)).staged) << "the wire is the limit";
  const auto tiny = choose(policy, ranges(65536, 256, 1792));
  EXPECT_TRUE(tiny.staged);
  EXPECT_LT(tiny.predicted.staged_us, tiny.predicted.direct_us);
  EXPECT_FALSE(choose(policy, ranges(16, 256, 1792)).staged) << "too few to make up for the start";
  EXPECT_FALSE(choose(policy, ranges(65536, 256, 8192)).staged) << "gaps too wide to be read along";
}

TEST(StagingPolicy, CountsWhatIsReadAlong) {
  EXPECT_EQ(staged_shape(ranges(10, 100, 50), 10, 50), (ReadShape{1, 10, 10 * 150 - 50}));
  EXPECT_EQ(staged_shape(ranges(10, 100, 51), 10, 50), (ReadShape{10, 10, 1000}));
  std::vector<ReadOp> apart = ranges(2, 100, 0);
  apart[1].region = 1;
  EXPECT_EQ(staged_shape(apart, 2, 50).ops, 2u);
  EXPECT_EQ(staged_shape({}, 0, 50), ReadShape{});
}

TEST(StagingPolicy, PredictsTheLargestTerm) {
  const StagingCosts costs = {.direct = {10, 500, 20, 2}, .staged = {30, 80, 4000, 4}, .always = true};
  const auto by_ops = StagingPolicy(costs, 0).choose(ranges(64, 256, 64), 64, 64 * 256);
  EXPECT_DOUBLE_EQ(by_ops.predicted.direct_us, 10 + 64 * 500 / 1e3);
  EXPECT_DOUBLE_EQ(by_ops.predicted.staged_us, 30 + 64 * 4000 / 1e3);
  const auto by_bytes = StagingPolicy(costs, 0).choose(ranges(1, 1 << 28, 0), 1, 1 << 28);
  EXPECT_DOUBLE_EQ(by_bytes.predicted.direct_us, 10 + 0.25 / 2 * 1e6);
  EXPECT_DOUBLE_EQ(by_bytes.predicted.staged_us, 30 + 0.25 / 4 * 1e6);
}

TEST(StagingPolicy, ScalesByTheMedianOfTheLastPulls) {
  StagingCosts costs = kCosts;
  costs.always = true;
  StagingPolicy policy(costs, 0);
  const auto ops = ranges(100, 256, 0);
  const auto first = choose(policy, ops);
  const auto scaled = [&] { return choose(policy, ops).predicted.staged_us / first.unscaled_us; };
  for (const double ratio : {1.0, 1.0, 9.0, 1.0}) policy.learn(first, ratio * first.unscaled_us);
  EXPECT_DOUBLE_EQ(scaled(), 1) << "one slow pull of four says nothing";
  for (int pull = 0; pull < 32; ++pull) policy.learn(first, 3 * first.unscaled_us);
  EXPECT_DOUBLE_EQ(scaled(), 3);
  for (int pull = 0; pull < 16; ++pull) policy.learn(first, 2 * first.unscaled_us);
  EXPECT_DOUBLE_EQ(scaled(), 3) << "half of the last 32";
  policy.learn(first, 2 * first.unscaled_us);
  EXPECT_DOUBLE_EQ(scaled(), 2);
}

TEST(StagingPolicy, TakesTheWayThatIsAskedFor) {
  StagingCosts costs = kCosts;
  costs.always = true;
  EXPECT_TRUE(choose(StagingPolicy(costs, 0), ranges(1, 1 << 20, 0)).staged);
}

TEST(StagingPolicy, LearnsWhatTheWaysTake) {
  StagingPolicy policy(kCosts, 4096);
  const auto tiny = ranges(65536, 256, 1792);
  const auto first = choose(policy, tiny);
  ASSERT_TRUE(first.staged);
  policy.learn(first, 100 * first.predicted.staged_us);  // found everything cold
  EXPECT_TRUE(choose(policy, tiny).staged) << "one pull says little";
  for (int pull = 0; pull < 40; ++pull) policy.learn(first, 3 * first.predicted.direct_us);
  const auto then = choose(policy, tiny);
  EXPECT_FALSE(then.staged) << "it takes three times as long as the other way should";
  EXPECT_NEAR(then.predicted.staged_us, 3 * first.predicted.direct_us, 1);
  EXPECT_EQ(then.predicted.direct_us, first.predicted.direct_us);
}

TEST(StagingPolicy, TriesAgainWhatItHasNotTakenForLong) {
  StagingPolicy policy(kCosts, 4096);
  const auto tiny = ranges(65536, 256, 1792);
  const auto first = choose(policy, tiny);
  for (int pull = 0; pull < 8; ++pull) policy.learn(first, 3 * first.predicted.direct_us);
  const auto direct = choose(policy, tiny);
  ASSERT_FALSE(direct.staged);
  int pulls = 0;
  for (; pulls < 1000 && !choose(policy, tiny).staged; ++pulls) {
    policy.learn(direct, direct.predicted.direct_us);
  }
  EXPECT_EQ(pulls, 256);
}

}  // namespace
}  // namespace kvlink

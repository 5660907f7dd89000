// SPDX-License-Identifier: Apache-2.0
#include "engine/cost_model.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/path_stats.h"
#include "engine/prior_cost.h"
#include "engine/transfer.h"

namespace kvlink {
namespace {

constexpr Cost kPrior{10, 100, 1};

/// Pulls of 64 KiB ranges.
double real_us(uint64_t ops) { return 40 + static_cast<double>(ops) * 30; }

TEST(CostModel, TheFirstPullIsPredictedByThePrior) {
  EXPECT_DOUBLE_EQ(CostModel(kPrior).predict_us(20, 1 << 30), 10 + 2 + 1e6);
  EXPECT_DOUBLE_EQ(CostModel({0, 0, 1}).predict_us(0, 0), 0);
}

TEST(CostModel, AfterOnePullItsShapeIsPredictedAsItWas) {
  CostModel model(kPrior);
  model.learn(4, 1 << 20, 77);
  EXPECT_DOUBLE_EQ(model.predict_us(4, 1 << 20), 77);
  EXPECT_NEAR(model.predict_us(5, 3 << 19), 77 * 1.5, 3);  // of the same shape, half as large again
}

TEST(CostModel, OneSlowPullDoesNotCount) {
  CostModel model(kPrior);
  for (const double took : {50.0, 51.0, 9000.0, 52.0, 9000.0}) model.learn(4, 1 << 20, took);
  EXPECT_DOUBLE_EQ(model.predict_us(4, 1 << 20), 52);
}

TEST(CostModel, ThePastIsForgotten) {
  CostModel model(kPrior);
  for (int pull = 0; pull < 100; ++pull) model.learn(4, 1 << 20, 9000);
  for (int pull = 0; pull < 5; ++pull) model.learn(4, 1 << 20, 50);
  EXPECT_DOUBLE_EQ(model.predict_us(4, 1 << 20), 50);
}

TEST(CostModel, ShapesOfOneSizeDifferByTheirOperations) {
  CostModel model(kPrior);
  model.learn(256, 1 << 20, 400);
  model.learn(1, 1 << 20, 100);
  EXPECT_DOUBLE_EQ(model.predict_us(256, 1 << 20), 400);
  EXPECT_DOUBLE_EQ(model.predict_us(1, 1 << 20), 100);
}

TEST(CostModel, UnknownShapesAreOnTheLineThroughTheKnownOnes) {
  CostModel model(kPrior);
  for (const uint64_t ops : {1, 8, 64}) model.learn(ops, ops << 16, real_us(ops));
  for (const uint64_t ops : {2, 20, 200, 2000}) {
    const double ratio = model.predict_us(ops, ops << 16) / real_us(ops);
    EXPECT_NEAR(ratio, 1, 0.05) << ops;
  }
}

TEST(CostModel, ALineThatNoPathHasIsNotUsed) {
  CostModel model(kPrior);
  model.learn(1, 1 << 16, 500);
  model.learn(64, 1 << 22, 80);
  for (const uint64_t ops : {1, 2, 9, 200, 1 << 20}) {
    const double predicted = model.predict_us(ops, ops << 16);
    EXPECT_TRUE(std::isfinite(predicted) && predicted > 0) << ops << ": " << predicted;
  }
}

TEST(CostModel, ManyShapesKeepTheLatest) {
  CostModel model(kPrior);
  model.learn(1, 1, 5);
  for (uint32_t shift = 0; shift < 60; ++shift) model.learn(1, 1ull << shift, 7);
  for (uint32_t shift = 28; shift < 60; ++shift) EXPECT_NEAR(model.predict_us(1, 1ull << shift), 7, 1e-9);
  EXPECT_NE(model.predict_us(1, 1), 7);
}

TEST(CostModel, FaultsAreInjectedIntoTheSamePath) {
  EXPECT_EQ(prior_cost("fault+tcp").start_us, prior_cost("tcp").start_us);
  EXPECT_GT(prior_cost("verbs").gib_per_s, prior_cost("tcp").gib_per_s);
}

TEST(PathStats, LearnsFromPullsThatWaitedForNothing) {
  PathStats paths(kPrior);
  TransferStats stats{.bytes = 1 << 20, .num_ops = 4, .total_ns = 70'000};
  paths.add(stats, Status(), false);  // queued behind others
  EXPECT_DOUBLE_EQ(paths.predict_us(4, 1 << 20), kPrior.predict_us(4, 1 << 20));
  stats.alone = true;
  paths.add(stats, Status::Timeout("late"), false);
  EXPECT_DOUBLE_EQ(paths.predict_us(4, 1 << 20), kPrior.predict_us(4, 1 << 20));
  paths.add(stats, Status(), false);
  EXPECT_DOUBLE_EQ(paths.predict_us(4, 1 << 20), 70);
}

}  // namespace
}  // namespace kvlink

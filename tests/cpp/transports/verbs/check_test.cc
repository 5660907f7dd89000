// SPDX-License-Identifier: Apache-2.0
// What no NIC may be asked for is refused before it is.
#include "cpp/transports/verbs/model_nic.h"

namespace kvlink::verbs {
namespace {

class VerbsCheck : public ::testing::Test {
 protected:
  VerbsCheck() {
    fabric_.add_local(0x10000, 1000, 0);
    fabric_.add_remote(0x20000, 1000, 0, 400);
    fabric_.add_remote(0x30000, 10, 0, 400);
  }

  Status check(const ReadOp& op, const std::vector<Segment>& segments) const {
    return verbs::check(op, segments.data(), fabric_.locals, fabric_.remotes);
  }

  static Segment piece(uint32_t bytes, uint32_t region = 0) { return {at_address(0x10000), bytes, region}; }

  Fabric fabric_;
};

TEST_F(VerbsCheck, TakesWhatFits) {
  EXPECT_TRUE(check({0, 1000, 0, 0, 2}, {piece(1), piece(999)}).ok());
  EXPECT_TRUE(check({999, 1, 0, 0, 1}, {piece(1)}).ok());
  EXPECT_TRUE(check({0, 10, 1, 2, 1}, {piece(0, 9), piece(0, 9), piece(10)}).ok())
      << "others' segments do not count";
}

TEST_F(VerbsCheck, RefusesWhatLeavesTheOwnersRegion) {
  const auto refused = [this](uint64_t offset, uint32_t bytes, uint32_t region) {
    return check({offset, bytes, region, 0, 1}, {piece(bytes)}).code() == Code::kAccessDenied;
  };
  EXPECT_TRUE(refused(0, 1, 2)) << "a region that was not imported";
  EXPECT_TRUE(refused(0, 1, UINT32_MAX));
  EXPECT_TRUE(refused(0, 1001, 0));
  EXPECT_TRUE(refused(1, 1000, 0));
  EXPECT_TRUE(refused(1000, 1, 0));
  EXPECT_TRUE(refused(5, 6, 1));
  EXPECT_TRUE(refused(UINT64_MAX, 1, 0));
  EXPECT_TRUE(refused(UINT64_MAX - 9, 10, 1));
  EXPECT_TRUE(refused(0, UINT32_MAX, 0));
}

TEST_F(VerbsCheck, RefusesSegmentsOutsideOurRegion) {
  const auto refused = [this](uint64_t address, uint32_t bytes) {
    return check({0, bytes, 0, 0, 1}, {{at_address(address), bytes, 0}}).code() == Code::kConfig;
  };
  EXPECT_FALSE(refused(0x10000 + 990, 10));
  EXPECT_TRUE(refused(0x10000 + 991, 10));
  EXPECT_TRUE(refused(0x10000 - 1, 10));
  EXPECT_TRUE(refused(0x10000 + 1000, 1));
  EXPECT_TRUE(refused(0, 10));
}

TEST_F(VerbsCheck, RefusesSegmentsThatDoNotFitTheirRead) {
  const auto refused = [this](uint32_t bytes, const std::vector<Segment>& segments) {
    return check({0, bytes, 0, 0, static_cast<uint32_t>(segments.size())}, segments).code() == Code::kConfig;
  };
  EXPECT_TRUE(refused(8, {piece(8, 1)})) << "no such region of ours";
  EXPECT_TRUE(refused(8, {piece(8), piece(0)})) << "an empty segment";
  EXPECT_TRUE(refused(8, {piece(0), piece(8)}));
  EXPECT_TRUE(refused(8, {piece(7)})) << "too few bytes";
  EXPECT_TRUE(refused(8, {piece(8), piece(1)})) << "too many";
  EXPECT_TRUE(refused(8, {}));
  EXPECT_TRUE(refused(0, {})) << "a read of nothing";
  EXPECT_TRUE(refused(1, {piece(UINT32_MAX), piece(2)})) << "a sum that wraps in 32 bits";
}

}  // namespace
}  // namespace kvlink::verbs

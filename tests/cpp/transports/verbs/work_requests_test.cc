// SPDX-License-Identifier: Apache-2.0
// Work requests as a NIC sees them: a model of one carries out what Chain makes; seeds are fixed.
#include "transports/verbs/work_requests.h"

#include <cstring>
#include <random>

#include "cpp/transports/verbs/model_nic.h"

namespace kvlink::verbs {
namespace {

using Random = std::mt19937_64;

constexpr std::byte kPoison{0xee};

uint64_t between(uint64_t least, uint64_t most, Random& random) {
  return least + random() % (most - least + 1);
}

/// Bytes that travel from one place to another.
struct Move {
  uint64_t from, to, bytes;
  bool operator==(const Move&) const = default;
};

/// Neighbours become one.
void append(std::vector<Move>& moves, const Move& move) {
  if (!moves.empty() && moves.back().from + moves.back().bytes == move.from &&
      moves.back().to + moves.back().bytes == move.to) {
    moves.back().bytes += move.bytes;
  } else {
    moves.push_back(move);
  }
}

struct Operations {
  std::vector<ReadOp> ops;
  std::vector<Segment> segments;

  Chunk chunk() const { return {ops, segments.data()}; }

  void add(uint32_t region, uint64_t offset, const std::vector<Segment>& pieces) {
    ReadOp op{offset, 0, region, static_cast<uint32_t>(segments.size()),
              static_cast<uint32_t>(pieces.size())};
    for (const Segment& piece : pieces) op.bytes += piece.bytes;
    ops.push_back(op);
    segments.insert(segments.end(), pieces.begin(), pieces.end());
  }

  /// The expected bytes on the wire, from the operations alone.
  std::vector<Move> moves(const Fabric& fabric) const {
    std::vector<Move> moves;
    for (const ReadOp& op : ops) {
      uint64_t from = fabric.remote_hosts[op.region] + op.offset;
      for (uint32_t i = op.first_segment; i < op.first_segment + op.num_segments; ++i) {
        append(moves, {from, address_of(segments[i].local), segments[i].bytes});
        from += segments[i].bytes;
      }
    }
    return moves;
  }
};

/// Carries out one work request. It takes as much as the limits let it: up to the end of its operation or of
/// a slice.
uint64_t run(const ibv_send_wr& wr, const Fabric& fabric, const ChainLimits& limits,
             std::vector<Move>& moves) {
  EXPECT_EQ(wr.opcode, IBV_WR_RDMA_READ);
  EXPECT_GE(wr.num_sge, 1);
  EXPECT_LE(wr.num_sge, static_cast<int>(limits.sges_per_wr));
  uint64_t bytes = 0;
  for (int i = 0; i < wr.num_sge; ++i) {
    const ibv_sge& sge = wr.sg_list[i];
    EXPECT_GT(sge.length, 0u);
    const uint64_t from = fabric.owner.resolve(wr.wr.rdma.rkey, wr.wr.rdma.remote_addr + bytes, sge.length);
    append(moves, {from, fabric.reader.resolve(sge.lkey, sge.addr, sge.length), sge.length});
    bytes += sge.length;
  }
  EXPECT_LE(bytes, limits.bytes_per_wr);
  return bytes;
}

/// Whether a request that stops short of its operation's end had to.
bool is_full(const ibv_send_wr& wr, uint64_t bytes, const ReadOp& op, const Fabric& fabric,
             const ChainLimits& limits) {
  const RemoteRegion& remote = fabric.remotes[op.region];
  const uint64_t end = wr.wr.rdma.remote_addr - remote.iova + bytes;
  return bytes == limits.bytes_per_wr || wr.num_sge == static_cast<int>(limits.sges_per_wr) ||
         end % remote.slice_bytes == 0;
}

/// Fills and carries out chain after chain, with changing room.
std::vector<Move> run_all(Chain& chain, const Operations& plan, const Fabric& fabric,
                          const ChainLimits& limits, Random& random) {
  std::vector<Move> moves;
  ChunkCursor cursor;
  uint32_t op = 0;
  uint64_t in_op = 0, wr_id = 1;
  while (cursor.op < plan.ops.size() && !::testing::Test::HasFailure()) {
    const auto room = static_cast<uint32_t>(between(1, 2 * limits.wrs, random));
    const uint32_t count = chain.fill(plan.chunk(), cursor, room, fabric.locals, fabric.remotes);
    EXPECT_GE(count, 1u);
    EXPECT_LE(count, std::min(room, limits.wrs));
    EXPECT_TRUE(count == std::min(room, limits.wrs) || cursor.op == plan.ops.size()) << "room was left";
    chain.finish(count, ++wr_id);
    const ibv_send_wr* wr = chain.first();
    for (uint32_t left = count; left > 0 && wr != nullptr; --left, wr = wr->next) {
      EXPECT_EQ(wr->send_flags == IBV_SEND_SIGNALED, left == 1);
      EXPECT_EQ(wr->send_flags == 0, left > 1);
      EXPECT_TRUE(left > 1 || wr->wr_id == wr_id);
      const uint64_t bytes = run(*wr, fabric, limits, moves);
      in_op += bytes;
      EXPECT_LE(in_op, plan.ops[op].bytes) << "a request belongs to two operations";
      EXPECT_TRUE(in_op == plan.ops[op].bytes || is_full(*wr, bytes, plan.ops[op], fabric, limits));
      if (in_op == plan.ops[op].bytes) ++op, in_op = 0;
    }
    EXPECT_EQ(wr, nullptr) << "the chain goes on behind its last request";
    EXPECT_TRUE(cursor.op == op && cursor.in_op == in_op);
  }
  return moves;
}

ChainLimits random_limits(Random& random, uint64_t most_bytes) {
  return {.wrs = static_cast<uint32_t>(between(1, 20, random)),
          .sges_per_wr = static_cast<uint32_t>(between(1, 6, random)),
          .bytes_per_wr = between(1, most_bytes, random)};
}

/// Bytes of real memory. Regions begin up to two slices before it, so that slice borders lie within.
class RealFabric : public Fabric {
 public:
  explicit RealFabric(Random& random) {
    for (uint64_t count = between(1, 3, random); count > 0; --count) {
      std::vector<std::byte>& pool = pools_.emplace_back(between(1, 6000, random));
      for (std::byte& byte : pool) byte = static_cast<std::byte>(random());
      add_remote(address_of(pool.data()), pool.size(), random() >> 8, between(1, 8000, random));
    }
    for (uint64_t count = between(1, 3, random); count > 0; --count) {
      std::vector<std::byte>& memory = memories_.emplace_back(20'000, kPoison);
      const uint64_t slices = between(0, 2, random);
      const uint64_t before = slices == 0 ? 0 : slices * kSliceBytes - between(0, 20'000, random);
      add_local(address_of(memory.data()) - before, before + memory.size(), random() >> 8);
      free_.push_back(0);
    }
  }

  /// Pieces of destinations that overlap no others; none when a destination is used up.
  std::vector<Segment> pieces(uint64_t most_bytes, Random& random) {
    std::vector<Segment> pieces;
    uint64_t bytes = 0;
    for (uint64_t count = between(1, 10, random); count > 0 && bytes < most_bytes; --count) {
      const auto region = static_cast<uint32_t>(random() % memories_.size());
      const uint64_t size = between(1, std::min<uint64_t>(most_bytes - bytes, 700), random);
      if (free_[region] + size > memories_[region].size()) break;
      pieces.push_back({&memories_[region][free_[region]], static_cast<uint32_t>(size), region});
      free_[region] += size + random() % 2;
      bytes += size;
    }
    return pieces;
  }

  Operations operations(Random& random) {
    Operations plan;
    for (uint64_t count = between(1, 30, random); count > 0; --count) {
      const auto region = static_cast<uint32_t>(random() % pools_.size());
      const std::vector<Segment> pieces = this->pieces(pools_[region].size(), random);
      if (pieces.empty()) continue;
      uint64_t bytes = 0;
      for (const Segment& piece : pieces) bytes += piece.bytes;
      plan.add(region, between(0, pools_[region].size() - bytes, random), pieces);
    }
    return plan;
  }

  std::vector<std::vector<std::byte>>& memories() { return memories_; }

 private:
  std::vector<std::vector<std::byte>> pools_, memories_;
  std::vector<uint64_t> free_;
};

TEST(VerbsChain, MovesExactlyTheBytesOfTheChunk) {
  Random random(41);
  uint64_t moved_bytes = 0;
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(round);
    RealFabric fabric(random);
    const Operations plan = fabric.operations(random);
    for (const ReadOp& op : plan.ops) {
      ASSERT_TRUE(check(op, plan.segments.data(), fabric.locals, fabric.remotes).ok());
    }
    std::vector<std::vector<std::byte>> wanted = fabric.memories();
    for (const Move& move : plan.moves(fabric)) {
      for (uint64_t i = 0; i < move.bytes; ++i) {
        for (size_t region = 0; region < wanted.size(); ++region) {
          const uint64_t at = move.to + i - address_of(fabric.memories()[region].data());
          if (at < wanted[region].size()) wanted[region][at] = *at_address(move.from + i);
        }
      }
      moved_bytes += move.bytes;
    }
    const ChainLimits limits = random_limits(random, random() % 2 == 0 ? 50 : 5000);
    Chain chain(limits);
    const std::vector<Move> moves = run_all(chain, plan, fabric, limits, random);
    ASSERT_FALSE(HasFailure());
    for (const Move& move : moves) std::memcpy(at_address(move.to), at_address(move.from), move.bytes);
    ASSERT_TRUE(fabric.memories() == wanted);
  }
  EXPECT_GT(moved_bytes, 1'000'000u);
}

/// Hundreds of GiB that are not there: only the arithmetic is checked.
TEST(VerbsChain, CrossesSliceBordersOfLargeRegions) {
  Random random(42);
  constexpr uint64_t kGiB = uint64_t{1} << 30;
  int crossed = 0;
  for (int round = 0; round < 2000; ++round) {
    SCOPED_TRACE(round);
    Fabric fabric;
    const uint64_t local_bytes = between(1, 40, random) * kGiB + random() % kGiB + 12 * kGiB;
    const uint64_t remote_bytes = between(1, 40, random) * kGiB + random() % kGiB + 12 * kGiB;
    fabric.add_local(random() >> 18, local_bytes, random() >> 8);
    fabric.add_remote(random() >> 18, remote_bytes, random() >> 8, between(kGiB / 2, 5 * kGiB, random));
    const uint64_t slice_bytes = fabric.remotes[0].slice_bytes;
    Operations plan;
    for (uint64_t count = between(1, 5, random); count > 0; --count) {
      std::vector<Segment> pieces;
      uint64_t bytes = 0;
      for (uint64_t segments = between(1, 3, random); segments > 0; --segments) {
        const uint64_t size = between(1, random() % 2 == 0 ? UINT32_MAX / 3 : 100, random);
        const uint64_t border = between(1, local_bytes / kSliceBytes - 1, random) * kSliceBytes;
        const uint64_t start = border - random() % std::min<uint64_t>(size + 1, border);
        pieces.push_back({at_address(address_of(fabric.locals[0].base) + std::min(start, local_bytes - size)),
                          static_cast<uint32_t>(size), 0});
        bytes += size;
      }
      const uint64_t border = between(1, remote_bytes / slice_bytes, random) * slice_bytes;
      const uint64_t offset =
          std::min(border - std::min(border, random() % (bytes + 1)), remote_bytes - bytes);
      crossed += offset / slice_bytes != (offset + bytes - 1) / slice_bytes;
      plan.add(0, offset, pieces);
    }
    const ChainLimits limits{.wrs = static_cast<uint32_t>(between(1, 64, random)),
                             .sges_per_wr = static_cast<uint32_t>(between(1, 32, random)),
                             .bytes_per_wr = between(64 << 20, kGiB, random)};
    Chain chain(limits);
    ASSERT_EQ(run_all(chain, plan, fabric, limits, random), plan.moves(fabric));
  }
  EXPECT_GT(crossed, 500);
}

TEST(VerbsChain, OneRunIsOneRequestWhenTheLimitsAllow) {
  Random random(43);
  Fabric fabric;
  fabric.add_local(1 << 20, 1 << 20, 0);
  fabric.add_remote(1 << 30, 1 << 20, 0, kSliceBytes);
  Operations plan;
  std::vector<Segment> pieces;
  for (uint32_t i = 0; i < 30; ++i) pieces.push_back({at_address((1 << 20) + i * 10'000), 4096, 0});
  plan.add(0, 100, pieces);
  const ChainLimits limits{.wrs = 64, .sges_per_wr = 30, .bytes_per_wr = 1 << 20};
  Chain chain(limits);
  ChunkCursor cursor;
  EXPECT_EQ(chain.fill(plan.chunk(), cursor, 64, fabric.locals, fabric.remotes), 1u);
  EXPECT_EQ(chain.first()->num_sge, 30);
  EXPECT_EQ(cursor.op, 1u);
}

TEST(VerbsChain, WithoutRoomNothingIsTaken) {
  Random random(44);
  RealFabric fabric(random);
  const Operations plan = fabric.operations(random);
  Chain chain(random_limits(random, 100));
  ChunkCursor cursor;
  EXPECT_EQ(chain.fill(plan.chunk(), cursor, 0, fabric.locals, fabric.remotes), 0u);
  EXPECT_TRUE(cursor.op == 0 && cursor.segment == 0 && cursor.in_op == 0 && cursor.in_segment == 0);
  cursor.op = static_cast<uint32_t>(plan.ops.size());
  EXPECT_EQ(chain.fill(plan.chunk(), cursor, 9, fabric.locals, fabric.remotes), 0u);
}

}  // namespace
}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
#include "bench/posting_cost.h"

#include <algorithm>
#include <array>

#include "bench/cpu_time.h"
#include "transports/verbs/registration.h"
#include "transports/verbs/work_requests.h"

namespace kvlink {
namespace {

using verbs::Chain;
using verbs::LocalRegion;
using verbs::RemoteRegion;

constexpr verbs::ChainLimits kLimits{
    .wrs = 64, .sges_per_wr = 30, .bytes_per_wr = 128 << 10, .bytes_per_signal = 128 << 10};  // of a ConnectX
constexpr uint32_t kChunkOps = 256;  // of one post_read
constexpr size_t kRingEntries = 16 << 10;

/// A queue pair as ibv_post_send sees it, writing to memory.
class RingQp {
 public:
  RingQp() {
    context_.ops.post_send = &RingQp::post;
    qp_.context = &context_;
    qp_.qp_context = this;
  }
  ibv_qp* get() { return &qp_; }

 private:
  struct alignas(16) Entry {
    std::array<uint64_t, 2> words;
  };

  static int post(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr**) {
    RingQp& self = *static_cast<RingQp*>(qp->qp_context);
    for (; wr; wr = wr->next) {
      self.write(wr->wr_id, uint64_t{static_cast<uint32_t>(wr->opcode)} << 32 | wr->send_flags);
      self.write(__builtin_bswap64(wr->wr.rdma.remote_addr), __builtin_bswap32(wr->wr.rdma.rkey));
      for (int i = 0; i < wr->num_sge; ++i) {
        const ibv_sge& sge = wr->sg_list[i];
        self.write(uint64_t{__builtin_bswap32(sge.length)} << 32 | __builtin_bswap32(sge.lkey),
                   __builtin_bswap64(sge.addr));
      }
    }
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return 0;
  }
  void write(uint64_t first, uint64_t second) { ring_[next_++ % kRingEntries].words = {first, second}; }

  ibv_context context_{};
  ibv_qp qp_{};
  size_t next_ = 0;
  std::vector<Entry> ring_ = std::vector<Entry>(kRingEntries);
};

/// Regions that contain everything that the plan names.
struct Regions {
  std::vector<LocalRegion> locals;
  std::vector<RemoteRegion> remotes;

  explicit Regions(const Plan& plan) {
    for (const ReadOp& op : plan.ops) {
      if (op.region >= remotes.size())
        remotes.resize(op.region + 1, {Access::kRead, 0, 0, verbs::kSliceBytes, {}});
      RemoteRegion& remote = remotes[op.region];
      remote.bytes = std::max(remote.bytes, op.offset + op.bytes);
    }
    std::vector<uint64_t> ends;
    for (const Segment& segment : plan.segments) {
      if (segment.region >= locals.size()) {
        locals.resize(segment.region + 1);
        ends.resize(segment.region + 1);
      }
      LocalRegion& local = locals[segment.region];
      if (!local.base || segment.local < local.base) local.base = segment.local;
      ends[segment.region] = std::max<uint64_t>(ends[segment.region],
                                                reinterpret_cast<uintptr_t>(segment.local) + segment.bytes);
    }
    for (RemoteRegion& remote : remotes) remote.rkeys.assign(remote.bytes / verbs::kSliceBytes + 1, 7);
    for (size_t i = 0; i < locals.size(); ++i) {
      const uint64_t bytes = ends[i] - reinterpret_cast<uintptr_t>(locals[i].base);
      locals[i].bytes = bytes;
      locals[i].lkeys.assign(bytes / verbs::kSliceBytes + 1, 7);
    }
  }
};

Status post_all(const Plan& plan, const Regions& regions, Chain& chain, RingQp& qp) {
  uint64_t posted = 0;
  for (size_t first = 0; first < plan.ops.size(); first += kChunkOps) {
    const Chunk chunk{
        std::span(plan.ops).subspan(first, std::min<size_t>(kChunkOps, plan.ops.size() - first)),
        plan.segments.data()};
    for (const ReadOp& op : chunk.ops) {
      if (Status status = check(op, chunk.segments, regions.locals, regions.remotes); !status.ok())
        return status;
    }
    for (ChunkCursor at; at.op < chunk.ops.size();) {
      const uint32_t num_wrs = chain.fill(chunk, at, kLimits.wrs, regions.locals, regions.remotes);
      chain.finish(num_wrs, posted += num_wrs);
      ibv_send_wr* bad;
      ::ibv_post_send(qp.get(), chain.first(), &bad);
    }
  }
  return {};
}

}  // namespace

Result<int64_t> time_posting(const Plan& plan, uint32_t rounds) {
  const Regions regions(plan);
  Chain chain(kLimits);
  RingQp qp;
  int64_t best = INT64_MAX;
  for (uint32_t round = 0; round < rounds; ++round) {
    const int64_t start = thread_cpu_ns();
    if (Status status = post_all(plan, regions, chain, qp); !status.ok()) return status;
    best = std::min(best, thread_cpu_ns() - start);
  }
  return best;
}

}  // namespace kvlink

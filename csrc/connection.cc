// SPDX-License-Identifier: Apache-2.0
#include "connection.h"

#include <thread>

#include "clock.h"
#include "lease_table.h"

namespace kvlink {
namespace {

// What pull() may spend on the calling thread before it hands a slow transfer to the progress thread: several
// loopback round trips, far below the shortest step of an inference engine.
constexpr int64_t kInlineBudgetNs = 300'000;

}  // namespace

Connection::Connection(std::vector<std::unique_ptr<Endpoint>> endpoints, uint64_t inline_bytes,
                       std::shared_ptr<ScratchPool> scratch,
                       std::vector<std::shared_ptr<ProgressThread>> threads)
    : inline_bytes_(inline_bytes), scratch_(std::move(scratch)), threads_(std::move(threads)) {
  wake_ = std::make_shared<std::function<void()>>([threads = threads_] {
    for (const auto& thread : threads) thread->wake();
  });
  for (auto& endpoint : endpoints) {
    lanes_.push_back(std::make_shared<Lane>(std::move(endpoint), static_cast<uint32_t>(lanes_.size())));
  }
}

std::vector<std::string> Connection::hellos() const {
  std::vector<std::string> hellos;
  for (const auto& lane : lanes_) hellos.push_back(lane->endpoint().hello());
  return hellos;
}

Result<std::vector<uint32_t>> Connection::establish(uint64_t connection_id,
                                                    const std::vector<std::string>& replies,
                                                    const std::vector<std::string>& pool_keys,
                                                    const std::string& lease_key, uint64_t epoch,
                                                    int64_t timeout_ns) {
  const int64_t deadline = now_ns() + timeout_ns;
  std::lock_guard lock(connecting_);
  if (closed_) return Status::Unreachable("the connection was closed before it was established");
  if (replies.size() != lanes_.size()) {
    return Status::Unreachable("protocol error: the owner answered " + std::to_string(replies.size()) +
                               " of " + std::to_string(lanes_.size()) + " lanes");
  }
  std::vector<uint32_t> regions;
  for (size_t index = 0; index < lanes_.size(); ++index) {
    Endpoint& endpoint = lanes_[index]->endpoint();
    if (Status status = endpoint.establish(replies[index], deadline - now_ns()); !status.ok()) return status;
    std::vector<uint32_t> imported;
    for (const std::string& key : pool_keys) {
      Result<uint32_t> region = endpoint.import_region(key);
      if (!region.ok()) return region.status();
      imported.push_back(*region);
    }
    Result<uint32_t> lease_region = endpoint.import_region(lease_key);
    if (!lease_region.ok()) return lease_region.status();
    if (index == 0) regions = imported;
    if (imported != regions)
      return Status::Config("lanes of one connection number the owner's regions differently");
    if (Status status = check_header(*lanes_[index], *lease_region, epoch, deadline); !status.ok())
      return status;
    lanes_[index]->ready(*lease_region, connection_id);
  }
  copies_ = lanes_.front()->copies_in_poll();
  stripe_bytes_ = lanes_.front()->endpoint().window().stripe_bytes;
  for (size_t index = 0; index < lanes_.size(); ++index) thread_of(index).add(lanes_[index]);
  return regions;
}

Status Connection::check_header(Lane& lane, uint32_t lease_region, uint64_t epoch, int64_t deadline_ns) {
  const std::shared_ptr<uint64_t[]> words = scratch_->take();
  if (!words) return Status::Config("too many pulls at once");
  const ReadOp op{0, sizeof(LeaseTableHeader), lease_region, 0, 1};
  const Segment segment{reinterpret_cast<std::byte*>(words.get()), sizeof(LeaseTableHeader),
                        scratch_->region()};
  Endpoint& endpoint = lane.endpoint();
  if (Status status = endpoint.post_read(0, {std::span(&op, 1), &segment}); !status.ok()) return status;
  std::vector<Completion> ended;
  while (ended.empty()) {
    const PollResult result = endpoint.poll(ended);
    if (!result.status.ok()) return result.status;
    if (now_ns() > deadline_ns) {
      endpoint.close();
      return Status::Timeout("the owner's lease table could not be read in time");
    }
    if (!result.progressed) std::this_thread::yield();
  }
  if (!ended.front().status.ok()) return ended.front().status;
  if (words[0] != LeaseTableHeader::kMagic)
    return Status::Unreachable("another process answers at the owner's address");
  if (words[1] != epoch) {
    return Status::Stale("the worker restarted: epoch " + std::to_string(epoch) + " asked, " +
                         std::to_string(words[1]) + " running");
  }
  return {};
}

std::shared_ptr<Transfer> Connection::pull(const PullRequest& request) {
  if (lanes_.front()->idle() && !copies_) lanes_.front()->check_idle(true);
  if (broken()) return nullptr;
  auto transfer = std::make_shared<Transfer>(request, now_ns(), wake_);
  if (transfer->done()) return transfer;
  std::shared_ptr<uint64_t[]> words = scratch_->take();
  if (!words) {
    transfer->refuse(Status::Config("too many pulls at once; wait for some to end"), now_ns());
    return transfer;
  }
  transfer->set_scratch(std::move(words), scratch_->region());
  const bool streaming = request.stream != StreamUnit::kNone;
  const bool small = !streaming && transfer->planned_bytes() <= inline_bytes_;
  if (small && lanes_.front()->run_inline(transfer, kInlineBudgetNs)) {
    if (!transfer->done() || !lanes_.front()->idle()) thread_of(0).wake();
    if (lanes_.front()->unsent()) thread_of(0).wake_from_doze();
    return transfer;
  }
  const bool striped = streaming || transfer->planned_bytes() >= stripe_bytes_;
  for (size_t index = 0; index < (striped ? lanes_.size() : 1); ++index) {
    lanes_[index]->submit(transfer);
    thread_of(index).wake();
  }
  return transfer;
}

bool Connection::settle(uint32_t slot, uint64_t value) { return lanes_.front()->settle(slot, value); }

/// One broken lane loses no transfer, but the connection is replaced before the next one.
bool Connection::broken() const {
  for (const auto& lane : lanes_) {
    if (lane->broken()) return true;
  }
  return false;
}

std::string Connection::why_broken() const {
  for (const auto& lane : lanes_) {
    if (lane->broken()) return lane->why_broken();
  }
  return {};
}

void Connection::close() {
  std::lock_guard lock(connecting_);
  closed_ = true;
  for (size_t index = 0; index < lanes_.size(); ++index) {
    lanes_[index]->close("the connection was closed");
    thread_of(index).remove(lanes_[index]);
  }
}

}  // namespace kvlink

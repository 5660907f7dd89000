// SPDX-License-Identifier: Apache-2.0
// The words that a lane stores into the owner's peer words: announcements, withdrawals, settles.
#include "base/clock.h"
#include "engine/lane.h"

namespace kvlink {

/// Stores a word that no caller waits for.
Status Lane::post_word(uint64_t offset, uint64_t value) {
  const uint64_t token = claim_token(nullptr, {});
  Status status = endpoint_->post_write(token, leases_.words, offset, value);
  if (!status.ok()) release(token);
  return status;
}

/// Announces the reader on every lane, because the owner must see it before it serves the first read of that
/// lane.
Status Lane::announce(Transfer& transfer) {
  if (transfer.begin_announcing(index_)) readers_->begin(transfer.seat().nonce);
  return post_word(reader_offset(transfer.seat().slot), readers_->announcement(transfer.seat().nonce));
}

/// Withdraws the announcement when a transfer has ended, so that the end of its lease does not cut off the
/// other pulls of this connection. Each lane that announced it withdraws, behind its announcement.
void Lane::withdraw(Transfer& transfer) {
  if (!readers_ || !transfer.announced_by(index_)) return;
  const bool last = readers_->end(transfer.seat().nonce, [&transfer] { return transfer.end_announcing(); });
  if (!last || transfer.state() == TransferState::kSettled || broken()) return;
  const Status posted =
      post_word(reader_offset(transfer.seat().slot), readers_->withdrawal(transfer.seat().nonce));
  if (posted.ok()) unsent_.store(true, std::memory_order_release);
}

bool Lane::settle(uint32_t slot, uint64_t value) {
  const Hold hold(*this);
  if (broken()) return false;
  if (!post_word(settled_offset(slot), value).ok()) return false;
  poll(now_ns());
  if (num_posted_ > num_awaited_) unsent_.store(true, std::memory_order_release);
  return !broken();
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// One prepared list of reads, which may be posted again and again.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "peer.h"
#include "plan/pieces.h"

namespace kvlink::nixl {

/// A read as the caller names it. It refers to pointers of the caller, because copying those of thousands of
/// reads takes microseconds.
struct Wish {
  const std::shared_ptr<OwnRegion>& into;
  const std::shared_ptr<PeerRegion>& from;
  uint64_t local = 0, remote = 0, bytes = 0;  // addresses
};

/// Any thread may call any method.
class Request : public std::enable_shared_from_this<Request> {
 public:
  enum class Phase : uint8_t { kIdle, kConnecting, kReading, kDone, kFailed, kReleased };

  /// Refuses reads beyond a region, of several peers, or of more than one kind of memory at an end.
  static Result<std::shared_ptr<Request>> prepare(const std::vector<Wish>& wishes, std::shared_ptr<Peer> peer,
                                                  int64_t timeout_ns);

  /// Starts the reads, or connecting. kConfig while they are under way.
  Status post(std::optional<std::string> notification);
  /// Takes the next steps, and returns where the request is.
  Phase check();
  /// Why it failed; and whether the peer is known to have ended.
  Status failure() const;
  bool peer_is_dead() const { return peer_->is_dead(); }
  /// On return nothing of it lands any more. Takes milliseconds, for which it may close the connection.
  void release();
  /// The same, as a failure, if it reads into this region.
  void abort_into(const OwnRegion& region);

 private:
  explicit Request(std::shared_ptr<Peer> peer, int64_t timeout_ns)
      : peer_(std::move(peer)), timeout_ns_(timeout_ns) {}
  Status add(const Wish& wish);
  // They REQUIRE mutex_.
  bool runs() const { return phase_ == Phase::kConnecting || phase_ == Phase::kReading; }
  void start();
  void ask_to_connect();
  void take_end();
  void look();
  void finish();
  void fail(Status why);
  void stop();
  std::shared_ptr<const Plan> plan_for(const std::shared_ptr<const Link>& link);

  void connected(uint64_t post, const Status& status);

  const std::shared_ptr<Peer> peer_;
  const int64_t timeout_ns_;
  Need need_;
  std::vector<ReadPiece> pieces_;
  std::vector<std::shared_ptr<OwnRegion>> into_;   // each once
  std::vector<std::shared_ptr<PeerRegion>> from_;  // the same

  mutable std::mutex mutex_;  // guards everything below
  Phase phase_ = Phase::kIdle;
  uint64_t posts_ = 0;
  int64_t deadline_ns_ = 0;
  uint32_t restarts_ = 0;  // of this post
  std::optional<std::string> notification_;
  Status why_;
  std::shared_ptr<const Link> link_;  // that the plan is for
  std::shared_ptr<const Plan> plan_;
  LeaseSeat seat_;
  std::shared_ptr<Transfer> transfer_;
};

}  // namespace kvlink::nixl

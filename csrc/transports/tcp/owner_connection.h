// SPDX-License-Identifier: Apache-2.0
// The owner's end of one admitted connection. It reads frames, and sends payload straight from the exported
// memory.
//
// Frames run strictly in order. One runs only after the kernel has the payload of all earlier ones, so a
// lease slot read behind a data read vouches for it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/unique_fd.h"
#include "transports/tcp/device_payload.h"
#include "transports/tcp/protocol.h"
#include "transports/tcp/send_queue.h"

namespace kvlink::tcp {

/// Every call is made under the owner's lock, which also guards `regions` and `source`.
class ServedConnection {
 public:
  ServedConnection(UniqueFd socket, uint64_t connection_id, const ExportedRegions& regions,
                   DeviceSource* source)
      : socket_(std::move(socket)), connection_id_(connection_id), regions_(regions), source_(source) {}

  /// Serves until there is nothing to do or its share of this round is used.
  Wants serve();
  /// Returns whether part of a response under way, or its guard's word, comes from `region`.
  bool sends_from(const ExportedRegion& region) const {
    return outbox_.touches(region) || (device_ && device_->touches(region)) ||
           (is_sending() && guard_.word && region.meets(guard_.word, sizeof(uint64_t)));
  }
  /// On return nothing more is sent under a guard that fails now.
  void enforce_guard() {
    if (is_sending() && !guard_.holds()) withhold();
  }
  /// Returns whether a lease slot was read last and not deferred for yet. A lone settle most likely follows.
  bool expects_write() const { return expects_write_; }
  bool deferred() const { return deferred_; }
  /// A deferred socket does not become readable for one lone write.
  void set_deferred(bool deferred);
  int socket() const { return socket_.get(); }
  uint64_t connection_id() const { return connection_id_; }

  Wants armed = Wants::kRequests;  // what epoll watches for

 private:
  enum class Step : uint8_t { kDone, kNeedsMore, kMalformed };

  /// The guard of the response under way.
  struct HeldGuard {
    const std::byte* word = nullptr;  // null: there is none
    uint64_t value = 0;
    uint64_t found() const;
    bool holds() const { return word == nullptr || found() == value; }
  };

  bool is_sending() const { return !outbox_.empty() || (device_ && !device_->empty()); }
  void withhold();
  void refuse(ReadStatus status, uint64_t why);
  ReadStatus hold_guard(const GuardEntry& entry);

  Step run_next_frame();
  Step answer_read(const RequestHeader& header, const std::byte* entries);
  Step store(const RequestHeader& header, const std::byte* entry);
  ReadStatus gather(const RequestHeader& header, const std::byte* entries, uint64_t& bytes);
  void gather_words(const std::byte* from, uint64_t bytes);
  ReadStatus gather_device(const RequestHeader& header, const std::byte* entries, uint64_t& bytes);
  /// Returns the size of the frame at `begin_`, or 0 if it is not complete.
  size_t whole_frame(RequestHeader& header) const;
  bool read_follows() const;

  static constexpr size_t kSliceBytes = sizeof(ResponseHeader) + kMaxFrameBytes;
  static constexpr size_t kInboxBytes = 32 << 10;
  static_assert(kInboxBytes >= kMaxRequestBytes);

  UniqueFd socket_;
  uint64_t connection_id_;
  const ExportedRegions& regions_;
  DeviceSource* const source_;  // null: no device memory is exported
  std::vector<std::byte> inbox_ = std::vector<std::byte>(kInboxBytes);
  size_t begin_ = 0, end_ = 0;  // of what inbox_ holds
  Outbox outbox_;
  HeldGuard guard_;
  ResponseHeader response_{};              // the one under way
  uint64_t response_sent_ = 0;             // bytes of it, header included
  std::unique_ptr<DevicePayload> device_;  // null until one is asked for
  std::vector<std::byte> copied_;  // the header of the response under way, and the words loaded for it
  size_t copied_bytes_ = 0;
  bool expects_write_ = false, deferred_ = false;
  std::atomic<uint64_t> frames_{0};  // read so far; a barrier between them
};

}  // namespace kvlink::tcp

// SPDX-License-Identifier: Apache-2.0
// What this machine does without kvlink: bare copies and one bare socket, for benchmarks to put beside a
// pull. Shares no code with the transports, so that a slow transport cannot lower the limit it is compared
// with. Every time is of the bare work alone: lists are prepared before the clock starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "fd.h"
#include "status.h"

namespace kvlink {

/// One contiguous move. `from` is an address of the process that is read, `to` one of this process.
struct FloorPiece {
  uint64_t from, to, bytes;
};
using FloorPieces = std::span<const FloorPiece>;

/// glibc's memcpy, piece after piece. Returns ns.
int64_t floor_memcpy(FloorPieces pieces);
/// Non-temporal stores, eight pages in turns. Returns ns.
int64_t floor_streamed_copy(FloorPieces pieces);
/// process_vm_readv out of process `pid`, 1,024 pieces a call. Returns ns.
Result<int64_t> floor_process_vm_readv(int pid, FloorPieces pieces);

/// Sends pieces of one span of memory over plain blocking sockets on the loopback interface; owns a thread.
class FloorSource {
 public:
  /// The caller keeps the memory alive until close().
  static Result<std::unique_ptr<FloorSource>> make(const std::byte* base, uint64_t bytes);
  ~FloorSource() { close(); }

  uint16_t port() const { return port_; }
  /// Idempotent.
  void close();

 private:
  FloorSource(const std::byte* base, uint64_t bytes, UniqueFd listening, uint16_t port);
  void serve();
  void answer(int reader) const;

  const std::byte* const base_;
  const uint64_t bytes_;
  const UniqueFd listening_;
  const uint16_t port_;
  std::mutex mutex_;  // guards what follows
  UniqueFd reader_;
  bool closed_ = false;
  std::thread thread_;
};

/// Asks a FloorSource for equally large answers: 8 bytes there, `answer_bytes` back. One thread at a time.
class FloorSink {
 public:
  static Result<std::unique_ptr<FloorSink>> connect(uint16_t port, uint64_t answer_bytes);

  /// One answer, from `offset` of the source's span on. Returns ns from before the request to the last byte.
  Result<int64_t> read(uint64_t offset, std::byte* to);

 private:
  FloorSink(UniqueFd socket, uint64_t answer_bytes)
      : socket_(std::move(socket)), answer_bytes_(answer_bytes) {}

  const UniqueFd socket_;
  const uint64_t answer_bytes_;
};

}  // namespace kvlink

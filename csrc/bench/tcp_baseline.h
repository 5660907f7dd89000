// SPDX-License-Identifier: Apache-2.0
// A bare stream between two processes over plain blocking sockets of the loopback interface: pieces of memory
// go by sendmsg, land by recvmsg, and nothing paces them.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "bench/baselines.h"

namespace kvlink {

/// Sends pieces of one span of memory. Owns a thread, and one more for every sink until close().
class FloorSource {
 public:
  /// The caller keeps the memory alive until close().
  static Result<std::unique_ptr<FloorSource>> make(std::byte* base, uint64_t bytes);
  ~FloorSource() { close(); }

  uint16_t port() const { return port_; }
  /// Idempotent.
  void close();

 private:
  struct Served {
    UniqueFd socket;
    std::thread thread;
  };

  FloorSource(std::byte* base, uint64_t bytes, UniqueFd listening, uint16_t port);
  void welcome();
  void serve(int sink) const;
  bool take_pieces(int sink, uint64_t count, std::vector<iovec>& pieces) const;

  std::byte* const base_;
  const uint64_t bytes_;
  const UniqueFd listening_;
  const uint16_t port_;
  std::mutex mutex_;  // guards what follows
  std::list<Served> served_;
  bool closed_ = false;
  std::thread thread_;
};

/// Reads from one FloorSource. One thread at a time.
class FloorSink {
 public:
  static Result<std::unique_ptr<FloorSink>> connect(uint16_t port);

  /// Both ends have their lists before the clock starts. Returns ns from before the one word that asks for
  /// the bytes to the last of them.
  Result<int64_t> read(FloorPieces pieces);

 private:
  explicit FloorSink(UniqueFd socket) : socket_(std::move(socket)) {}

  const UniqueFd socket_;
};

}  // namespace kvlink

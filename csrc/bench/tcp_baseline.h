// SPDX-License-Identifier: Apache-2.0
// A bare stream between two processes over blocking sockets of the loopback interface. Pieces of memory are
// sent by sendmsg and received by recvmsg, and nothing paces them.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "bench/baselines.h"

namespace kvlink {

/// Sends pieces of one span of memory. Owns one thread, and one more per sink until close().
class BaselineSource {
 public:
  /// The caller keeps the memory alive until close().
  static Result<std::unique_ptr<BaselineSource>> make(std::byte* base, uint64_t bytes);
  ~BaselineSource() { close(); }

  uint16_t port() const { return port_; }
  /// Idempotent.
  void close();

 private:
  struct Served {
    UniqueFd socket;
    std::thread thread;
  };

  BaselineSource(std::byte* base, uint64_t bytes, UniqueFd listening, uint16_t port);
  void accept_ready();
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

/// Reads from one BaselineSource. One thread at a time.
class BaselineSink {
 public:
  static Result<std::unique_ptr<BaselineSink>> connect(uint16_t port);

  /// Both ends have their lists before the clock starts. Returns ns from sending the word that requests the
  /// bytes until the last byte has arrived.
  Result<int64_t> read(BaselinePieces pieces);

 private:
  explicit BaselineSink(UniqueFd socket) : socket_(std::move(socket)) {}

  const UniqueFd socket_;
};

}  // namespace kvlink

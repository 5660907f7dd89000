// SPDX-License-Identifier: Apache-2.0
// The registered memory of an agent: an engine for host memory and one for each GPU that has any.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "metadata.h"

namespace kvlink::nixl {

/// The settings of an agent: the backend's parameters in NIXL, or else variables of the environment.
struct Settings {
  std::string agent;
  std::vector<std::string> transports = {"cuda", "cma", "verbs", "tcp"};  // best first
  std::string host = "127.0.0.1", advertise;
  uint16_t port = 0;                    // of the channel; 0: any
  int64_t timeout_ns = 30'000'000'000;  // of a transfer
  uint64_t bounce_bytes = 64 << 20;
};

/// A region that this agent registered.
struct OwnRegion {
  uint32_t pool = 0, number = 0;
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  std::atomic<bool> dropped{false};  // nothing is read into it any more
};

/// Any thread may call any method.
class RegisteredMemory {
 public:
  explicit RegisteredMemory(const Settings& settings) : settings_(settings) {}

  /// Returns the pool of the memory by what the driver says of its address, because labels are wrong in
  /// places: SGLang calls all memory VRAM.
  static uint32_t pool_of(const std::byte* memory);

  Result<std::shared_ptr<OwnRegion>> add(std::byte* base, uint64_t bytes);
  /// Ends the lease under which peers read, then revokes the region. REQUIRES that nothing is read into it
  /// any more.
  void drop(const OwnRegion& region);
  /// Returns the engine of a pool, or null if it has none.
  Engine* engine(uint32_t pool) const;
  AgentCard card() const;
  Result<Accepted> accept(const ConnectRequest& request, uint64_t caller) const;
  void close();

 private:
  struct Pool {
    uint64_t epoch;
    std::unique_ptr<Engine> engine;
    LeaseSeat seat;
    std::mutex turn;  // one drops at a time
  };
  Result<Pool*> open(uint32_t pool, const MemoryRange& like);
  Pool* find(uint32_t pool) const;

  const Settings settings_;
  mutable std::mutex mutex_;  // guards what follows, and the seats
  std::map<uint32_t, std::unique_ptr<Pool>> pools_;
  bool closed_ = false;
};

}  // namespace kvlink::nixl

// SPDX-License-Identifier: Apache-2.0
// Properties of endpoints and transports as data. The engine reads them once and decides by them.
#pragma once

#include <cstdint>
#include <string>

namespace kvlink {

/// Limits how much the engine posts to an endpoint at a time.
struct Window {
  uint32_t chunk_bytes = 1 << 20;   // aim of one post_read (one ReadOp may exceed it)
  uint32_t chunk_ops = 1024;        // never more ops, nor more segments, in one post_read
  uint32_t depth = 1;               // posts outstanding
  uint64_t stripe_bytes = 4 << 20;  // pulls below this are faster on one lane than meeting at the end
  uint64_t bytes = UINT64_MAX;      // another post is made while fewer are under way
};

/// Properties of an endpoint, constant from establish() on.
struct Traits {
  /// The ports that it reads from and to, such as "mlx5_0:1->mlx5_1:1", if it is tied to ports. If a
  /// connection uses several, " 75%" behind them is their share of the bytes under way. Or who chooses them:
  /// libfabric's provider.
  std::string path = {};
  Window window = {};
  /// The owner executes a post only after every earlier post of this endpoint.
  bool ordered = false;
  /// Only reads of kReadWords regions are ordered, by a fence. Later posts wait with them.
  bool ordering_needs_fence = false;
  /// Chunks may have repeats, whose cost does not grow with the number of planes.
  bool supports_repeats = false;
  /// A post is a launch: it costs the caller little time whatever its size. A device moves the bytes without
  /// a CPU, so a waiting thread may as well poll.
  bool device_driven = false;
  /// A NIC moves the bytes without a CPU: a thread that polls for longer than a round trip wastes a core.
  bool nic_driven = false;
  /// poll() moves the bytes itself on the calling thread, so there is nothing to sleep for.
  bool cpu_copies = false;
  /// Once armed, readable when poll() has work or the owner is gone. -1: there is no descriptor.
  int wake_fd = -1;
};

/// Properties of a transport. They are constant.
struct Capabilities {
  /// Exports device memory and reads into it. Other transports reach it through staging/bounce_buffer.h, or
  /// not at all.
  bool reaches_device_memory = false;
  /// Reads only into memory that was registered, as a NIC does.
  bool needs_registered_target = false;
  /// register_memory() accepts device memory with a bounce buffer, and sends from it through that buffer.
  bool exports_through_bounce = false;
  /// The owner's end obeys Chunk::guard, so no reader must be cut off when a lease ends.
  bool guards = false;
  /// fence() works. If the transport has no guards, its readers announce their connection id in the lease
  /// slot.
  bool can_fence = false;
  /// Readable when serve() has work. -1: this transport needs no thread of the owner.
  int serve_fd = -1;
};

/// The state of a port that a transport is tied to.
struct PortState {
  std::string name;         // "mlx5_0:1"
  std::string away;         // why, while its device is gone; empty: it is here
  uint32_t times_away = 0;  // so far
  bool held = false;        // connections still hold the device that is gone
  bool left_out = false;    // for good; `away` is the reason with the fix
  bool operator==(const PortState&) const = default;
};

/// One run of a worker: what a process is, and what a reader means to read from.
struct WorkerRun {
  std::string worker = {};
  uint64_t epoch = 0;
};

/// The reader that an owner admits.
struct ReaderId {
  // NOLINTNEXTLINE(google-explicit-constructor): most callers know only the connection
  ReaderId(uint64_t connection, uint64_t asks = 0) : connection_id(connection), caller(asks) {}

  uint64_t connection_id;  // at least 1; several endpoints may share one
  uint64_t caller;         // the same for all that one process asks for; 0: unknown
};

}  // namespace kvlink

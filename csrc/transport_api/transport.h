// SPDX-License-Identifier: Apache-2.0
// The whole contract of a transport. It knows addresses and keys, never blocks, layers or requests.
//
// Two roles. The *owner* registers memory and answers connection requests; the *reader* opens an Endpoint
// and reads from it. Every blob that crosses processes (address, hello, reply, remote key) is opaque to all
// other code, comes from a foreign process when it is parsed, and must be refused when malformed.
//
// A connection is made in three steps, the middle one carried by the control plane:
//   reader: endpoint = transport.open(owner's address);  hello = endpoint->hello()
//   owner:  reply    = transport.accept(reader, hello)
//   reader: endpoint->establish(reply); endpoint->import_region(key) once per region of the owner
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "memory/memory_range.h"
#include "transport_api/ops.h"

namespace kvlink {

class Bounce;
class Crossover;

/// The reader's end of one connection. Not thread safe: the engine serialises every call.
/// All calls but establish() return at once; none throws.
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  virtual std::string hello() const = 0;
  /// Blocks at most `timeout_ns`.
  virtual Status establish(std::string_view reply, int64_t timeout_ns) = 0;
  /// Returns the index by which ReadOp::region names this region of the owner.
  virtual Result<uint32_t> import_region(std::string_view remote_key) = 0;

  /// The ports it goes from and to, "mlx5_0:1->mlx5_1:1", where it is tied to some; " 75%" behind it is the
  /// part of the bytes under way that its ports may have where there are others. Constant.
  virtual std::string path() const { return {}; }
  virtual Window window() const = 0;
  /// A post is executed at the owner only after every earlier post of this endpoint has been.
  virtual bool ordered() const = 0;
  /// It is so for reads of kReadWords regions alone, and what is posted behind one waits with it.
  virtual bool order_stalls() const { return false; }
  /// There is a pull, and what other endpoints fail to bring of it may come here: with nothing under way,
  /// asks the owner now and then whether it is there. True: poll() is to be called.
  virtual bool stand_by(int64_t /*now_ns*/) { return false; }
  /// When to call stand_by() and poll() during a pull though nothing arrives: they find out that the owner is
  /// gone, however long the pull would wait. INT64_MAX: it may just be slow.
  virtual int64_t look_at_ns() const { return INT64_MAX; }
  /// Chunks may have repeats: what they cost does not grow with the number of planes.
  virtual bool takes_repeats() const { return false; }
  /// Of endpoints that can stage what they read (Chunk::staged): what decides it, for one connection.
  virtual std::shared_ptr<Crossover> crossover() const { return nullptr; }
  /// A post is a launch: it takes its caller little time however many bytes it has, and a device then moves
  /// them without any CPU, so whoever waits may as well look.
  virtual bool launches() const { return false; }
  /// poll() moves the bytes itself on the calling thread, so there is nothing to sleep for.
  virtual bool copies_in_poll() const = 0;

  /// Takes the work; its completion comes from poll() under `token`. A failed post has no completion.
  virtual Status post_read(uint64_t token, const Chunk& chunk) = 0;
  /// Stores 8 bytes, aligned, into a kWriteWords region. Completes once the source may be forgotten;
  /// the store reaches the owner before any later post of this endpoint does.
  virtual Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) = 0;
  /// Moves posted work on, a bounded slice at a time, and appends what ended.
  virtual PollResult poll(std::vector<Completion>& ended) = 0;
  /// Forgets `token`. True: no byte of it will land and no completion will follow. False: it cannot be called
  /// back; its completion follows, or close() ends it.
  virtual bool cancel(uint64_t token) = 0;
  /// Readable, once armed, when poll() has something to do or the owner is gone; -1 when there is no such
  /// descriptor.
  virtual int wake_fd() const = 0;
  /// To be called before sleeping on wake_fd(). False: poll() has something to do already.
  virtual bool arm() { return true; }
  /// Idempotent. On return no byte lands any more and every descriptor is closed.
  virtual void close() = 0;
};

/// The owner's record of one registered range. Destroying it revokes the key.
class MemoryRegion {
 public:
  virtual ~MemoryRegion() = default;
  /// Changes with the device of a port. Whoever is admitted and then told has the one that belongs to it.
  virtual std::string remote_key() const = 0;
};

/// One of the ports that a transport is tied to.
struct PortState {
  std::string name;         // "mlx5_0:1"
  std::string away;         // why, while its device is gone; empty: it is here
  uint32_t times_away = 0;  // so far
  bool held = false;        // connections still hold the device that is gone
  bool operator==(const PortState&) const = default;
};

/// Whom an owner admits.
struct ReaderId {
  // NOLINTNEXTLINE(google-explicit-constructor): most who admit somebody know no more
  ReaderId(uint64_t connection, uint64_t asks = 0) : connection_id(connection), caller(asks) {}

  uint64_t connection_id;  // several endpoints may share one
  uint64_t caller;         // the same for all that one process asks for; 0: unknown
};

/// One way of moving bytes. open() and probe() may be called from any thread; the owner's calls
/// (register_memory, accept, fence) too, at any time until close().
class Transport {
 public:
  virtual ~Transport() = default;

  /// Everything a peer needs to decide whether it can come here, and to do so.
  virtual std::string address() const = 0;
  /// Whose devices come and go; serve() finds out. Any thread.
  virtual std::vector<PortState> ports() const { return {}; }
  /// Refuses (kTransportUnavailable, reason and fix) memory that this transport cannot lend.
  virtual Result<std::unique_ptr<MemoryRegion>> register_memory(const MemoryRange& range, Access access) = 0;
  /// Lends the memory of devices and reads into it. Others are given it by way of staging/bounce_buffer.h, or
  /// not at all.
  virtual bool reaches_devices() const { return false; }
  /// As a NIC does: reads into memory that was registered, and nowhere else.
  virtual bool lands_in_registered_only() const { return false; }
  /// From now on lends the memory of devices too, and sends it by way of `bounce`. Refuses
  /// (kTransportUnavailable, reason and fix) where peers take the bytes by themselves.
  virtual Status lend_through(std::shared_ptr<Bounce>) {
    return Status::Unavailable("peers would have to reach into GPU memory by themselves",
                               "allow tcp, which sends from it (KVLINK_TRANSPORTS)");
  }
  /// Memory that reads land in and no peer may see; counts as a region. Only NICs need to know it.
  virtual Status register_scratch(const MemoryRange&) { return {}; }
  /// Parallel endpoints that a connection to this owner should have; 0: what TransportInfo says.
  virtual uint32_t lanes_to(std::string_view) const { return 0; }
  /// Refuses (kTransportUnavailable, reason and fix) an owner that this process cannot reach this way.
  /// `lane` numbers the parallel endpoints of one connection from 0.
  virtual Result<std::unique_ptr<Endpoint>> open(std::string_view owner_address, uint32_t lane) = 0;
  /// Admits the reader that said `hello`. What is there for all who have not connected yet is shared out
  /// among callers: a flood by one drops what is its own.
  virtual Result<std::string> accept(ReaderId reader, std::string_view hello) = 0;
  /// The owner's end obeys Chunk::guard, so that no reader need be cut off when a lease ends.
  virtual bool guards() const { return false; }
  /// On return no byte is sent any more under a guard that fails now.
  virtual void enforce_guards() {}
  /// Whether fence() works. Readers of a transport that can be fenced, and has no guards, announce their
  /// connection id in the lease slot.
  virtual bool can_fence() const { return false; }
  /// Cuts every endpoint admitted under `connection_id`: on return none of them gets another byte.
  /// False: no such connection, or !can_fence().
  virtual bool fence(uint64_t connection_id) = 0;

  /// Readable when serve() has work; -1 when this transport needs no thread of the owner.
  virtual int serve_fd() const = 0;
  /// Does a bounded amount of the owner's work. Called by one thread only.
  virtual void serve() = 0;
  /// Idempotent; ends every connection of the owner's side. No serve() afterwards.
  virtual void close() = 0;
};

}  // namespace kvlink

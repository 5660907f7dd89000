// SPDX-License-Identifier: Apache-2.0
// The whole contract of a transport. It knows addresses and keys, never blocks, layers or requests.
//
// Two roles. The *owner* registers memory and answers connection requests; the *reader* opens endpoints and
// reads from it. Every blob that crosses processes (address, hello, reply, remote key) is opaque to all other
// code, comes from a foreign process when it is parsed, and must be refused when malformed.
//
// A connection is made in three steps, the middle one carried by the control plane:
//   reader: endpoint = transport.open(owner's address);  hello = endpoint->hello()
//   owner:  reply    = transport.accept(reader, hello), for all lanes at once
//   reader: endpoint->establish(reply); endpoint->import_region(key) once per region of the owner
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/patience.h"
#include "base/status.h"
#include "memory/memory_range.h"
#include "transport_api/ops.h"
#include "transport_api/traits.h"

namespace kvlink {

class Bounce;

/// The reader's end of one connection. Not thread safe: the engine serialises every call.
/// All calls but establish() return at once; none throws.
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  virtual std::string hello() const = 0;
  /// Waits no longer than `patience` lasts.
  virtual Status establish(std::string_view reply, const Patience& patience) = 0;
  /// Returns the index by which ReadOp::region names this region of the owner.
  virtual Result<uint32_t> import_region(std::string_view remote_key) = 0;
  virtual const Traits& traits() const = 0;

  /// Takes the work. Its completion comes from poll() under `token`; a failed post has no completion.
  virtual Status post_read(uint64_t token, const Chunk& chunk) = 0;
  /// Stores 8 aligned bytes into a kWriteWords region. It completes once the source may be forgotten, and
  /// reaches the owner before any later post of this endpoint.
  virtual Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) = 0;
  /// Advances posted work by a bounded slice and appends what ended. `now_ns` is the approximate time.
  /// `waiting` means that a pull is under way whose reads may move here from endpoints that fail. If nothing
  /// is posted, this endpoint then checks now and then whether the owner is alive.
  virtual PollResult poll(int64_t now_ns, bool waiting, std::vector<Completion>& ended) = 0;
  /// Forgets `token`. Returns true if no byte of it will land and no completion will follow. Returns false if
  /// it cannot be cancelled: its completion follows, or close() ends it.
  virtual bool cancel(uint64_t token) = 0;
  /// To be called before sleeping on Traits::wake_fd. Returns false if poll() already has work.
  virtual bool arm() { return true; }
  /// Idempotent. On return no byte lands any more and every descriptor is closed.
  virtual void close() = 0;
};

/// The owner's record of one registered range. Destroying it revokes the key.
class MemoryRegion {
 public:
  virtual ~MemoryRegion() = default;
  /// May change when the device of a port is reopened; read it after accept().
  virtual std::string remote_key() const = 0;
};

/// The hellos of one connection, one a lane.
using Hellos = std::span<const std::string>;

/// The endpoints of one connection by lane, at least one. A lane that could not be opened is null.
using Endpoints = std::vector<std::unique_ptr<Endpoint>>;

/// One way of moving bytes. Any thread may call open(), and the owner's calls (register_memory, accept,
/// fence) at any time until close().
class Transport {
 public:
  virtual ~Transport() = default;

  /// Returns what a peer needs to decide whether it can reach this worker, and to do so.
  virtual std::string address() const = 0;
  virtual const Capabilities& capabilities() const = 0;
  /// Returns the ports whose devices come and go, which serve() updates, and those that could not be opened
  /// or could not register the memory. Registration may leave out ports of address() and of the keys of
  /// regions. Any thread.
  virtual std::vector<PortState> ports() const { return {}; }

  /// Refuses (kTransportUnavailable, reason and fix) memory that this transport cannot export. The reader's
  /// segments count its regions in order of registration. kLocal memory counts too: reads land in it, no peer
  /// may see it, and its region is null. With `through` (only if Capabilities::exports_through_bounce),
  /// device memory is sent through this buffer.
  virtual Result<std::unique_ptr<MemoryRegion>> register_memory(
      const MemoryRange& range, Access access, const std::shared_ptr<Bounce>& through = nullptr) = 0;
  /// Refuses (kTransportUnavailable, reason and fix) an owner that this process cannot reach this way. With
  /// `num_lanes` 0 the transport chooses a number that suits the owner. `owner_address` is a claim of whoever
  /// published the card; a transport whose reader goes to another process by itself lets that process prove
  /// that it is `owner`.
  virtual Result<Endpoints> open(std::string_view owner_address, uint32_t num_lanes,
                                 const WorkerRun& owner) = 0;
  /// Admits the reader that sent `hellos`, one a lane, and returns the reply to each. Lanes that may wait for
  /// different networks wait side by side. Callers share the room for readers that have not connected yet: a
  /// flood by one caller drops only its own.
  virtual std::vector<Result<std::string>> accept(ReaderId reader, Hellos hellos) = 0;
  Result<std::string> accept(ReaderId reader, const std::string& hello) {
    return std::move(accept(reader, Hellos(&hello, 1)).front());
  }
  /// Cuts every endpoint admitted under `connection_id` (0: none): on return none of them gets another byte.
  /// With Capabilities::guards, no reader is sent another byte under a guard that fails now. Returns false if
  /// there is no such connection or it cannot be fenced.
  virtual bool fence(uint64_t connection_id) = 0;

  /// Does a bounded amount of the owner's work. Called by one thread only.
  virtual void serve() {}
  /// Idempotent; ends every connection of the owner's side. No serve() afterwards.
  virtual void close() = 0;
};

/// Admits lanes one after the other by `accept(hello)`, which returns Result<std::string>.
template <typename Accept>
std::vector<Result<std::string>> accept_each(Hellos hellos, Accept accept) {
  std::vector<Result<std::string>> replies;
  for (const std::string& hello : hellos) replies.push_back(accept(hello));
  return replies;
}

/// Opens `num_lanes` endpoints, at least one, by `open(lane)`, which returns
/// Result<std::unique_ptr<Endpoint>>.
template <typename Open>
Result<Endpoints> open_lanes(uint32_t num_lanes, Open open) {
  Endpoints endpoints;
  Status why;
  for (uint32_t lane = 0; lane == 0 || lane < num_lanes; ++lane) {
    Result<std::unique_ptr<Endpoint>> endpoint = open(lane);
    if (!endpoint.ok()) why = endpoint.status();
    endpoints.push_back(endpoint.ok() ? std::move(*endpoint) : nullptr);
  }
  for (const auto& endpoint : endpoints) {
    if (endpoint) return endpoints;
  }
  return why;
}

/// Wraps each endpoint that could be opened, by `wrap(lane, endpoint)`, which returns the same type.
template <typename Wrap>
Result<Endpoints> wrap_lanes(Result<Endpoints> opened, Wrap wrap) {
  if (!opened.ok()) return opened;
  return open_lanes(static_cast<uint32_t>(opened->size()), [&](uint32_t lane) {
    std::unique_ptr<Endpoint>& endpoint = (*opened)[lane];
    return endpoint ? wrap(lane, std::move(endpoint)) : Result<std::unique_ptr<Endpoint>>(nullptr);
  });
}

}  // namespace kvlink

// SPDX-License-Identifier: Apache-2.0
// The second way to connect a queue pair: by the kernel's connection manager (rdma_cm), the only way there is
// for iWARP. The handshake through the control plane stays; its reply names an IP address, a port and a
// secret, which the reader connects to and shows. The queue pair belongs to its Nic as any other: the manager
// knows it by its number alone, so that the device contexts that librdmacm opens for itself do not matter.
#pragma once

#include <functional>
#include <memory>

#include "transports/verbs/nic.h"

struct rdma_cm_id;

namespace kvlink::verbs {

class Qp;
struct LivenessTimeouts;

/// Who asks to be connected. Forgetting it refuses it.
struct CmCaller {
  Owned<rdma_cm_id> id;
  Secret secret{};
  uint32_t qpn = 0;                      // 0 with iWARP, which does not tell
  uint32_t reads_in = 0, reads_out = 0;  // the most that this side may answer and start, as the caller wishes
};

/// One port of a NIC as the connection manager knows it, listening at one of its IP addresses. Queue pairs
/// connected here share it, and fail at once when the other end disconnects or its process dies.
/// Any thread; take_events() by one.
class CmPort {
 public:
  using Arrived = std::function<void(CmCaller)>;
  virtual ~CmPort() = default;

  /// Where readers are to connect, the secret left to the caller.
  virtual CmReply address() const = 0;
  /// Readable when take_events() has something to do.
  virtual int events_fd() const = 0;
  /// No event is held while `arrived` runs: it may wait for a thread that destroys queue pairs.
  virtual void take_events(const Arrived& arrived) = 0;
  /// The owner's half: `qp` may be read through once the caller has heard.
  virtual Status accept(CmCaller caller, Qp& qp, LivenessTimeouts timeouts) = 0;
  /// The reader's half. Blocks at most `timeout_ns`.
  virtual Status connect(Qp& qp, const CmReply& to, LivenessTimeouts timeouts, int64_t timeout_ns) = 0;
  /// Idempotent. What is connected stays so.
  virtual void stop_listening() = 0;
};

/// Whether there is a connection manager; else why not and what to do.
Status cm_usable();
/// Refuses (kTransportUnavailable) a port that no IP address of this machine leads to.
Result<std::shared_ptr<CmPort>> open_cm_port(const std::shared_ptr<Nic>& nic);

}  // namespace kvlink::verbs

// SPDX-License-Identifier: Apache-2.0
// The second way to connect a queue pair, and the only one for iWARP: the kernel's connection manager
// (rdma_cm). The handshake through the control plane remains. Its reply names an IP address, a port and a
// secret; the reader connects to them and shows the secret. The queue pair belongs to its Nic like any other.
// The manager knows only its number, so the device contexts that librdmacm opens for itself do not matter.
#pragma once

#include <functional>
#include <memory>

#include "base/patience.h"
#include "transports/verbs/nic.h"

struct rdma_cm_id;

namespace kvlink::verbs {

class Qp;
struct LivenessTimeouts;

/// A reader that asks to be connected. Destroying it refuses the reader.
struct CmCaller {
  Owned<rdma_cm_id> id;
  Secret secret{};
  uint32_t qpn = 0;                      // 0 with iWARP, which does not tell
  uint32_t reads_in = 0, reads_out = 0;  // the most that this side may answer and start, as the caller wishes
};

/// One port of a NIC, listening through the connection manager at one of its IP addresses. Queue pairs
/// connected here fail at once when the other end disconnects or its process dies. Any thread; take_events()
/// by one.
class CmPort {
 public:
  using Arrived = std::function<void(CmCaller)>;
  virtual ~CmPort() = default;

  /// Returns where readers connect. The caller adds the secret.
  virtual CmReply address() const = 0;
  /// This descriptor is readable when take_events() has work.
  virtual int events_fd() const = 0;
  /// Holds no event while `arrived` runs, which may wait for a thread that destroys queue pairs.
  virtual void take_events(const Arrived& arrived) = 0;
  /// The owner's half. The caller may read through `qp` once it has the answer.
  virtual Status accept(CmCaller caller, Qp& qp, LivenessTimeouts timeouts) = 0;
  /// The reader's half. Waits no longer than `patience` lasts.
  virtual Status connect(Qp& qp, const CmReply& to, LivenessTimeouts timeouts, const Patience& patience) = 0;
  /// Idempotent. Existing connections stay.
  virtual void stop_listening() = 0;
};

/// Returns whether there is a connection manager, or the reason and the fix.
Status cm_usable();
/// Refuses (kTransportUnavailable) a port that no IP address of this machine leads to.
Result<std::shared_ptr<CmPort>> open_cm_port(const std::shared_ptr<Nic>& nic);

}  // namespace kvlink::verbs

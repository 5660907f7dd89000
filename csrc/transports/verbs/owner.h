// SPDX-License-Identifier: Apache-2.0
// The owner's side: the queue pairs through which readers read. No thread of the owner takes part in a read.
// It only admits readers, cuts them off, and detects that they or the devices of ports are gone.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/unique_fd.h"
#include "transports/verbs/ports.h"
#include "transports/verbs/queue_pair.h"
#include "transports/verbs/rdma_cm.h"

namespace kvlink::verbs {

/// Any thread may call any method except serve(), which belongs to one thread.
class Owner {
 public:
  /// `ports` outlive it.
  static Result<std::unique_ptr<Owner>> make(Ports& ports, LivenessTimeouts timeouts);
  ~Owner() { close(); }

  /// Returns the reply's blob. Refuses a caller that already has its share of the served queue pairs.
  Result<std::string> admit(ReaderId reader, const Hello& hello);
  /// On return no byte reaches a queue pair that was admitted under this id. Returns true if there was one.
  bool fence(uint64_t connection_id);

  int serve_fd() const { return epoll_.get(); }
  void serve();
  void close();

 private:
  struct Served {
    uint64_t connection_id, caller;
    size_t port;
    std::unique_ptr<Qp> qp;
    bool probed = false;      // asked whether the reader is there, and not answered yet
    Secret secret{};          // that its reader has to show
    int64_t expected_ns = 0;  // until when; 0: it is connected
  };

  Owner(Ports& ports, LivenessTimeouts timeouts);
  Status watch_all();
  bool watch(size_t port) const;
  void unwatch(size_t port) const;
  void look_after_ports();
  void accept_caller(size_t port, CmCaller caller);
  void probe_readers();
  template <typename Which>
  std::vector<Served> take_out(Which which);
  void take_answers(std::span<Served> leaving);
  void drop_failed();
  /// Breaks the readers' ends of these queue pairs, and waits at most `most_ns` until the readers know.
  void tell(std::span<Served> leaving, int64_t most_ns);
  /// Tells the readers and destroys the queue pairs.
  void cut(std::vector<Served> condemned);
  /// Tells the readers of a port whose device goes. Returns the queue pairs to destroy.
  std::vector<std::unique_ptr<Qp>> dismiss(size_t port);

  Ports& ports_;
  const LivenessTimeouts timeouts_;
  UniqueFd epoll_, timer_;
  int64_t probed_ns_;  // of the serving thread

  std::mutex mutex_;  // guards everything below
  std::vector<Served> served_;
  bool closed_ = false;
};

}  // namespace kvlink::verbs

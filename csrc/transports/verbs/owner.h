// SPDX-License-Identifier: Apache-2.0
// The owner's side: the queue pairs through which readers read. No thread of the owner takes part in a read.
// It only admits readers, cuts them off, and detects that they or the devices of ports are gone.
#pragma once

#include <cstdint>
#include <future>
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

  /// Returns the blob of the reply to each lane. Refuses a caller that already has its share of the served
  /// queue pairs. The kernel may look for the reader's address for a second, so ports connect side by side.
  std::vector<Result<std::string>> admit(ReaderId reader, std::span<const std::string> hellos);
  /// On return no byte reaches a queue pair that was admitted under this id. Returns true if there was one.
  bool fence(uint64_t connection_id);

  int serve_fd() const { return epoll_.get(); }
  /// To be called after ports were left out, before serve().
  void watch_again() const;
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

  struct Lane {
    Hello hello;
    Result<std::string>* reply;
  };
  /// A queue pair and the port of whose queue it is.
  struct Ended {
    std::shared_ptr<const OpenPort> at;
    std::unique_ptr<Qp> qp;
  };

  Owner(Ports& ports, LivenessTimeouts timeouts);
  Status watch_all();
  bool watch(size_t port) const;
  void unwatch(size_t port) const;
  void look_after_ports();
  void accept_caller(size_t port, CmCaller caller);
  void probe_readers();
  /// Connects lanes of one port. The first that is refused ends the others, which would take as long to fail.
  void admit_at_port(ReaderId reader, std::span<const Lane> lanes);
  Result<std::string> admit_lane(ReaderId reader, const Hello& hello);
  /// Counts a reader as served while it connects. Returns the port.
  Result<std::shared_ptr<const OpenPort>> reserve(ReaderId reader, size_t port);
  Status check_room(ReaderId reader) const;
  Result<std::string> connect(const OpenPort& opened, const Hello& hello, Served& served) const;
  template <typename Which>
  std::vector<Served> take_out(Which which);
  void take_answers(std::span<Served> leaving);
  void take_failed();
  /// Destroys what has ended aside: the driver of a dead device may take long.
  void drop_ended();
  /// Breaks the readers' ends of these queue pairs, and waits at most `most_ns` until the readers know.
  void notify(std::span<Served> leaving, int64_t most_ns);
  /// Tells the readers and ends the queue pairs, which the caller destroys without the lock.
  void cut(std::span<Served> condemned);
  /// Tells the readers of a port whose device goes. Returns the queue pairs to destroy.
  std::vector<std::unique_ptr<Qp>> dismiss(size_t port);

  Ports& ports_;
  const LivenessTimeouts timeouts_;
  UniqueFd epoll_, timer_;
  int64_t probed_ns_;           // of the serving thread
  std::future<void> dropping_;  // too

  std::mutex mutex_;  // guards everything below; no call that may wait for a peer or a driver is under it
  std::vector<Served> served_;
  std::vector<uint64_t> admitting_;  // callers of readers that connect now
  std::vector<Ended> ended_;
  bool closed_ = false;
};

}  // namespace kvlink::verbs

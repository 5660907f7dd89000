// SPDX-License-Identifier: Apache-2.0
// An owner of GPU memory in a process of its own.
#pragma once

#include <functional>
#include <string>

#include "cpp/transports/cuda/pair.h"

namespace kvlink::testing {

/// A GpuOwner in a forked process, over pipes of messages; killed with the test. `prepare` runs
/// there first.
class RemoteGpuOwner {
 public:
  explicit RemoteGpuOwner(GpuPool::Kind kind, const std::function<void()>& prepare = [] {}) {
    std::array<int, 2> ends;
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      prepare();
      run(kind, ends[1]);
      ::_exit(0);
    }
    ::close(ends[1]);
    control_ = ends[0];
    card = {hear(), hear(), hear(), hear()};
  }
  ~RemoteGpuOwner() {
    kill();
    ::close(control_);
  }
  std::string accept(const std::string& hello) {
    ::send(control_, hello.data(), hello.size(), MSG_NOSIGNAL);
    return hear();
  }
  /// Closes the transport there, then frees the memory, and waits for that.
  void close() {
    ::shutdown(control_, SHUT_WR);
    EXPECT_EQ(hear(), "freed");
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  Card card;

 private:
  static void run(GpuPool::Kind kind, int control) {
    {
      GpuOwner owner(kind);
      Server server(*owner.transport);
      serve(owner, control);
    }
    ::send(control, "freed", 5, MSG_NOSIGNAL);
  }
  static void serve(GpuOwner& owner, int control) {
    const Card card = owner.card();
    for (const auto* blob : {&card.address, &card.pool_key, &card.table_key, &card.words_key}) {
      ::send(control, blob->data(), blob->size(), MSG_NOSIGNAL);
    }
    std::array<char, 4096> hello;
    for (ssize_t size = 0; (size = ::recv(control, hello.data(), hello.size(), 0)) > 0;) {
      const std::string reply = *owner.transport->accept(1, {hello.data(), static_cast<size_t>(size)});
      ::send(control, reply.data(), reply.size(), MSG_NOSIGNAL);
    }
  }
  std::string hear() const {
    std::string message(4096, '\0');
    const ssize_t size = ::recv(control_, message.data(), message.size(), 0);
    message.resize(size > 0 ? static_cast<size_t>(size) : 0);
    return message;
  }

  pid_t pid_ = -1;
  int control_ = -1;
};

}  // namespace kvlink::testing

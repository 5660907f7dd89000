// SPDX-License-Identifier: Apache-2.0
// The owner of cma as its address names it, and as the kernel shows it.
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/blob.h"
#include "base/host_identity.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "transports/cma_permission.h"

namespace kvlink::cma {

inline constexpr uint32_t kMagic = 0x3161'6d63;  // "cma1"
inline constexpr size_t kCookieBytes = 16;
inline constexpr size_t kMaxBootIdBytes = 64;

using Cookie = std::array<char, kCookieBytes>;

struct CmaAddress {
  std::string boot_id;
  uint64_t pid_namespace = 0, pid = 0, uid = 0;
  uint64_t cookie_address = 0;
  Cookie cookie{};

  std::string blob() const {
    BlobWriter to;
    to.u32(kMagic).bytes(boot_id).u64(pid_namespace).u64(pid).u64(uid);
    return to.u64(cookie_address).bytes(cookie).take();
  }
  static Result<CmaAddress> parse(std::string_view blob) {
    BlobReader from(blob, kMagic);
    CmaAddress parsed;
    parsed.boot_id = from.bytes(kMaxBootIdBytes);
    from.fields(parsed.pid_namespace, parsed.pid, parsed.uid, parsed.cookie_address, parsed.cookie);
    if (!from.done() || parsed.pid == 0 || parsed.pid > INT32_MAX) {
      return Status::Unavailable("not a cma address", "let both ends run the same version of kvlink");
    }
    return parsed;
  }
};

inline iovec piece(uint64_t address, size_t bytes) { return {reinterpret_cast<void*>(address), bytes}; }

/// Another process's memory.
class Process {
 public:
  explicit Process(CmaAddress address)
      : address_(std::move(address)), pid_(static_cast<pid_t>(address_.pid)) {
    // Without pidfds (before Linux 5.3) the cookie shows that the owner is gone.
    pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  }

  int pidfd() const { return pidfd_.get(); }
  void forget() { pidfd_.reset(); }

  Status check() const {
    pollfd exit{pidfd_.get(), POLLIN, 0};
    if (::poll(&exit, 1, 0) > 0) return gone();
    Cookie found;
    const iovec local{found.data(), kCookieBytes}, remote = piece(address_.cookie_address, kCookieBytes);
    const ssize_t got = ::process_vm_readv(pid_, &local, 1, &remote, 1, 0);
    if (got < 0 && errno != EFAULT) return failed(errno);
    if (got != kCookieBytes ||
        !same_secret({found.data(), kCookieBytes}, {address_.cookie.data(), kCookieBytes}))
      return replaced();
    return {};
  }

  /// Returns the meaning of the kernel's refusal to copy.
  Status failed(int error) const {
    if (error == EFAULT)
      return Status::AccessDenied(name() + " no longer has that memory, or this process does not");
    if (error == ESRCH) return gone();
    if (error == EPERM) return why_cma_refused(pid_, static_cast<uid_t>(address_.uid));
    return Status::Unreachable("process_vm_readv from " + name() + ": " + std::strerror(error));
  }

  pid_t pid() const { return pid_; }

 private:
  std::string name() const { return "process " + std::to_string(pid_); }
  Status gone() const { return Status::Unreachable("the owner, " + name() + ", has ended"); }
  Status replaced() const {
    return Status::Unreachable("the owner has closed, or " + name() + " is another program by now");
  }

  CmaAddress address_;
  pid_t pid_;
  UniqueFd pidfd_;
};

}  // namespace kvlink::cma

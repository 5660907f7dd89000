// SPDX-License-Identifier: Apache-2.0
#include "base/sys.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <system_error>
#include <utility>

namespace kvlink::sys {
namespace {

std::atomic<Refuses> refuses_call{nullptr};

bool refused(const char* call) {
  const Refuses refuses = refuses_call.load(std::memory_order_relaxed);
  const int error = refuses ? refuses(call) : 0;
  if (error != 0) errno = error;
  return error != 0;
}

/// " (the limit is 1024)", or nothing where there is none.
std::string limit_of(__rlimit_resource_t resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return " (the limit is " + std::to_string(limit.rlim_cur) + ")";
}

struct Cause {
  std::string what, fix;
};

bool is(const char* call, const char* name) { return std::strcmp(call, name) == 0; }

Cause out_of_memory(const char* call) {
  const std::string address_space = limit_of(RLIMIT_AS), file_size = limit_of(RLIMIT_FSIZE);
  if (is(call, "mmap") && !address_space.empty()) {
    return {"this process has no address space left" + address_space, "raise ulimit -v"};
  }
  if (is(call, "ftruncate") && !file_size.empty()) {
    return {"this process may not make a file so large" + file_size, "raise ulimit -f"};
  }
  return {"no memory is left",
          "ask for fewer blocks, or raise the memory limit of this machine or container"};
}

Cause cause_of(const char* call, int error) {
  if (is_memory(call, error)) return out_of_memory(call);
  switch (error) {
    case EMFILE:
      return {"this process has no descriptor left" + limit_of(RLIMIT_NOFILE), "raise ulimit -n"};
    case ENFILE:
      return {"this host has no descriptor left", "raise sysctl fs.file-max"};
    case EAGAIN:
      if (!is(call, "pthread_create")) return {"too much memory is locked", "raise ulimit -l"};
      return {"this process may not have one more thread",
              "raise ulimit -u and the container's limit of pids"};
    case ENOSPC:
      return {"a limit of the kernel is reached", "raise sysctl fs.epoll.max_user_watches"};
    case EPERM:
    case EACCES:
    case ENOSYS:
      return {"this process may not make that call",
              std::string("allow ") + call + " in the container's seccomp profile and security policy"};
    default:
      return {};
  }
}

Result<UniqueFd> owned(int fd, Code code, const std::string& doing, const char* call) {
  if (fd < 0) return failed(code, doing, call, errno);
  return UniqueFd(fd);
}

bool control(int epoll, int operation, int fd, uint32_t events, uint64_t data) {
  if (refused("epoll_ctl")) return false;
  epoll_event event{events, {.u64 = data}};
  return ::epoll_ctl(epoll, operation, fd, &event) == 0;
}

}  // namespace

void refuse_calls(Refuses refuses) { refuses_call.store(refuses, std::memory_order_relaxed); }

Status failed(Code code, const std::string& doing, const char* call, int error) {
  const auto [what, fix] = cause_of(call, error);
  const std::string system = std::string(call) + ": " + std::strerror(error);
  return {code, doing + ": " + (what.empty() ? system : what + "; " + system), fix};
}

bool is_memory(const char* call, int error) {
  if (error == ENOMEM || error == ENOBUFS) return true;
  if (is(call, "ftruncate")) return error == EFBIG || error == EINVAL || error == ENOSPC;
  return is(call, "madvise") && (error == ENOSPC || error == EFAULT);
}

Status transport_failed(const std::string& doing, const char* call, int error) {
  const bool lacks = error == EMFILE || error == ENFILE || is_memory(call, error);
  return failed(lacks ? Code::kConfig : Code::kTransportUnavailable, doing, call, error);
}

Result<UniqueFd> event_fd(const std::string& doing, Code code) {
  const int fd = refused("eventfd") ? -1 : ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return owned(fd, code, doing, "eventfd");
}

Result<UniqueFd> epoll(const std::string& doing, Code code) {
  const int fd = refused("epoll_create1") ? -1 : ::epoll_create1(EPOLL_CLOEXEC);
  return owned(fd, code, doing, "epoll_create1");
}

Result<UniqueFd> timer(const std::string& doing, Code code) {
  const int fd =
      refused("timerfd_create") ? -1 : ::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
  return owned(fd, code, doing, "timerfd_create");
}

namespace {

/// The threads of the library take no signal that is for the process: its handlers run on threads of the
/// program. What a thread does wrong itself still reaches handlers that report crashes.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT})
      ::sigdelset(&all, fault);
    ::pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Result<std::thread> start_thread(const std::string& doing, const char* name, std::function<void()> body) {
  if (refused("pthread_create")) return failed(Code::kConfig, doing, "pthread_create", errno);
  const SignalsBlocked blocked;
  try {
    std::thread thread(std::move(body));
    ::pthread_setname_np(thread.native_handle(), name);  // for debuggers; nothing depends on it
    return thread;
  } catch (const std::system_error& error) {
    return failed(Code::kConfig, doing, "pthread_create", error.code().value());
  }
}

int make_memfd(const char* name, unsigned flags) {
  return refused("memfd_create") ? -1 : ::memfd_create(name, flags);
}

int set_size(int fd, uint64_t bytes) {
  return refused("ftruncate") ? -1 : ::ftruncate(fd, static_cast<off_t>(bytes));
}

int add_seals(int fd, int seals) { return refused("fcntl") ? -1 : ::fcntl(fd, F_ADD_SEALS, seals); }

void* map_shared(uint64_t bytes, int protection, int more_flags, int fd, uint64_t offset) {
  if (refused("mmap")) return MAP_FAILED;
  return ::mmap(nullptr, bytes, protection, MAP_SHARED | more_flags, fd, static_cast<off_t>(offset));
}

void* map_private(uint64_t bytes, int fd) {
  if (refused("mmap")) return MAP_FAILED;
  return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
}

int open_file(const char* path, int flags) { return refused("open") ? -1 : ::open(path, flags | O_CLOEXEC); }

int duplicate(int fd) { return refused("fcntl") ? -1 : ::fcntl(fd, F_DUPFD_CLOEXEC, 0); }

int socket(int family, int type) { return refused("socket") ? -1 : ::socket(family, type | SOCK_CLOEXEC, 0); }

ssize_t draw_random(void* into, size_t bytes) {
  return refused("getrandom") ? -1 : ::getrandom(into, bytes, 0);
}

bool watch(int epoll, int fd, uint32_t events, uint64_t data) {
  return control(epoll, EPOLL_CTL_ADD, fd, events, data);
}

bool rewatch(int epoll, int fd, uint32_t events, uint64_t data) {
  return control(epoll, EPOLL_CTL_MOD, fd, events, data);
}

bool set_nonblocking(int fd) {
  if (refused("fcntl")) return false;
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

bool set_option(int socket, int level, int option, const void* value, size_t bytes) {
  return !refused("setsockopt") &&
         ::setsockopt(socket, level, option, value, static_cast<socklen_t>(bytes)) == 0;
}

}  // namespace kvlink::sys

// SPDX-License-Identifier: Apache-2.0
// Wraps system calls that may be refused: descriptors, memory and threads can run out, and a container's
// rules can forbid a call. Every failure is checked here, and its message names the cause.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvlink::sys {

/// Returns a Status of `code` that says what was being done, which call failed, the cause of `error` (an
/// errno), and the fix.
Status failed(Code code, const std::string& doing, const char* call, int error);
/// For use at construction. A process that lacks descriptors, memory or threads gets kConfig. Any other
/// refusal concerns one transport: kTransportUnavailable.
Status transport_failed(const std::string& doing, const char* call, int error);
/// Returns whether `call` failed because memory is short.
bool is_memory(const char* call, int error);

// `doing` begins the message of a failure, which has `code`.
Result<UniqueFd> event_fd(const std::string& doing, Code code = Code::kConfig);
Result<UniqueFd> epoll(const std::string& doing, Code code = Code::kConfig);
Result<UniqueFd> timer(const std::string& doing, Code code = Code::kConfig);
/// Starts a thread named `name`, at most 15 characters. It takes no signal of the process.
Result<std::thread> start_thread(const std::string& doing, const char* name, std::function<void()> body);

// These return what the calls return: -1 with errno set on failure.
int make_memfd(const char* name, unsigned flags);
int set_size(int fd, uint64_t bytes);
int add_seals(int fd, int seals);
/// Returns MAP_FAILED with errno set on failure.
void* map_shared(uint64_t bytes, int protection, int more_flags, int fd, uint64_t offset);
void* map_private(uint64_t bytes, int fd);
int open_file(const char* path, int flags);
int duplicate(int fd);
int socket(int family, int type);
ssize_t draw_random(void* into, size_t bytes);
// These return false with errno set on failure.
bool watch(int epoll, int fd, uint32_t events, uint64_t data);
bool rewatch(int epoll, int fd, uint32_t events, uint64_t data);
bool set_nonblocking(int fd);
bool set_option(int socket, int level, int option, const void* value, size_t bytes);
template <typename T>
bool set_option(int socket, int level, int option, const T& value) {
  return set_option(socket, level, option, &value, sizeof value);
}

/// For tests: called before each call above with its name. If it does not return 0, the call fails with that
/// errno.
using Refuses = int (*)(const char* call);
void refuse_calls(Refuses refuses);

}  // namespace kvlink::sys

// SPDX-License-Identifier: Apache-2.0
// Stands for calls of the C library that may wait, in the thread of a test and as far as kvlink._core makes them. To be
// preloaded (LD_PRELOAD) by a Python.
//
// A thread that was armed as kWaits stops in the first of these calls until another thread releases it. If it holds the
// GIL, no other Python thread can do that: then it notes the call and goes on. A thread that was armed as kHolds stops
// with the first lock that it takes, or a later one, so that a waiting thread finds it taken.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { kNobody, kWaits, kHolds };
enum { kMuch = 64 << 10 };  // bytes of an allocation that takes the kernel long

static _Thread_local int role, inside, stopped, locks_before;
static sem_t arrived, released, held, let_go;
static atomic_int num_holding;
static char with_gil[4096];  // the names of calls, each with a blank behind it

static int has_gil(void) {
  static int (*check)(void);
  if (!check) check = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
  return check && check();
}

/// Whether the core made the call, or the C++ library or the CUDA driver for it. Python and its modules make some, too.
static int is_of_core(void* caller) {
  Dl_info where;
  if (!dladdr(caller, &where) || !where.dli_fname) return 0;
  const char* const slash = strrchr(where.dli_fname, '/');
  const char* const name = slash ? slash + 1 : where.dli_fname;
  return !strncmp(name, "_core.", 6) || !strncmp(name, "libstdc++", 9) || !strncmp(name, "libcuda.", 8);
}

static void wait_for(sem_t* semaphore) {
  while (sem_wait(semaphore) != 0) {
  }
}

static void note(const char* call) {
  strncat(with_gil, call, sizeof with_gil - strlen(with_gil) - 2);
  strcat(with_gil, " ");
}

static void meet(const char* call, void* caller) {
  if (role != kWaits || inside || !is_of_core(caller)) return;
  inside = 1;
  if (has_gil()) {
    note(call);
    if (atomic_exchange(&num_holding, 0) > 0) sem_post(&let_go);
  } else if (!stopped) {
    stopped = 1;
    sem_post(&arrived);
    wait_for(&released);
  }
  inside = 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define STAND_IN(returned, name, parameters, arguments) \
  returned name parameters;                             \
  returned name parameters {                            \
    static returned(*real) parameters;                  \
    if (!real) real = REAL(name);                       \
    meet(#name, __builtin_return_address(0));           \
    return real arguments;                              \
  }

struct sockaddr;
struct pollfd;
struct epoll_event;
struct msghdr;
struct iovec;
struct addrinfo;
STAND_IN(int, madvise, (void* at, size_t bytes, int how), (at, bytes, how))
STAND_IN(int, munmap, (void* at, size_t bytes), (at, bytes))
STAND_IN(int, posix_fallocate, (int fd, long at, long bytes), (fd, at, bytes))
STAND_IN(void*, dlopen, (const char* name, int how), (name, how))
STAND_IN(int, getaddrinfo,
         (const char* host, const char* port, const struct addrinfo* hints, struct addrinfo** found),
         (host, port, hints, found))
STAND_IN(int, connect, (int fd, const struct sockaddr* to, unsigned bytes), (fd, to, bytes))
STAND_IN(ssize_t, recv, (int fd, void* into, size_t bytes, int how), (fd, into, bytes, how))
STAND_IN(ssize_t, recvmsg, (int fd, struct msghdr* into, int how), (fd, into, how))
STAND_IN(int, poll, (struct pollfd * fds, unsigned long num, int ms), (fds, num, ms))
STAND_IN(int, ppoll, (struct pollfd * fds, unsigned long num, const struct timespec* wait, const void* mask),
         (fds, num, wait, mask))
STAND_IN(int, epoll_wait, (int fd, struct epoll_event* events, int num, int ms), (fd, events, num, ms))
STAND_IN(ssize_t, process_vm_readv,
         (int pid, const struct iovec* to, unsigned long num, const struct iovec* from, unsigned long count,
          unsigned long flags),
         (pid, to, num, from, count, flags))
STAND_IN(int, pthread_join, (pthread_t thread, void** result), (thread, result))
STAND_IN(int, pthread_cond_clockwait,
         (pthread_cond_t * changed, pthread_mutex_t* mutex, int clock, const struct timespec* until),
         (changed, mutex, clock, until))

void* _Znwm(size_t bytes);  // operator new
void* _Znwm(size_t bytes) {
  if (bytes >= kMuch) meet("new", __builtin_return_address(0));
  void* const made = malloc(bytes ? bytes : 1);
  if (!made) abort();
  return made;
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static int (*real)(pthread_mutex_t*);
  if (!real) real = REAL(pthread_mutex_lock);
  if (role == kNobody) return real(mutex);
  void* const caller = __builtin_return_address(0);
  meet("pthread_mutex_lock", caller);
  const int error = real(mutex);
  if (role == kHolds && !stopped && is_of_core(caller) && locks_before-- == 0) {
    stopped = 1;
    if (has_gil()) note("the_holder");
    atomic_store(&num_holding, !has_gil());
    sem_post(&held);
    if (!has_gil()) wait_for(&let_go);
  }
  return error;
}

// For the test. Those that wait are to be called without the GIL, the others with it.
void kvlink_reset(void) {
  with_gil[0] = 0;
  sem_init(&arrived, 0, 0);
  sem_init(&released, 0, 0);
  sem_init(&held, 0, 0);
  sem_init(&let_go, 0, 0);
  atomic_store(&num_holding, 0);
}
void kvlink_arm(int as, int skipped) {
  role = as;
  stopped = 0;
  locks_before = skipped;
}
/// Returns whether the thread stopped in a call.
int kvlink_disarm(void) {
  role = kNobody;
  if (!stopped) sem_post(&arrived);
  return stopped;
}
void kvlink_await_held(void) { wait_for(&held); }
void kvlink_await_arrival(void) { wait_for(&arrived); }
void kvlink_release(void) {
  sem_post(&released);
  if (atomic_exchange(&num_holding, 0) > 0) sem_post(&let_go);
}
const char* kvlink_calls_with_gil(void) { return with_gil; }

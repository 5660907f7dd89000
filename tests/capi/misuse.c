// SPDX-License-Identifier: Apache-2.0
/* What a program may do wrong with the library: each call returns a code, and none crashes. Prints the line
 * that was not as it should be. */
#define _GNU_SOURCE
#include <dirent.h>
#include <inttypes.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capi/kvlink.h"

static kvl_error error = {.size = sizeof error};
static unsigned char out[1 << 16];
static uint64_t length;
static int checks;

#define IS(expected, call)                                                                           \
  do {                                                                                               \
    const int32_t got = (call);                                                                      \
    ++checks;                                                                                        \
    if (got != (expected)) {                                                                         \
      printf("line %d: %s returned %d, not %d: %s\n", __LINE__, #call, got, (expected), error.text); \
      exit(1);                                                                                       \
    }                                                                                                \
  } while (0)
#define HOLDS(condition)                                 \
  do {                                                   \
    ++checks;                                            \
    if (!(condition)) {                                  \
      printf("line %d: not %s\n", __LINE__, #condition); \
      exit(1);                                           \
    }                                                    \
  } while (0)

static kvl_plane plane;
static const kvl_layout kLayout = {.size = sizeof kLayout,
                                   .dtype = "float16",
                                   .num_blocks = 4,
                                   .block_tokens = 4,
                                   .total_heads = 1,
                                   .num_heads = 1,
                                   .row_bytes = 16,
                                   .block_stride = 64,
                                   .token_stride = 16,
                                   .head_stride = 16,
                                   .planes = &plane,
                                   .num_planes = 1};
static const kvl_worker_options kOptions = {
    .size = sizeof kOptions, .worker_id = "one", .transports = "loopback"};

static kvl_handle make_worker(kvl_handle* region) {
  kvl_handle worker;
  void* base;
  uint32_t index;
  IS(KVL_OK, kvl_region_alloc(4096, 0, region, &base, &error));
  IS(KVL_OK, kvl_worker_open(&kOptions, &worker, &error));
  IS(KVL_OK, kvl_worker_add_region(worker, *region, &index, &error));
  HOLDS(index == 0);
  IS(KVL_OK, kvl_worker_add_group(worker, &kLayout, &error));
  IS(KVL_OK, kvl_worker_start(worker, &error));
  return worker;
}

/* All calls with one handle for every object, and without anything else. */
static void try_all(int32_t code, kvl_handle handle) {
  int32_t fd;
  uint32_t number;
  kvl_handle made;
  kvl_event events[1] = {{.size = sizeof events[0]}};
  kvl_pull_stats pulled = {.size = sizeof pulled};
  kvl_worker_stats counted = {.size = sizeof counted};
  const kvl_offer_options offer = {.size = sizeof offer, .request_id = "request"};
  kvl_pull_options pull = {.size = sizeof pull, .peer = handle, .plan = handle};
  IS(code, kvl_worker_add_region(handle, handle, &number, &error));
  IS(code, kvl_worker_add_group(handle, &kLayout, &error));
  IS(code, kvl_worker_start(handle, &error));
  IS(code, kvl_worker_card(handle, out, sizeof out, &length, &error));
  IS(code, kvl_answer(handle, 0, out, 1, out, sizeof out, &length, &error));
  IS(code, kvl_worker_count(handle, &counted, &error));
  IS(code, kvl_event_fd(handle, &fd, &error));
  IS(code, kvl_events(handle, events, 1, &number, &error));
  IS(code, kvl_peer_open(handle, out, 1, 0, &made, &error));
  IS(code, kvl_peer_step(handle, NULL, 0, out, sizeof out, &length, &error));
  IS(code, kvl_peer_connect(handle, 0, &error));
  IS(code, kvl_peer_wait(handle, 0, &error));
  IS(code, kvl_offer_open(handle, &offer, &made, &error));
  IS(code, kvl_offer_ticket(handle, out, sizeof out, &length, &error));
  IS(code, kvl_offer_set_ready(handle, 1, &error));
  IS(code, kvl_offer_extend(handle, 1, &error));
  IS(code, kvl_offer_abort(handle, &error));
  IS(code, kvl_plan_make(&pull, &made, &error));
  IS(code, kvl_pull_start(&pull, &made, &error));
  IS(code, kvl_release(&pull, &error));
  pull.plan = 0;
  IS(code, kvl_pull_start(&pull, NULL, &error));
  IS(code, kvl_pull_wait(handle, 0, &error));
  IS(code, kvl_pull_cancel(handle, &error));
  IS(code, kvl_pull_count(handle, &pulled, &error));
  IS(code, kvl_explain(handle, (char*)out, sizeof out, &length, &error));
  IS(code, kvl_close(handle, &error));
}

static void nothing(void) {
  kvl_handle made;
  void* base;
  kvl_about_info about = {.size = sizeof about};
  IS(KVL_OK, kvl_about(&about, NULL));
  HOLDS(about.version_major == KVL_VERSION_MAJOR && about.protocol_version > 0);
  IS(KVL_CONFIG, kvl_about(NULL, &error));
  IS(KVL_CONFIG, kvl_region_alloc(1, 0, NULL, &base, &error));
  IS(KVL_CONFIG, kvl_region_alloc(1, 0, &made, NULL, &error));
  IS(KVL_CONFIG, kvl_region_alloc(0, 0, &made, &base, &error));
  IS(KVL_CONFIG, kvl_region_alloc(1, 64, &made, &base, &error));
  IS(KVL_CONFIG, kvl_region_alloc(UINT64_MAX, 0, &made, &base, &error));
  IS(KVL_CONFIG, kvl_region_wrap(NULL, 1, &made, &error));
  IS(KVL_CONFIG, kvl_region_wrap(out, 0, &made, &error));
  IS(KVL_CONFIG, kvl_worker_open(NULL, &made, &error));
  IS(KVL_CONFIG, kvl_worker_open(&kOptions, NULL, &error));
  IS(KVL_CONFIG, kvl_ticket_read(NULL, 1, NULL, &error));
  IS(KVL_CONFIG, kvl_plan_make(NULL, &made, &error));
  IS(KVL_CONFIG, kvl_pull_start(NULL, &made, NULL));
  IS(KVL_CONFIG, kvl_release(NULL, &error));
}

static void options(void) {
  kvl_handle made;
  kvl_worker_options wrong = kOptions;
  wrong.worker_id = NULL;
  IS(KVL_CONFIG, kvl_worker_open(&wrong, &made, &error));
  wrong = kOptions;
  for (int at = 0; at < 3; ++at) {
    wrong.size = (const uint32_t[]){0, 3, UINT32_MAX}[at];
    IS(KVL_CONFIG, kvl_worker_open(&wrong, &made, &error));
    HOLDS(strstr(error.text, "sizeof"));
  }
  wrong = kOptions;
  wrong.transports = "cuda";
  IS(KVL_CONFIG, kvl_worker_open(&wrong, &made, &error));
  HOLDS(strstr(error.text, "Python"));
  wrong.transports = "pigeon";
  IS(KVL_CONFIG, kvl_worker_open(&wrong, &made, &error));
  wrong = kOptions;
  wrong.port = 65536;
  IS(KVL_CONFIG, kvl_worker_open(&wrong, &made, &error));
  wrong = kOptions;
  wrong.channel_port = 7000; /* and does not listen */
  IS(KVL_CONFIG, kvl_worker_open(&wrong, &made, &error));
  wrong.flags = KVL_WORKER_CHANNEL;
  wrong.channel_port = 65536;
  IS(KVL_CONFIG, kvl_worker_open(&wrong, &made, &error));
  wrong.size = offsetof(kvl_worker_options, channel_port); /* that of version 1.0, which has no more fields */
  IS(KVL_OK, kvl_worker_open(&wrong, &made, &error));
  IS(KVL_OK, kvl_close(made, &error));
  wrong.flags = 2;
  IS(KVL_CONFIG, kvl_worker_open(&wrong, &made, &error));
  wrong = kOptions;
  wrong.ticket_keys = "short";
  IS(KVL_CONFIG, kvl_worker_open(&wrong, &made, &error));
  struct {
    kvl_worker_options known;
    uint64_t later;
  } newer = {kOptions, 0};
  newer.known.size = sizeof newer;
  IS(KVL_OK, kvl_worker_open(&newer.known, &made, &error));
  IS(KVL_OK, kvl_close(made, &error));
  newer.later = 1;
  IS(KVL_CONFIG, kvl_worker_open(&newer.known, &made, &error));
  HOLDS(strstr(error.text, "does not know"));
  memset(out, 'x', 5000);
  out[5000] = 0;
  wrong = kOptions;
  wrong.worker_id = (const char*)out;
  IS(KVL_CONFIG, kvl_worker_open(&wrong, &made, &error));
}

static void layouts(void) {
  kvl_handle worker, region;
  uint32_t index;
  void* base;
  IS(KVL_OK, kvl_worker_open(&kOptions, &worker, &error));
  IS(KVL_CONFIG, kvl_worker_start(worker, &error));
  IS(KVL_CONFIG, kvl_worker_add_group(worker, NULL, &error));
  kvl_layout wrong = kLayout;
  wrong.num_planes = UINT32_MAX;
  IS(KVL_CONFIG, kvl_worker_add_group(worker, &wrong, &error));
  wrong = kLayout;
  wrong.tp_rank = 5;
  IS(KVL_CONFIG, kvl_worker_add_group(worker, &wrong, &error));
  wrong = kLayout;
  wrong.num_blocks = UINT32_MAX;
  IS(KVL_OK, kvl_worker_add_group(worker, &wrong, &error));
  IS(KVL_OK, kvl_region_alloc(4096, 0, &region, &base, &error));
  IS(KVL_OK, kvl_worker_add_region(worker, region, &index, &error));
  IS(KVL_CONFIG, kvl_worker_add_region(worker, region, &index, &error));
  IS(KVL_CONFIG, kvl_worker_start(worker, &error));
  IS(KVL_CONFIG, kvl_worker_card(worker, out, sizeof out, &length, &error));
  IS(KVL_CONFIG, kvl_close(region, &error));
  IS(KVL_OK, kvl_close(worker, &error));
  IS(KVL_OK, kvl_close(region, &error));
}

/* Returns a peer that is connected to its own worker. */
static kvl_handle connect(kvl_handle worker) {
  static unsigned char card[1 << 16], message[1 << 16];
  uint64_t card_bytes, message_bytes;
  kvl_handle peer;
  IS(KVL_BUFFER, kvl_worker_card(worker, NULL, 0, &card_bytes, &error));
  IS(KVL_OK, kvl_worker_card(worker, card, sizeof card, &length, &error));
  HOLDS(length == card_bytes);
  for (uint64_t at = 0; at < card_bytes; ++at) {
    card[at] ^= 1;
    HOLDS(kvl_peer_open(worker, card, card_bytes, 0, &peer, &error) != KVL_OK);
    card[at] ^= 1;
    HOLDS(kvl_peer_open(worker, card, at, 0, &peer, &error) != KVL_OK);
  }
  IS(KVL_OK, kvl_peer_open(worker, card, card_bytes, 0, &peer, &error));
  kvl_pull_options pull = {.size = sizeof pull, .peer = peer};
  IS(KVL_CONFIG, kvl_pull_start(&pull, NULL, &error));
  IS(KVL_BUFFER, kvl_peer_step(peer, NULL, 0, NULL, 0, &message_bytes, &error));
  IS(KVL_OK, kvl_peer_step(peer, NULL, 0, message, sizeof message, &message_bytes, &error));
  IS(KVL_BUFFER, kvl_answer(worker, 0, message, message_bytes, out, 0, &length, &error));
  IS(KVL_OK, kvl_answer(worker, 0, message, message_bytes, out, length, &length, &error));
  IS(KVL_OK, kvl_peer_step(peer, out, length, message, sizeof message, &message_bytes, &error));
  HOLDS(message_bytes == 0);
  IS(KVL_OK, kvl_peer_step(peer, NULL, 0, message, sizeof message, &message_bytes, &error));
  HOLDS(message_bytes == 0);
  return peer;
}

static void refused_peer(kvl_handle worker) {
  kvl_handle peer;
  uint64_t card_bytes;
  IS(KVL_OK, kvl_worker_card(worker, out, sizeof out, &card_bytes, &error));
  IS(KVL_OK, kvl_peer_open(worker, out, card_bytes, 0, &peer, &error));
  IS(KVL_OK, kvl_peer_step(peer, NULL, 0, out, sizeof out, &length, &error));
  IS(KVL_CONFIG, kvl_answer(worker, 0, out, length / 2, out + 1000, 1000, &length, &error));
  IS(KVL_CONFIG, kvl_peer_step(peer, out + 1000, length, out, sizeof out, &length, &error));
  HOLDS(strstr(error.text, "malformed ConnectRequest"));
  IS(KVL_CONFIG, kvl_peer_step(peer, NULL, 0, out, sizeof out, &length, &error));
  IS(KVL_OK, kvl_close(peer, &error));
}

/* Waits for the event of an offer. */
static void await_end(kvl_handle worker, kvl_handle offer) {
  kvl_event event = {.size = sizeof event};
  uint32_t number;
  struct pollfd readable = {.events = POLLIN};
  IS(KVL_OK, kvl_event_fd(worker, &readable.fd, &error));
  do {
    HOLDS(poll(&readable, 1, -1) == 1);
    IS(KVL_OK, kvl_events(worker, &event, 1, &number, &error));
  } while (number == 0);
  HOLDS(event.kind == KVL_EVENT_OFFER_ENDED && event.handle == offer && event.code == KVL_OK);
}

static void offers(kvl_handle worker, kvl_handle peer) {
  uint32_t blocks[] = {0, 0};
  kvl_handle offer, made;
  kvl_offer_options wrong = {
      .size = sizeof wrong, .request_id = "request", .blocks = blocks, .num_blocks = 1, .num_tokens = 4};
  IS(KVL_CONFIG, kvl_offer_open(worker, NULL, &offer, &error));
  IS(KVL_OK, kvl_offer_open(worker, &wrong, &offer, &error));
  IS(KVL_BUFFER, kvl_offer_ticket(offer, NULL, 0, &length, &error));
  IS(KVL_OK, kvl_offer_ticket(offer, out, sizeof out, &length, &error));
  kvl_ticket_info info = {.size = sizeof info};
  IS(KVL_OK, kvl_ticket_read(out, length, &info, &error));
  HOLDS(info.num_blocks == 1 && info.num_tokens == 4 && strcmp(info.worker_id, "one") == 0);
  for (uint64_t at = 0; at < length; ++at) {
    out[at] ^= 1;
    IS(KVL_CONFIG, kvl_ticket_read(out, length, &info, &error));
    out[at] ^= 1;
    IS(KVL_CONFIG, kvl_ticket_read(out, at, &info, &error));
  }
  kvl_pull_options pull = {.size = sizeof pull,
                           .peer = peer,
                           .ticket = out,
                           .ticket_bytes = length,
                           .blocks = blocks,
                           .num_blocks = 1};
  pull.seat = 1;
  IS(KVL_CONFIG, kvl_pull_start(&pull, NULL, &error));
  pull.seat = 0;
  pull.end_token = 5;
  IS(KVL_CONFIG, kvl_pull_start(&pull, NULL, &error));
  pull.end_token = 0;
  blocks[0] = 99;
  IS(KVL_CONFIG, kvl_pull_start(&pull, NULL, &error));
  blocks[0] = 1;
  pull.timeout_us = UINT64_MAX;
  IS(KVL_CONFIG, kvl_pull_start(&pull, NULL, &error));
  pull.timeout_us = 0;
  IS(KVL_OK, kvl_plan_make(&pull, &made, &error));
  IS(KVL_OK, kvl_pull_start(&pull, NULL, &error));
  await_end(worker, offer);
  IS(KVL_STALE_BLOCKS, kvl_pull_start(&pull, NULL, &error));
  HOLDS(error.stale == 1);
  pull.plan = made;
  IS(KVL_STALE_BLOCKS, kvl_pull_start(&pull, NULL, &error));
  IS(KVL_HANDLE, kvl_pull_wait(made, 0, &error));
  IS(KVL_ENDED, kvl_offer_abort(offer, &error));
  blocks[0] = 99;
  IS(KVL_CONFIG, kvl_offer_open(worker, &wrong, &offer, &error));
  blocks[0] = 0, wrong.num_blocks = 2, wrong.num_tokens = 8;
  IS(KVL_CONFIG, kvl_offer_open(worker, &wrong, &offer, &error));
  HOLDS(strstr(error.text, "twice"));
}

static void small_errors(void) {
  struct {
    kvl_error known;
    char guard;
  } small = {{.size = 30}, 'g'};
  memset(small.known.text, 'z', sizeof small.known.text);
  IS(KVL_HANDLE, kvl_close(77, &small.known));
  HOLDS(strlen(small.known.text) == 17 && small.known.text[18] == 'z');
  small.known.size = 4;
  IS(KVL_HANDLE, kvl_close(77, &small.known));
  small.known.size = UINT32_MAX;
  IS(KVL_HANDLE, kvl_close(77, &small.known));
}

/* Returns the signals that a thread blocks, or 0 if there is no such thread. */
static uint64_t blocked_by(pid_t thread) {
  char path[64], line[256];
  uint64_t blocked = 0;
  snprintf(path, sizeof path, "/proc/self/task/%d/status", (int)thread);
  FILE* const status = fopen(path, "r");
  while (status && fgets(line, sizeof line, status)) sscanf(line, "SigBlk: %" SCNx64, &blocked);
  if (status) fclose(status);
  return blocked;
}

/* Signals for the process interrupt its own threads, not those of the library. */
static void signals(void) {
  const uint64_t term = 1u << (SIGTERM - 1), fault = 1u << (SIGSEGV - 1);
  int found = 0;
  DIR* const threads = opendir("/proc/self/task");
  for (const struct dirent* entry; (entry = readdir(threads));) {
    const pid_t thread = (pid_t)atoi(entry->d_name);
    uint64_t blocked;
    if (thread <= 0 || thread == getpid()) continue;
    while ((blocked = blocked_by(thread)) & fault) sched_yield(); /* until it runs, libc blocks all */
    found += (blocked & term) != 0;
  }
  closedir(threads);
  HOLDS(found >= 2);
}

/* LeakSanitizer stops the threads that were there before a fork, so it cannot check a forked child. */
static int in_child;
int __lsan_is_turned_off(void) { return in_child; }

static void forked(kvl_handle worker) {
  const pid_t child = fork();
  if (child == 0) {
    in_child = 1;
    kvl_about_info about = {.size = sizeof about};
    kvl_ticket_info info = {.size = sizeof info};
    kvl_handle made;
    void* base;
    try_all(KVL_FORKED, worker);
    IS(KVL_FORKED, kvl_about(&about, &error));
    IS(KVL_FORKED, kvl_ticket_read(out, 1, &info, &error));
    IS(KVL_FORKED, kvl_region_alloc(1, 0, &made, &base, &error));
    IS(KVL_FORKED, kvl_region_wrap(out, 1, &made, &error));
    IS(KVL_FORKED, kvl_worker_open(&kOptions, &made, &error));
    exit(0);
  }
  int status;
  waitpid(child, &status, 0);
  HOLDS(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
  kvl_handle region, second;
  nothing();
  options();
  layouts();
  small_errors();
  const kvl_handle worker = make_worker(&region);
  signals();
  const kvl_handle peer = connect(worker);
  refused_peer(worker);
  offers(worker, peer);
  try_all(KVL_HANDLE, 0);
  try_all(KVL_HANDLE, UINT64_MAX);
  forked(worker);
  IS(KVL_OK, kvl_close(worker, &error));
  try_all(KVL_HANDLE, worker);
  IS(KVL_HANDLE, kvl_explain(peer, (char*)out, sizeof out, &length, &error));
  const kvl_handle other = make_worker(&second); /* in the place of a closed one */
  try_all(KVL_HANDLE, worker);
  IS(KVL_OK, kvl_close(region, &error));
  connect(other); /* and it is not closed: the process ends with it */
  printf("%d checks passed\n", checks);
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
/* Calls of several threads beside each other, of which one closes what the others use, or guesses a handle
 * that is being made. Prints the line that was not as it should be; TSan finds the rest. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "capi/kvlink.h"

enum { OFFERS = 3000, ROUNDS = 100 };

#define IS(expected, call)                                                                \
  do {                                                                                    \
    const int32_t got = (call);                                                           \
    if (got != (expected)) {                                                              \
      printf("line %d: %s returned %d, not %d\n", __LINE__, #call, got, (int)(expected)); \
      exit(1);                                                                            \
    }                                                                                     \
  } while (0)
#define ONE_OF(call, ...)                                                                        \
  do {                                                                                           \
    const int32_t got = (call), wanted[] = {__VA_ARGS__};                                        \
    int found = 0;                                                                               \
    for (size_t at = 0; at < sizeof wanted / sizeof wanted[0]; ++at) found |= got == wanted[at]; \
    if (!found) {                                                                                \
      printf("line %d: %s returned %d: %s\n", __LINE__, #call, got, error.text);                 \
      exit(1);                                                                                   \
    }                                                                                            \
  } while (0)

static kvl_handle owner;
static char card[1 << 16];
static uint64_t card_bytes;
static kvl_handle region;
static pthread_barrier_t ready;

static kvl_handle make_worker(const char* name, uint32_t flags) {
  static kvl_plane plane;
  const kvl_layout layout = {.size = sizeof layout,
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
  const kvl_worker_options options = {
      .size = sizeof options, .flags = flags, .worker_id = name, .transports = "loopback"};
  kvl_handle worker;
  uint32_t index;
  IS(KVL_OK, kvl_worker_open(&options, &worker, NULL));
  IS(KVL_OK, kvl_worker_add_region(worker, region, &index, NULL));
  IS(KVL_OK, kvl_worker_add_group(worker, &layout, NULL));
  IS(KVL_OK, kvl_worker_start(worker, NULL));
  return worker;
}

static pthread_t start(void* (*run)(void*), kvl_handle* with) {
  pthread_t thread;
  IS(0, pthread_create(&thread, NULL, run, with));
  return thread;
}

/* Tickets of offers that are being opened: none, or all of it. */

static _Atomic kvl_handle last_offer;
static atomic_int offers_done;

static kvl_handle open_offer(kvl_handle worker, int32_t* code) {
  const uint32_t block = 1;
  const kvl_offer_options options = {
      .size = sizeof options, .request_id = "request", .blocks = &block, .num_blocks = 1, .num_tokens = 4};
  kvl_handle offer = 0;
  *code = kvl_offer_open(worker, &options, &offer, NULL);
  return offer;
}

static void* guess(void* unused) {
  (void)unused;
  kvl_error error = {.size = sizeof error};
  char ticket[1024];
  while (!atomic_load(&offers_done)) {
    uint64_t bytes = 0;
    const kvl_handle next = atomic_load(&last_offer) + (UINT64_C(1) << 32); /* of the same place */
    const int32_t code = kvl_offer_ticket(next, ticket, sizeof ticket, &bytes, &error);
    ONE_OF(code, KVL_OK, KVL_HANDLE);
    if (code == KVL_OK && bytes == 0) {
      printf("an offer without a ticket has a handle\n");
      exit(1);
    }
  }
  return NULL;
}

static void guess_offers(void) {
  const pthread_t thread = start(guess, NULL);
  for (int at = 0; at < OFFERS; ++at) {
    int32_t code;
    const kvl_handle offer = open_offer(owner, &code);
    IS(KVL_OK, code);
    IS(KVL_OK, kvl_offer_abort(offer, NULL));
    IS(KVL_OK, kvl_close(offer, NULL));
    atomic_store(&last_offer, offer);
  }
  atomic_store(&offers_done, 1);
  pthread_join(thread, NULL);
}

/* A peer that is closed while it connects. */

static void* step(void* peer) {
  static char message[1 << 16], answer[1 << 16];
  kvl_error error = {.size = sizeof error};
  uint64_t bytes = 0, answered = 0;
  pthread_barrier_wait(&ready);
  for (;;) {
    const int32_t code =
        kvl_peer_step(*(kvl_handle*)peer, answer, answered, message, sizeof message, &bytes, &error);
    ONE_OF(code, KVL_OK, KVL_HANDLE, KVL_CANCELLED);
    if (code != KVL_OK || bytes == 0) return NULL;
    /* The owner refuses lanes that were closed meanwhile, and its answer says so. */
    ONE_OF(kvl_answer(owner, 1, message, bytes, answer, sizeof answer, &answered, &error), KVL_OK,
           KVL_ACCESS_DENIED);
  }
}

static void* wait(void* peer) {
  kvl_error error = {.size = sizeof error};
  pthread_barrier_wait(&ready);
  ONE_OF(kvl_peer_wait(*(kvl_handle*)peer, UINT64_MAX, &error), KVL_OK, KVL_HANDLE, KVL_CANCELLED);
  return NULL;
}

static void* look(void* peer) {
  kvl_error error = {.size = sizeof error};
  char text[4096];
  uint64_t bytes;
  pthread_barrier_wait(&ready);
  for (int at = 0; at < 20; ++at)
    ONE_OF(kvl_explain(*(kvl_handle*)peer, text, sizeof text, &bytes, &error), KVL_OK, KVL_HANDLE);
  return NULL;
}

static void close_peers(kvl_handle reader, int by_channel) {
  for (int at = 0; at < ROUNDS; ++at) {
    kvl_handle peer;
    IS(KVL_OK, kvl_peer_open(reader, card, card_bytes, 0, &peer, NULL));
    if (by_channel) IS(KVL_OK, kvl_peer_connect(peer, 0, NULL));
    const pthread_t connecting = start(by_channel ? wait : step, &peer), looking = start(look, &peer);
    pthread_barrier_wait(&ready);
    for (int spin = 0; spin < at * 100; ++spin) atomic_signal_fence(memory_order_seq_cst);
    IS(KVL_OK, kvl_close(peer, NULL));
    pthread_join(connecting, NULL);
    pthread_join(looking, NULL);
    IS(KVL_HANDLE, kvl_close(peer, NULL));
  }
}

/* A worker that is closed while it gets peers and offers: none of them has a handle afterwards. */

static kvl_handle late_peer, late_offer;

static void* add(void* worker) {
  const kvl_handle to = *(kvl_handle*)worker;
  kvl_error error = {.size = sizeof error};
  int32_t code;
  pthread_barrier_wait(&ready);
  ONE_OF(kvl_peer_open(to, card, card_bytes, 0, &late_peer, &error), KVL_OK, KVL_HANDLE, KVL_CANCELLED);
  ONE_OF(kvl_peer_connect(late_peer, 0, &error), KVL_OK, KVL_HANDLE, KVL_CANCELLED);
  late_offer = open_offer(to, &code);
  (void)code;
  return NULL;
}

static void close_workers(void) {
  for (int at = 0; at < ROUNDS; ++at) {
    kvl_handle worker = make_worker("brief", 0);
    const pthread_t adding = start(add, &worker), looking = start(look, &worker);
    pthread_barrier_wait(&ready);
    for (int spin = 0; spin < at * 100; ++spin) atomic_signal_fence(memory_order_seq_cst);
    IS(KVL_OK, kvl_close(worker, NULL));
    pthread_join(adding, NULL);
    pthread_join(looking, NULL);
    IS(KVL_HANDLE, kvl_close(late_peer, NULL));
    IS(KVL_HANDLE, kvl_close(late_offer, NULL));
  }
}

int main(void) {
  void* base;
  IS(KVL_OK, kvl_region_alloc(4096, 0, &region, &base, NULL));
  owner = make_worker("owner", KVL_WORKER_CHANNEL);
  IS(KVL_OK, kvl_worker_card(owner, card, sizeof card, &card_bytes, NULL));
  pthread_barrier_init(&ready, NULL, 3);
  const kvl_handle reader = make_worker("reader", 0);
  guess_offers();
  close_peers(reader, 0);
  close_peers(reader, 1);
  close_workers();
  IS(KVL_OK, kvl_close(reader, NULL));
  IS(KVL_OK, kvl_close(owner, NULL));
  IS(KVL_OK, kvl_close(region, NULL));
  printf("nothing was wrong\n");
  return 0;
}
